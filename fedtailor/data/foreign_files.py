"""Foreign files: a damaged one is refused in one sentence, and none may take more memory than there is for data.

A file can claim any size, and a small one can unpack to a very large one: sizes are checked before they are believed.
"""

import gzip
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

from fedtailor._common.errors import FedtailorError, shown
from fedtailor._common.memory import half_of_memory

LIMIT = "FEDTAILOR_DATA_LIMIT"  # the environment variable, in GB
PIECE = 1 << 20
END_RECORD = 22 + 65_535  # bytes of a zip file's end record, with the longest comment
MANY_ENTRIES = 65_535  # stands for this number of members, or more


def damaged(path: str | Path, why: str = "it is truncated or damaged") -> FedtailorError:
    """Make the error for a file that cannot be read. It may be a member of an archive, with a name of anybody's."""
    name = str(path) if str(path).isprintable() else shown(str(path), 200)
    return FedtailorError(f"The file {name} cannot be read: {why}; get or make it anew.")


@contextmanager
def reading(path: str | Path, why: str = "it is truncated or damaged") -> Iterator[None]:
    """Refuse a file that its parser cannot read. Whatever that raises: a damaged file can make it raise anything."""
    try:
        yield
    except FedtailorError:
        raise
    except MemoryError:
        raise FedtailorError(f"The file {path} needs more memory than there is: make it smaller.") from None
    except OSError as error:
        if error.errno is None:  # not the system's, but of gzip or of an image
            raise damaged(path, why) from None
        raise FedtailorError(f"The file {path} cannot be read: {error.strerror}.") from None
    except Exception:
        raise damaged(path, why) from None


def data_limit() -> float:
    """Return the bytes that a data set may take: half of the memory, or FEDTAILOR_DATA_LIMIT in GB."""
    if said := os.environ.get(LIMIT):
        try:
            limit = 1e9 * float(said)
        except ValueError:
            limit = -1
        if not isfinite(limit) or limit <= 0:
            raise FedtailorError(f"{LIMIT} is {said!r}: give the GB that data may take in memory, for example 8.")
        return limit
    return half_of_memory()


def check_size(path: str | Path, size: float) -> None:
    """Refuse data that would take more memory than there is for them."""
    if size > (limit := data_limit()):
        raise FedtailorError(
            f"The data in {path} would take {size / 1e9:.3g} GB of memory or more, but {limit / 1e9:.3g} GB is the "
            f"most: make them smaller, or set {LIMIT} (in GB)."
        )


def read_gzip(path: Path) -> bytes | bytearray:
    """Read a file, unpacked if it is a gzip file. It is read to its end, where its checksum and length are."""
    with reading(path):
        with path.open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return path.read_bytes()
        content = bytearray()
        with gzip.open(path) as stream:
            while piece := stream.read(PIECE):
                content += piece
                check_size(path, len(content))
        return content


def check_archive(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a zip file whose members would take too much memory, or are not those of its directory.

    No more is unpacked of a member than it claims, and its checksum is looked at. The directory has none, but the
    number of its entries is in the end record, and the names are with the members too.
    """
    members = archive.infolist()
    check_size(path, sum(member.file_size for member in members))
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - END_RECORD))
        tail = file.read()
    entries = int.from_bytes(tail[(end := tail.rfind(b"PK\x05\x06")) + 10 : end + 12], "little")
    if entries not in (len(members), MANY_ENTRIES):
        raise damaged(path)
    for member in members:
        archive.open(member).close()  # it compares the names

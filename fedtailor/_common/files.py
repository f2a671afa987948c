"""Files that are there whole or not at all, that are never written through links, and that show when they are damaged.

A record is sealed: the last entry of its JSON is a checksum of all bytes before it. A line of a growing file is sealed
together with the lines before it.
"""

import errno
import json
import os
import stat
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from fedtailor._common.errors import FedtailorError

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]  # a whole number in a file: no arithmetic with it can fail
T = TypeVar("T")

DIGITS = 32  # of a checksum: 128 bits, and half the length of the whole one
MARK = b'"checksum": "'
PRETTY = "\n  "  # before an entry of JSON that is written for people
AT_ONCE = 16  # files on their way to the disk at a time
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# --- writing ---


def write_atomically(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Write a file under a temporary name and rename it. A `durable` one also survives a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        if os.path.lexists(temporary):  # what a killed process left, or a link to somewhere else
            temporary.unlink()
        try:
            with _open(temporary, "xb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # half a file on a full disk is in the way
            raise
        if durable:
            fsync_directory(path.parent)


def append(path: Path, content: bytes, end: int) -> None:
    """Write at the end of a file, which is at `end`: if it is elsewhere, somebody else writes in the file too."""
    with writing(path), _open(path, "ab") as file:
        if os.fstat(file.fileno()).st_size != end:
            raise FedtailorError(
                f"{path} was changed while this run wrote in it: end whatever else writes there, and resume the run."
            )
        file.write(content)


def truncate(path: Path, end: int) -> None:
    """Cut a file off."""
    with writing(path), _open(path, "rb+") as file:
        file.truncate(end)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system into a sentence that names the file, and says what to do."""
    try:
        yield
    except OSError as error:
        cure = "make room for it" if error.errno in _FULL else "choose another place, or mend this one"
        raise FedtailorError(
            f"{path} cannot be written ({error.strerror}): {cure}, and start again (a run: `fedtailor resume`)."
        ) from error


def remove(path: Path) -> None:
    """Remove a file, if there is one."""
    with writing(path):
        path.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Make a directory, and those above it, so that they survive a power cut."""
    with writing(path):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(new):
            fsync_directory(folder.parent)


def fsync_file(path: Path) -> None:
    """Have the system write a file to the disk itself."""
    with writing(path), _open(path, "rb+") as file:
        os.fsync(file.fileno())


def fsync_files(paths: Sequence[Path]) -> None:
    """Have the system write files to the disk itself. Many are on their way at a time: it writes them together, many
    times as fast as in turn. This thread takes part, and does the work alone where no others can be started: where
    threads or memory are limited, `Thread.start` may fail, or wait for ever for one that found no memory."""
    left, done, failed = deque(paths), threading.Semaphore(0), list[BaseException]()

    def work() -> None:
        while left:
            try:
                fsync_file(left.popleft())
            except IndexError:  # another one was faster
                return
            except BaseException as error:
                failed.append(error)
            done.release()

    with suppress(RuntimeError):
        for _ in paths[1:AT_ONCE]:
            start_new_thread(work, ())
    work()
    for _ in paths:
        done.acquire()
    if failed:
        raise failed[0]


def fsync_directory(path: Path) -> None:
    """Have the system write a directory to the disk itself: the names of its files, not their content."""
    if os.name == "nt":  # where a directory cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)


def _open(path: Path, mode: str) -> IO[Any]:
    """Open a file to write in it; refuse to follow a link that has its name."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))


# --- reading ---


def is_regular(path: Path) -> bool:
    """Find out whether there is a file of this name: no link, no directory and no device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read; refuse a directory, and a pipe, which would let us wait for ever."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            yield file
    except OSError as error:
        raise FedtailorError(f"{path} cannot be read: {error.strerror or error}.") from None


def read_bytes(path: Path) -> bytes:
    """Read a file."""
    with reading(path) as file:
        return file.read()


# --- checksums ---


def checksum(*parts: bytes | memoryview) -> str:
    """Compute the checksum of bytes. SHA-256 is the fastest of its kind where the processor helps, as most do."""
    found = sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:DIGITS]


def seal(record: Mapping[str, Any] | str, before: str = "", pretty: bool = False) -> bytes:
    """Write a record as a line of JSON whose last entry is its checksum, or as several lines for people (`pretty`).

    `before` is the checksum of the line before it, if there is one. A record may be JSON already.
    """
    text = record if isinstance(record, str) else json.dumps(record, indent=2 if pretty else None)
    text = text.removesuffix("}").rstrip()
    return _sealed(f"{text},{PRETTY if pretty else ' '}".encode(), before)


def unseal(content: bytes, before: str = "") -> str:
    """Check a sealed record and return its checksum; a damaged one is a ValueError."""
    head, mark, _ = content.rpartition(MARK)
    if not mark:
        raise ValueError("it has no checksum")
    if content != _sealed(head, before):
        raise ValueError("its checksum does not fit")
    return content[len(head) + len(MARK) :][:DIGITS].decode()


def read_sealed(path: Path, read: Callable[[bytes], T]) -> T:
    """Read a file that is one sealed record, with the function that reads its JSON."""
    content = read_bytes(path)
    try:
        unseal(content)
        return read(content)
    except ValueError as error:
        raise damaged(path, error) from None


def damaged(path: Path, why: ValueError | str, line: int | None = None) -> FedtailorError:
    """Make the error of a file that is not as it was written; `why` may be one of pydantic's."""
    if isinstance(why, ValidationError):
        first = why.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:100]
        why = f"{where + ': ' if where else ''}{first['msg'].lower()}"
    where = "" if line is None else f"line {line}: "
    return FedtailorError(f"{path} is damaged ({where}{why}): restore it from a copy, or run the experiment again.")


def _sealed(head: bytes, before: str) -> bytes:
    end = b"\n}\n" if head.endswith(PRETTY.encode()) else b"}\n"
    return b"".join((head, MARK, checksum(before.encode(), head).encode(), b'"', end))

"""Foreign and hostile files: damage is seen, claims are not believed, and every refusal is one sentence."""

import gzip
import io
import os
import re
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedtailor._common.errors import FedtailorError
from fedtailor.data import federate, load

from .files import cifar_contents, png, write_files, write_idx, write_mnist, write_tar

MB = 10**6


@contextmanager
def little_memory(megabytes: float) -> Iterator[None]:
    """Fail if Python and NumPy take more memory than that."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * MB
    finally:
        tracemalloc.stop()


def npy(shape: tuple[int, ...], content: bytes, kind: str = "<f8") -> bytes:
    """An array file that claims this shape, whatever it holds."""
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    header += b" " * (64 - (len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return str(path)


def refused(name: str, data_dir: Path | None = None) -> str:
    """The sentence with which a data set is refused."""
    with pytest.raises(FedtailorError) as caught:
        load(name, data_dir)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


def test_an_array_is_not_as_large_as_it_claims(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "own.npz", {"x.npy": npy((10**12,), b"12345678"), "y.npy": npy((1,), b"12345678")})
    assert Path(file).stat().st_size < 400
    with little_memory(10):
        assert "has 8 bytes, but its shape (1000000000000,) says others" in refused(file)


def test_an_archive_that_unpacks_to_more_than_the_memory_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "0.05")
    bomb = npy((12_500_000,), bytes(100 * MB))
    file = write_zip(tmp_path / "own.npz", {"x.npy": bomb, "y.npy": bomb})
    assert Path(file).stat().st_size < MB
    with little_memory(20):
        assert "would take 0.2 GB of memory or more, but 0.05 GB is the most" in refused(file)
    write_zip(tmp_path / "omniglot/images_background.zip", {"images_background/A/c/0001_01.png": bytes(100 * MB)})
    write_zip(tmp_path / "omniglot/images_evaluation.zip", {})
    with little_memory(20):
        assert "0.1 GB" in refused("omniglot", tmp_path)


def test_gzip_that_unpacks_to_more_than_the_memory_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "0.01")
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist/train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(100 * MB)))
    with little_memory(40):
        assert "0.01 GB is the most" in refused("mnist", tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(bytes(100 * MB)))
    with little_memory(40):
        assert "0.01 GB is the most" in refused("cifar-10", tmp_path)


def test_the_limit_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "much")
    assert "FEDTAILOR_DATA_LIMIT is 'much': give the GB" in refused(write_zip(tmp_path / "own.npz", {}))


def test_images_of_too_many_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def black(side: int) -> bytes:
        stream = io.BytesIO()
        Image.new("1", (side, side)).save(stream, "PNG")
        return stream.getvalue()

    for side in (9_000, 20_000):  # Pillow warns of the first and refuses the second
        write_files(tmp_path / "clinic", {"a/ill/1.png": black(side)})
        with little_memory(10):
            assert "1.png has more than 50 million pixels: make it smaller" in refused(str(tmp_path / "clinic"))
    write_files(tmp_path / "clinic", {f"a/ill/{number}.png": black(1_000) for number in range(1, 9)})
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "0.005")
    assert "would take 0.006 GB" in refused(str(tmp_path / "clinic"))
    with pytest.raises(FedtailorError, match="image_size is 1000000: give the number of pixels per side, from 1 to"):
        load(str(tmp_path / "clinic"), image_size=1_000_000)


def test_images_of_other_formats_are_not_even_tried(tmp_path: Path) -> None:
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"  # Pillow would call a program
    write_files(tmp_path / "clinic", {"a/ill/1.png": drawing})
    assert "it is not an image, or truncated" in refused(str(tmp_path / "clinic"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F"])
def test_images_of_any_mode_are_read_or_refused(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "clinic/a/ill/1.tiff"
    file.parent.mkdir(parents=True)
    try:
        Image.new(mode, (5, 4)).save(file)
    except (OSError, KeyError):
        pytest.skip("cannot be written")
    if mode.startswith(("I", "F")):
        assert "more than 8 bits per pixel" in refused(str(tmp_path / "clinic"))
    else:
        assert load(str(tmp_path / "clinic")).x.shape[2:] == (4, 5)


def test_one_long_label_does_not_make_all_long(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,label\n" + f"1,{'x' * 900}\n" + "1,b\n" * 20_000)
    with little_memory(30):  # as an array of texts: 72 MB
        assert len(load(str(tmp_path / "own.csv")).classes) == 2
    (tmp_path / "own.csv").write_text("a,label\n" + f"1,{'x' * 100_000}\n")
    assert "in column 'label': give a name of at most 1000 characters" in refused(str(tmp_path / "own.csv"))


def test_a_label_and_a_client_for_every_line(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("a,client,label\n" + "".join(f"1,c{n},l{n}\n" for n in range(20_000)))
    data = load(str(tmp_path / "own.csv"))
    with pytest.raises(FedtailorError, match="has 20000 classes for 20000 clients, more than can be counted: check"):
        federate(data, partition="natural")
    assert federate(data, partition="natural", labels="own").counts().shape == (20_000, 1)


def test_a_wide_table_is_read_in_linear_time(tmp_path: Path) -> None:
    columns = 60_000  # took 40 s: every column was looked for from the first
    (tmp_path / "own.csv").write_text(",".join(f"f{n}" for n in range(columns)) + ",y\n" + "0.5," * columns + "1\n")
    began = time.process_time()
    assert load(str(tmp_path / "own.csv")).x.shape == (1, columns)
    assert time.process_time() - began < 5


def flipped(content: bytes, places: Iterator[int] | range) -> Iterator[bytes]:
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        yield bytes(changed)


def small_cifar(root: Path) -> Path:
    files, _, _ = cifar_contents("cifar-100", "binary")
    write_tar(root / "cifar-100-binary.tar.gz", {name: raw[: 2 * 3074] for name, raw in files.items()})
    return root / "cifar-100-binary.tar.gz"


def small_mnist(root: Path) -> Path:
    write_mnist(root / "mnist")
    return root / "mnist/t10k-images-idx3-ubyte.gz"


def small_npz(root: Path) -> Path:
    np.savez_compressed(root / "own.npz", x=np.arange(200.0).reshape(50, 4) ** 0.5, y=np.arange(50) % 5)
    return root / "own.npz"


def small_omniglot(root: Path) -> Path:
    drawing = png(np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8))
    for half in ("images_background", "images_evaluation"):
        write_zip(root / f"omniglot/{half}.zip", {f"{half}/{half}/c/0001_{n:02}.png": drawing for n in (1, 2)})
    return root / "omniglot/images_background.zip"


@pytest.mark.parametrize(
    ("write", "name"),
    [(small_cifar, "cifar-100"), (small_mnist, "mnist"), (small_npz, "own.npz"), (small_omniglot, "omniglot")],
)
def test_no_flipped_bit_gives_other_numbers(tmp_path: Path, write: Callable[[Path], Path], name: str) -> None:
    """All over an archive: it is refused, or says the same. (CIFAR's checksum is behind what `tarfile` reads.)"""
    file = write(tmp_path)
    content, right = file.read_bytes(), load(name, tmp_path)
    bits = 8 * len(content)
    for changed in flipped(content, range(int(np.random.default_rng(0).integers(97)), bits, max(1, bits // 250))):
        file.write_bytes(changed)
        try:
            found = load(name, tmp_path)
        except FedtailorError:
            continue
        assert torch.equal(found.x, right.x)
        assert torch.equal(found.y, right.y)
        assert found.classes == right.classes


def test_a_directory_that_hides_members_is_seen(tmp_path: Path) -> None:
    """A wrong length of a comment makes the next entries part of it, and Python's zipfile says nothing."""
    file = small_omniglot(tmp_path)
    content = bytearray(file.read_bytes())
    content[content.find(b"PK\x01\x02") + 33] = 255  # the first entry's comment
    file.write_bytes(content)
    assert len(zipfile.ZipFile(file).namelist()) == 1
    assert "truncated or damaged" in refused("omniglot", tmp_path)


def test_gzip_with_more_behind_its_end(tmp_path: Path) -> None:
    x, _ = write_mnist(tmp_path / "mnist")
    file = tmp_path / "mnist/t10k-images-idx3-ubyte.gz"
    content = file.read_bytes()
    file.write_bytes(content + b"garbage")
    assert "truncated or damaged" in refused("mnist", tmp_path)
    file.write_bytes(content + gzip.compress(b"more"))
    assert "bytes where its sizes" in refused("mnist", tmp_path)
    whole = gzip.decompress(content)
    file.write_bytes(gzip.compress(whole[:100]) + gzip.compress(whole[100:]))  # as some programs write it
    assert np.array_equal(load("mnist", tmp_path).x[:, 0], x)


def test_idx_that_claims_more_than_there_is(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    file = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)))
    assert "it holds 0 bytes where its sizes" in refused("mnist", tmp_path)
    write_idx(file, np.zeros((0, 28, 28), dtype=np.uint8), packed=True)
    assert "holds 0 images" in refused("mnist", tmp_path)


def encrypted(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(signature)
        while at >= 0:
            content[at + place] |= 1
            at = content.find(signature, at + 1)
    path.write_bytes(content)


def method_99(path: Path) -> None:
    content = path.read_bytes()
    for signature, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        parts = content.split(signature)
        at = place - len(signature)
        content = signature.join([parts[0], *(part[:at] + b"\x63\x00" + part[at + 2 :] for part in parts[1:])])
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [encrypted, method_99])
def test_zip_files_that_python_cannot_unpack(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    for write, name in ((small_npz, "own.npz"), (small_omniglot, "omniglot")):
        harm(write(tmp_path))
        assert "cannot be read: it is truncated or damaged" in refused(name, tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zip_files_of_other_methods_are_read_or_refused(tmp_path: Path, method: int) -> None:
    members = {"x.npy": npy((2, 2), bytes(32)), "y.npy": npy((2,), bytes(16), "<i8")}
    file = Path(write_zip(tmp_path / "own.npz", members, method))
    assert load(str(file)).x.shape == (2, 2)
    content = file.read_bytes()
    for changed in flipped(content, range(0, 8 * len(content), 41)):
        file.write_bytes(changed)
        try:
            assert not load(str(file)).x.any()
        except FedtailorError as error:
            assert "cannot be read" in str(error) or "has no array" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.float64(3), "y": np.int64(1)}, "give one number or text each"),
        ({"x": np.float64(3), "y": np.zeros(1, int)}, "no samples"),
        ({"x": np.zeros(3, dtype=[("a", "f8"), ("b", "i4")]), "y": np.zeros(3, int)}, "give numbers"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, dtype=[("a", "i4")])}, "give one number or text each"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, complex)}, "give one number or text each"),
        ({"x": np.zeros((3, 2)), "y": np.array(["2020-01-01"] * 3, "M8[D]")}, "give one number or text each"),
        ({"x": np.zeros((3, 2)), "y": np.array([object()] * 3)}, "pickled objects"),
        ({"x": np.zeros((3, 2), np.uint8), "y": np.array([1, np.inf, 2])}, "hold fractions or NaN"),
        ({"dir/x": np.zeros((3, 2)), "y": np.zeros(3, int)}, "has no array 'x', only dir/x, y"),
    ],
)
def test_odd_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], said: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    assert said in refused(str(tmp_path / "own.npz"))


def test_arrays_by_columns_and_of_other_byte_order(tmp_path: Path) -> None:
    x = np.arange(12.0).reshape(4, 3)
    np.savez(tmp_path / "own.npz", x=np.asfortranarray(x).astype(">f8"), y=np.array([2, 0, 1, 2], dtype=">i2"))
    data = load(str(tmp_path / "own.npz"))
    assert data.x.tolist() == x.tolist()
    assert data.y.tolist() == [2, 0, 1, 2]


def test_medmnist_of_absurd_labels(tmp_path: Path) -> None:
    parts = {f"{p}_images": np.zeros((2, 28, 28), np.uint8) for p in ("train", "val", "test")}
    labels = {f"{p}_labels": np.full((2, 1), 2**40) for p in ("train", "val", "test")}
    np.savez(tmp_path / "own.npz", **parts, **labels)
    assert "most of the 1099511627777 classes would be empty" in refused(str(tmp_path / "own.npz"))


def test_omniglot_of_odd_names(tmp_path: Path) -> None:
    small_omniglot(tmp_path)
    with zipfile.ZipFile(tmp_path / "omniglot/images_background.zip", "a") as archive:
        for name in (".png", "/.png", "a.png", "../../x.png", "images_background/.png", "a/b/c/d.png", "\\.png"):
            archive.writestr(name, b"no image")
    assert len(load("omniglot", tmp_path)) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xef\xbb\xbf", "has no header"),
        (b"\n\n", "has no header"),
        (b",\n1,2\n", "has no header"),
        (b"a,label\n1,\x00\n", "give a name of at most"),
        (b"a,label\n\x00,1\n", r"has '\\x00' in column 'a'"),
        ("a,label\n1,x\n".encode("utf-16")[:-1], "is not a CSV text in UTF-16"),
        ("a,label\n1,x\n".encode("utf-16-le"), "is no text in utf-8: say --encoding, such as utf-16-le"),
        (b"a,label\n" + b"1" * 200_000 + b",x\n", "field larger than field limit"),
        (b"a,b,a,label\n1,2,3,x\n", "names a column twice, 'a'"),
        (",".join(map(str, range(5_000))).encode() + b",a\n1,2\n", "0, 1, 2, .* and 4971 more; say which one"),
    ],
)
def test_odd_tables_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "own.csv").write_bytes(content)
    assert re.search(said, refused(str(tmp_path / "own.csv")))


@pytest.mark.parametrize("name", ["own.npz", "own.csv", "mnist", "cifar-100"])
def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    small_npz(tmp_path)
    small_cifar(tmp_path)
    small_mnist(tmp_path)
    (tmp_path / "own.csv").write_text("a,label\n1,2\n")
    opened = io.open

    def no_permission(file: object, *arguments: object, **options: object) -> object:
        if str(file).startswith(str(tmp_path)):  # whoever runs the tests may read everything
            raise PermissionError(13, os.strerror(13), str(file))
        return opened(file, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("io.open", no_permission)
    monkeypatch.setattr("builtins.open", no_permission)
    assert refused(name, tmp_path).endswith("cannot be read: Permission denied.")


def test_pickles_that_ask_for_memory_or_nest_deep(tmp_path: Path) -> None:
    files, _, _ = cifar_contents("cifar-100", "python")
    for hostile in (
        b"\x80\x02}r\xff\xff\xff\x01.",
        b"\x80\x02" + b"(" * 10**5,
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
    ):
        write_files(tmp_path, {**files, "cifar-100-python/train": hostile})
        with little_memory(200):
            assert "is not a CIFAR batch, or truncated" in refused("cifar-100", tmp_path)

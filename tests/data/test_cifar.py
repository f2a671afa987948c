import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import load

from .files import cifar_contents, python2_pickle, write_files, write_tar


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("kind", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar-10", "cifar-100"])
def test_every_published_version_reads_alike(tmp_path: Path, name: str, kind: str, archive: bool) -> None:
    files, x, y = cifar_contents(name, kind)
    if archive:
        write_tar(tmp_path / f"{name}-{kind}.tar.gz", dict(reversed(files.items())))
    else:
        write_files(tmp_path, files)
    data = load(name, tmp_path)
    assert torch.equal(data.x, torch.from_numpy(x))
    assert data.y.tolist() == y.tolist()
    assert data.part is not None
    assert data.part.tolist() == [0] * (len(y) - 3) + [2] * 3
    assert len(data.classes) == (10 if name == "cifar-10" else 100)


def test_our_python_2_pickle_is_one_that_numpy_reads() -> None:
    pixels = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
    raw = python2_pickle({b"labels": [3, 4], b"data": pixels})
    with warnings.catch_warnings(action="ignore"):  # NumPy has moved numpy.core since
        batch = pickle.loads(raw, encoding="bytes")
    assert batch[b"labels"] == [3, 4]
    assert np.array_equal(batch[b"data"], pixels)


class Malicious:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    files, _, _ = cifar_contents("cifar-10", "python")
    write_files(tmp_path, files)
    trace = tmp_path / "trace"
    bad = pickle.dumps({b"labels": [1], b"data": Malicious(trace)}, protocol=2)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(bad)
    with pytest.raises(FedtailorError, match=r"data_batch_1 is not a CIFAR batch: it asks for .* refuses to run"):
        load("cifar-10", tmp_path)
    assert not trace.exists()
    pickle.loads(bad)
    assert trace.exists()  # so it was a threat


@pytest.mark.parametrize("code", [b"cos\nsystem\n(S'true'\ntR.", b"cnumpy\nload\n(S'x'\ntR.", b"c__builtin__\neval\n."])
def test_no_other_function_can_be_named(tmp_path: Path, code: bytes) -> None:
    files, _, _ = cifar_contents("cifar-100", "python")
    write_files(tmp_path, files | {"cifar-100-python/train": code})
    with pytest.raises(FedtailorError, match="refuses to run"):
        load("cifar-100", tmp_path)


@pytest.mark.parametrize("raw", [b"", b"hello", pickle.dumps({}, 2), pickle.dumps([1], 2), pickle.dumps(None, 2)])
def test_other_pickles_are_refused(tmp_path: Path, raw: bytes) -> None:
    files, _, _ = cifar_contents("cifar-10", "python")
    write_files(tmp_path, files | {"cifar-10-batches-py/data_batch_2": raw})
    with pytest.raises(FedtailorError, match=r"data_batch_2 cannot be read: it is not a CIFAR batch, or truncated"):
        load("cifar-10", tmp_path)


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_truncated_batch_is_named(tmp_path: Path, kind: str) -> None:
    files, _, _ = cifar_contents("cifar-10", kind)
    name = next(file for file in files if "data_batch_3" in file)
    write_files(tmp_path, files | {name: files[name][:-10]})
    with pytest.raises(FedtailorError, match=r"data_batch_3\S* cannot be read"):
        load("cifar-10", tmp_path)


def test_truncated_archive_is_named(tmp_path: Path) -> None:
    files, _, _ = cifar_contents("cifar-10", "binary")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    write_tar(archive, files)
    archive.write_bytes(archive.read_bytes()[:20000])
    with pytest.raises(FedtailorError, match=r"cifar-10-binary\.tar\.gz cannot be read: it is truncated or damaged"):
        load("cifar-10", tmp_path)


def test_archive_without_a_batch_says_which(tmp_path: Path) -> None:
    files, _, _ = cifar_contents("cifar-10", "binary")
    write_tar(tmp_path / "cifar-10-binary.tar.gz", {k: v for k, v in files.items() if "test_batch" not in k})
    with pytest.raises(FedtailorError, match=r"there is no test_batch\.bin in it"):
        load("cifar-10", tmp_path)


def test_missing_data_set_says_what_to_get_and_where(tmp_path: Path) -> None:
    with pytest.raises(
        FedtailorError, match=r"cifar-10-binary\.tar\.gz from https://www\.cs\.toronto.*under .*data-dir"
    ):
        load("cifar-10", tmp_path)

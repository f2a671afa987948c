"""The job that is submitted, and what the commands refuse before anything is started."""

import json
from pathlib import Path

import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.kits import make_kits
from fedtailor.sites.nvflare.client import Follow, stay_connected
from fedtailor.sites.nvflare.driver import Driver
from fedtailor.sites.nvflare.job import Note, read_note, write_job
from fedtailor.sites.nvflare.processes import alone
from tests.sites.parts import Federation


def test_a_job_has_no_code_and_no_paths(tmp_path: Path) -> None:
    write_job(tmp_path / "job", "trial", ["north", "south"])
    files = {str(path.relative_to(tmp_path / "job")) for path in (tmp_path / "job").rglob("*") if path.is_file()}
    assert files == {"meta.json", "app/config/config_fed_server.json", "app/config/config_fed_client.json"}
    text = "".join((tmp_path / "job" / name).read_text() for name in sorted(files))
    assert str(tmp_path) not in text
    assert "/" not in text
    paths = [found["path"] for found in _found(tmp_path / "job", "path")]
    assert paths == [
        "fedtailor.sites.nvflare.executor.FedtailorExecutor",
        "fedtailor.sites.nvflare.controller.FedtailorController",
    ]


def _found(folder: Path, key: str) -> list[dict[str, str]]:
    """All objects with this key in the files of a folder."""
    found: list[dict[str, str]] = []

    def look(value: dict[str, str]) -> dict[str, str]:
        found.extend([value] if key in value else [])
        return value

    for path in sorted(folder.rglob("*.json")):
        json.loads(path.read_text(), object_hook=look)
    return found


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_note(tmp_path) is None
    note = Note(job="a", state="interrupted", reason="south left")
    note.write(tmp_path)
    assert read_note(tmp_path) == note
    (tmp_path / "job.json").write_text('{"job": 3}')
    assert read_note(tmp_path) is None


def test_added_lines_are_followed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    news = Follow(log)
    assert list(news.lines()) == []
    with log.open("a") as file:
        file.write("one\ntwo\nhal")
    assert list(news.lines()) == [b"one", b"two"]
    with log.open("a") as file:
        file.write("f\n")
    assert list(news.lines()) == [b"half"]
    log.write_text("new\n")
    assert list(news.lines()) == [b"new"]
    log.unlink()
    assert list(news.lines()) == []


def test_wrong_kits_and_second_starts_are_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    federation = Federation(tmp_path, plan={"admin": "coordinator@example.org"})
    kits, plan = tmp_path / "kits", tmp_path / "federation.toml"
    make_kits(plan, kits, central=True)
    server, admin = kits / "server" / "kit", kits / "admin" / "kit"
    with pytest.raises(FedtailorError, match=r"no kit of a server: .*server.crt is missing"):
        Driver(plan, tmp_path / "run", admin, admin, print)
    with pytest.raises(FedtailorError, match=r"kit is that of north, and not of coordinator@example.org"):
        Driver(plan, tmp_path / "run", server, kits / "north" / "kit", print)
    with alone(server / "run.lock"), pytest.raises(FedtailorError, match="trial is being run already"):
        Driver(plan, tmp_path / "run", server, admin, print).run()
    (kits / "south" / "kit").rename(tmp_path / "north" / "kit")
    with pytest.raises(FedtailorError, match="kit is that of south, and not of north"):
        stay_connected(federation.root / "north" / "site.toml", print)
    (tmp_path / "north" / "kit").rename(tmp_path / "south" / "kit")
    private = tmp_path / "south" / "private"
    private.mkdir()
    with alone(private / "start.lock"), pytest.raises(FedtailorError, match="south takes part already"):
        stay_connected(federation.root / "south" / "site.toml", print)
    assert not (tmp_path / "run").exists()

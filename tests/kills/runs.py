"""A run in one process, stopped at an operation on a file, and gone on with."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import fedtailor as ft
from fedtailor._common.files import checksum
from fedtailor.server.checkpoint import read_manifest
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import RunDirectory
from tests.helpers import files
from tests.kills.engine import Case, tries

SMALL: dict[str, Any] = {"data": "digits", "clients": 4, "max_train": 16, "min_samples": 1, "model": "mlp:4",
                         "rounds": 4, "epochs": 1, "engine": "in-process", "checkpoint_every": 2}  # fmt: skip
OF_ENGINES = ("experiment.toml", "lock")  # how a run is computed, and nothing


def kept(folder: Path) -> dict[str, object]:
    """Everything that runs leave in a folder, to the byte, but what no manifest names: that does not count, and goes
    with the next checkpoint, or a site's next training."""
    found = files(folder)
    for manifest in folder.rglob("checkpoint/manifest.json"):
        named = read_manifest(manifest.parent)
        assert named is not None
        counted = {f"client-{client}-round-{version}" for client, version in named.clients.items()}
        counted |= {f"server-{client}-round-{version}" for client, version in named.server.items()}
        counted |= {f"server-round-{named.round}"}
        for file in (*manifest.parent.glob("server-*"), *manifest.parent.glob("s*/*")):
            if file.stem not in counted:
                del found[str(file.relative_to(folder))]
    return {name: checksum(content) for name, content in found.items() if not name.endswith(OF_ENGINES)}


def outcome(path: Path) -> Mapping[str, object]:
    """Everything that a run leaves, and the vectors that its clients predict with."""
    result = ft.load(path)
    models = {f"model of client {c}": result.personal_vector(c) for c in range(result.data.n_clients)}
    return {**kept(path), **{name: checksum(model.numpy().tobytes()) for name, model in models.items()}}


def begun(path: Path) -> bool:
    """Find out whether there is a run to go on with."""
    return (path / "experiment.toml").is_file()


def run(method: str, settings: dict[str, Any], folder: Path, **how: Any) -> ft.RunResult:
    """Run a method in this folder, or go on with it."""
    path = folder / "run"
    return ft.resume(path, **how) if begun(path) else ft.run(method, out=path, **{**SMALL, **settings}, **how)


def alone(method: str, settings: dict[str, Any], folder: Path) -> Mapping[str, object]:
    run(method, settings, folder)
    return outcome(folder / "run")


def longer(folder: Path) -> Mapping[str, object]:
    """A run that gets more rounds when it is finished."""
    path = folder / "run"
    if not begun(path) or ft.load(path).experiment.rounds == 2:
        run("pgfed", {"rounds": 2}, folder)
    ft.resume(path, rounds=4)
    return outcome(path)


def joined(folder: Path) -> Mapping[str, object]:
    """A run that a client joins which it held out."""
    path = folder / "run"
    if not begun(path) or not RunDirectory(path).partition().joined:
        run("scaffold", {"new_clients": 1, "rounds": 2}, folder)
    ft.resume(path, rounds=4, add_clients="3")
    return outcome(path)


def ended(folder: Path) -> Mapping[str, object]:
    """A run that its user's function ends after round 3: the reason is written into a record that is there already."""

    def third(record: RoundRecord) -> str | None:
        return "enough" if record.round == 3 else None

    run("ditto", {}, folder, on_round=third)
    return outcome(folder / "run")


UNEVEN = {"system": "speeds=lognormal:1:100, availability=0.7:20", "late": "buffer=2"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "states in memory, diagnostics": ("pgfed", {}),
    "states on disk": ("ditto", {"states": "disk", "checkpoint_every": 1}),
    "states on disk, some take part": ("scaffold", {"states": "disk", "participation": 0.5, "checkpoint_every": 2}),
    "states at the server": ("fedfomo", {"checkpoint_every": 3}),
    "states at the server, on disk": ("fedacs", {"states": "disk", "participation": 0.5}),
    "sites in memory": ("pgfed", {"engine": "sites-in-memory", "checkpoint_every": 1}),
    "sites in memory, rare checkpoints": ("ditto", {"engine": "sites-in-memory", "checkpoint_every": 3}),
    "a replay": ("ditto", {"attack": "replay, clients=0,2", "checkpoint_every": 1}),
    "asynchronous": ("fedper", {**UNEVEN, "checkpoint_every": 2}),
    "asynchronous, states on disk": ("ditto", {**UNEVEN, "states": "disk", "checkpoint_every": 1}),
    "asynchronous, sites in memory": ("fedavg", {**UNEVEN, "engine": "sites-in-memory", "checkpoint_every": 1}),
    "private": ("fedper", {"privacy": "client, clip=1.0, noise=1.0"}),
    "evaluated now and then": ("pflego", {"evaluation": {"every": 3, "patience": 2}, "checkpoint_every": 1}),
}
CASES = (
    *(Case(name, partial(alone, method, settings)) for name, (method, settings) in RUNS.items()),
    Case("more rounds", longer),
    Case("a client joins", joined),
    Case("ended by its user", ended),
)
attempt = tries(CASES)

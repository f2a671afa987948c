"""Fuzzing of run directories and comparisons: each reader gets what was written, or says one sentence."""

import io
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import torch

import fedtailor as ft
from fedtailor._common.files import seal, unseal
from fedtailor.cli.run import show
from fedtailor.cli.watch import Watched
from fedtailor.experiment import read_experiment
from fedtailor.messages import frame
from fedtailor.model_files.prediction import predict
from fedtailor.reporting.found_runs import read_runs
from fedtailor.server.records import RoundRecord
from fedtailor.studies.comparison import FILE, RUNS, Comparing, make_comparison
from tests.fuzz.engine import Luck, Target

SMALL: dict[str, Any] = {"data": "digits", "clients": 2, "max_train": 10, "model": "mlp:2", "rounds": 2, "epochs": 1,
                         "batch": "full", "engine": "in-process", "checkpoint_every": 1}  # fmt: skip
DEEP = "[" * 5000
SCRIPT = "<script>alert(1)</script>"
WEIRD = ["null", "true", "-1", "0", "7", "1.5", "NaN", "Infinity", "1e999", "1e308", "9" * 30, "9" * 400, "9" * 5000,
         '""', '"x"', f'"{SCRIPT}"', '"\\u0000"', '"\\ud800"', "[]", "{}", "[[]]", '{"a": 1}', "[1, 2]", "[null]",
         DEEP]  # fmt: skip
WEIRD_TOML = ["'disk'", "nan", "inf", "1e300", "2026-01-01", "0x10"]
KEPT = tempfile.TemporaryDirectory()  # what all cases begin with, until the process ends


class Plain(ft.Tracker):
    """A tracker whose record is in the directory of a run."""


# --- readers ---


def _load(path: Path) -> None:
    result = ft.load(path)
    _ = (result.summary(), result.per_client, result.clients, result.partition, repr(result))
    for round in result.observations.rounds():
        result.observed(round)


def _notebook(path: Path) -> None:
    shown = ft.load(path)._repr_html_()
    assert shown.startswith("<table>"), shown
    assert SCRIPT not in shown, shown
    ft.histogram(ft.load(path))


def _export(path: Path) -> None:
    for file in ft.export(path, to=path.parent / "models"):
        predict(file, torch.zeros(2, 1, 8, 8))


def _predict(path: Path) -> None:
    result = ft.load(path)
    result.predict(0, torch.zeros(2, 1, 8, 8))
    result.features(1, torch.zeros(2, 1, 8, 8))


def _resume(path: Path) -> None:
    if ft.load(path).experiment.rounds < 10:  # a million rounds, with the right checksum, are as they were asked for
        ft.resume(path, track=Plain)


READERS: dict[str, Callable[[Path], object]] = {
    "load": _load,
    "show": partial(show, json=False),
    "show --json": partial(show, json=True),
    "watch": lambda path: Watched(path).look(),
    "report": lambda path: ft.report(path, to=path.parent / "report.html"),
    "notebook": _notebook,
    "predict and features": _predict,
    "export": _export,
    "resume": _resume,
}


def _go_on(path: Path) -> None:
    Comparing(make_comparison(read_experiment(path / FILE)), path).todo()


STUDY_READERS: dict[str, Callable[[Path], object]] = {
    "compare": _go_on,
    "watch": lambda path: Watched(path).look(),
    "show": partial(show, json=False),
    "report": lambda path: read_runs([path]),
}


# --- what they read ---


@cache
def _runs() -> list[Path]:
    """A finished run, and one that was stopped after its first round."""
    folder = Path(KEPT.name)

    def stop(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    ft.run("pgfed", out=folder / "finished", track=Plain, **SMALL)
    with suppress(KeyboardInterrupt):
        ft.run("pgfed", out=folder / "half", track=Plain, on_round=stop, **SMALL)
    return [folder / "finished", folder / "half"]


@cache
def _studies() -> list[Path]:
    """A finished comparison, and one of a grid whose first run was interrupted."""
    folder = Path(KEPT.name)

    def stop(title: str, record: RoundRecord) -> None:
        raise KeyboardInterrupt

    methods = ["pgfed", "ditto"]
    ft.compare(methods, seeds=[0], out=folder / "compared", **SMALL)
    with suppress(KeyboardInterrupt):
        grid = {"lr": [0.1, 0.2]}
        ft.compare(methods, seeds=[0, 1], target=0.5, grid=grid, on_round=stop, out=folder / "begun", **SMALL)
    return [folder / "compared", folder / "begun"]


def of_runs(read: Callable[[Path], object], luck: Luck, folder: Path) -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        shutil.copytree(luck.right.choice(_runs()), run := folder / "run")
        if luck.chance():
            mutate(run, luck.harm)
        read(run)


def of_studies(read: Callable[[Path], object], luck: Luck, folder: Path) -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        shutil.copytree(luck.right.choice(_studies()), study := folder / "study")
        if luck.chance():
            file, kinds = luck.harm.choice([(FILE, [_lines, _bytes, _names]), (RUNS, [_values, _bytes, _names])])
            luck.harm.choice(kinds)(study / file, luck.harm)
        read(study)


TARGETS: dict[str, Target] = {
    **{f"run directory: {name}": partial(of_runs, read) for name, read in READERS.items()},
    **{f"comparison's directory: {name}": partial(of_studies, read) for name, read in STUDY_READERS.items()},
}


# --- harm ---


def mutate(run: Path, draw: Random) -> None:
    """Change one file of a run, or a few names."""
    path = draw.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.name != "lock"))
    kinds = {".jsonl": [_values, _values, _bytes], ".json": [_values, _values, _bytes], ".toml": [_lines, _bytes],
             ".safetensors": [_tensors, _bytes]}  # fmt: skip
    draw.choice([*kinds[path.suffix], _names])(path, draw)


def _bytes(path: Path, draw: Random) -> None:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content) + 1)
    match draw.choice(["flip", "cut", "empty", "insert", "delete", "twice", "zeros"]):
        case "flip" if place < len(content):
            content[place] ^= 1 << draw.randrange(8)
        case "cut":
            del content[place:]
        case "empty":
            content.clear()
        case "insert":
            content[place:place] = draw.choice([b"\x00", b"\xff\xfe", b"\n", b"{", draw.randbytes(9)])
        case "delete":
            del content[place : place + draw.randrange(1, 50)]
        case "twice":
            content += bytes(content)
        case _:
            content[place:] = bytes(len(content) - place)
    path.write_bytes(content)


def _values(path: Path, draw: Random) -> None:
    """Another value anywhere in a JSON record, most often with a checksum that fits."""
    records = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    changed, content, before = draw.randrange(len(records)), b"", ""
    for number, line in enumerate(records):
        record = {name: value for name, value in json.loads(line).items() if name != "checksum"}
        weird = _another_value(record, draw) if number == changed else ""
        sealed = seal(json.dumps(record).replace('"a mark"', weird), before)
        content += sealed
        before = unseal(sealed, before)
    if draw.random() < 0.2:
        content = content.replace(b'"checksum": "', b'"checksum": "0', 1)
    path.write_bytes(content)


def _another_value(record: dict[str, Any], draw: Random) -> str:
    """Delete, rename or change an entry; a changed one gets a mark, in whose place the weird text is written."""
    place: Any = record
    while keys := list(place) if isinstance(place, dict) else list(range(len(place))):
        key = draw.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
            place = place[key]
            continue
        how = draw.random()
        if how < 0.15:
            del place[key]
        elif how < 0.25 and isinstance(place, dict):
            place[draw.choice(["", "-1", "x", "99", "9" * 30])] = place.pop(key)
        elif how < 0.35 and isinstance(place, list):
            place.append(place[key])
        else:
            place[key] = "a mark"
        break
    return draw.choice(WEIRD)


def _lines(path: Path, draw: Random) -> None:
    """Another value of a setting, or a line more or less. Nobody asks for a million workers here."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place = draw.randrange(len(lines))
    name, equals, _ = lines[place].partition(" = ")
    how = draw.choice(["value", "value", "value", "deleted", "twice", "a section"])
    if how == "value" and equals and name != "engine":
        lines[place] = f"{name} = {draw.choice([*WEIRD, *WEIRD_TOML])}"
    elif how == "deleted":
        del lines[place]
    elif how == "twice":
        lines.insert(place, lines[place])
    else:
        lines.insert(place, draw.choice(["[a]", "[parameters.x]", "[[evaluation]]", "[", "=", '"" = 1']))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tensors(path: Path, draw: Random) -> None:
    """A whole file of the right sender and round, with other tensors in it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedtailor"])
    named = [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"] or ["x"]
    tensors = {name: torch.zeros(draw.choice([(), (0,), (3,), (2, 2)])) for name in named if draw.random() < 0.7}
    if draw.random() < 0.3:
        tensors[draw.choice(["", "x", "theta"])] = torch.full((3,), float("nan"))
    if draw.random() < 0.3:
        header["round"] = draw.choice([0, 1, 99])
    path.write_bytes(frame(tensors, **{name: header[name] for name in ("sender", "round")}))


def _names(path: Path, draw: Random) -> None:
    """A file that is missing, a directory, a link, or another file beside it."""
    how = draw.choice(["missing", "directory", "link", "copy", "temporary", "odd name"])
    content = path.read_bytes()
    if how in ("missing", "directory", "link"):
        path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "link":
        path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "nowhere", ".", "/etc/hostname"]))
    elif how == "copy":
        path.with_name(f"{path.stem} (copy){path.suffix}").write_bytes(content)
    elif how == "temporary":
        path.with_name(path.name + ".tmp").mkdir()
    elif how == "odd name":
        odd = draw.choice(["round-0.safetensors", "round-٣.safetensors", "round-99.safetensors", "client-99-round-1"])
        path.with_name(odd).write_bytes(content)

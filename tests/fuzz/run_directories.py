"""Mutated run directories: whatever is in their files, a reader gets what was written or one sentence.

`python -m tests.fuzz.run_directories SEED SECONDS` prints the counts, and the traceback of every fault.
"""

import io
import json
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from fedtailor._common.files import seal, unseal
from fedtailor._common.toml import write_toml
from fedtailor.cli.run import show
from fedtailor.cli.watch import Watched
from fedtailor.experiment import read_experiment
from fedtailor.messages import frame
from fedtailor.reporting.found_runs import read_runs
from fedtailor.server.records import RoundRecord
from fedtailor.studies.comparison import FILE, RUNS, Comparing, make_comparison

SMALL: dict[str, Any] = {"data": "digits", "clients": 2, "max_train": 10, "model": "mlp:2", "rounds": 2, "epochs": 1,
                         "batch": "full", "engine": "in-process", "checkpoint_every": 1}  # fmt: skip
PATIENCE = 30  # seconds for one reader of one mutant: more is a hang
DEEP = "[" * 5000
WEIRD = ["null", "true", "-1", "0", "7", "1.5", "NaN", "Infinity", "1e999", "1e308", "9" * 30, "9" * 400, "9" * 5000,
         '""', '"x"', '"\\u0000"', '"\\ud800"', "[]", "{}", "[[]]", '{"a": 1}', "[1, 2]", "[null]", DEEP]  # fmt: skip

ASKED = {"methods": ["pgfed", "ditto"], "seeds": [0, 1], "target": 0.5, "grid": {"lr": [0.1, 0.2]}, **SMALL}
COMPARISON = write_toml(make_comparison(ASKED).written())
WEIRD_TOML = ["'disk'", "nan", "inf", "1e300", "2026-01-01", "0x10"]


class Hang(BaseException):
    """A reader did not come back."""


def fuzz(seed: int, seconds: float) -> dict[str, Any]:
    """Mutate run directories for some seconds.

    Returns `counts` of mutants, of readings that were refused in one sentence and that were read, and the `failures`:
    what was mutated, who read it, and the traceback.
    """
    draw, end = random.Random(seed), time.monotonic() + seconds
    counts = {"mutants": 0, "refused": 0, "read": 0}
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder, _quiet():
        made = _make(Path(folder))
        while time.monotonic() < end:
            mutant = Path(folder) / "mutant" / "run"
            shutil.rmtree(mutant.parent, ignore_errors=True)
            shutil.copytree(draw.choice(made), mutant)
            asked, plan = mutant.parent / FILE, mutant.parent / RUNS
            asked.write_text(COMPARISON, encoding="utf-8")
            plan.write_bytes(seal({"runs": {"local": {"directory": "runs/local", "rounds": 3}}}))
            of_comparison = draw.random() < 0.15
            if of_comparison:
                kind, file = draw.choice([(_lines, asked), (_values, plan), (_bytes, plan)])
                what = f"{file.name}: {kind(file, draw)}"
            else:
                what = mutate(mutant, draw)
            counts["mutants"] += 1
            for name, read in (COMPARISON_READERS if of_comparison else READERS).items():
                try:
                    with _in_time():
                        read(mutant)
                    counts["read"] += 1
                except ft.FedtailorError as error:
                    counts["refused"] += 1
                    if "\n" in str(error) or len(str(error)) > 1000:
                        failures.append(f"{what}, {name}: more than a sentence: {error}")
                except (Exception, Hang):
                    failures.append(f"{what}, {name}:\n{traceback.format_exc()}")
    return {"counts": counts, "failures": failures}


# --- readers ---


def _load(path: Path) -> None:
    result = ft.load(path)
    _ = (result.summary(), result.per_client, result.clients, result.partition, repr(result), result._repr_html_())
    for round in result.observations.rounds():
        result.observed(round)


def _export(path: Path) -> None:
    ft.export(path, to=path.parent / "models", overwrite=True)


def _watch(path: Path) -> None:
    Watched(path).look()


def _resume(path: Path) -> None:
    if ft.load(path).experiment.rounds < 10:  # a million rounds, with the right checksum, are as they were asked for
        ft.resume(path)


READERS: dict[str, Callable[[Path], object]] = {
    "load": _load,
    "show": lambda path: show(path, json=False),
    "show --json": lambda path: show(path, json=True),
    "watch": _watch,
    "report": lambda path: read_runs([path.parent]),
    "export": _export,
    "resume": _resume,  # the last one, as it writes
}


COMPARISON_READERS: dict[str, Callable[[Path], object]] = {
    "compare": lambda path: Comparing(make_comparison(read_experiment(path.parent / FILE)), path.parent).todo(),
    "watch": lambda path: Watched(path.parent).look(),
    "report": lambda path: read_runs([path.parent]),
}


# --- mutations ---


def mutate(run: Path, draw: random.Random) -> str:
    """Change one file of a run, or a few names, and say what was done."""
    paths = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "lock")
    path = draw.choice(paths)
    kinds = {".jsonl": [_values, _values, _bytes], ".json": [_values, _values, _bytes], ".toml": [_lines, _bytes],
             ".safetensors": [_tensors, _bytes]}  # fmt: skip
    kind = draw.choice([*kinds[path.suffix], _names])
    return f"{path.relative_to(run)}: {kind(path, draw)}"


def _bytes(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content) + 1)
    how = draw.choice(["flip", "cut", "empty", "insert", "delete", "twice", "zeros"])
    if how == "flip" and place < len(content):
        content[place] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "empty":
        content.clear()
    elif how == "insert":
        content[place:place] = draw.choice([b"\x00", b"\xff\xfe", b"\n", b"{", draw.randbytes(9)])
    elif how == "delete":
        del content[place : place + draw.randrange(1, 50)]
    elif how == "twice":
        content += bytes(content)
    else:
        content[place:] = bytes(len(content) - place)
    path.write_bytes(content)
    return f"{how} at byte {place}"


def _values(path: Path, draw: random.Random) -> str:
    """Another value anywhere in a JSON record, most often with a checksum that fits."""
    records = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    changed, content, before, what = draw.randrange(len(records)), b"", "", ""
    for number, line in enumerate(records):
        record = {name: value for name, value in json.loads(line).items() if name != "checksum"}
        if number == changed:
            what = _another_value(record, draw)
        sealed = seal(record, before)
        weird = what.rpartition(" := ")[2] if "mark" in what else None
        if number == changed and weird is not None:
            head = sealed.rpartition(b'"checksum": "')[0].replace(b'"a mark"', weird.encode())
            sealed = _sealed_again(head, before)
        content += sealed
        before = unseal(sealed, before)
    if draw.random() < 0.2:
        content = content.replace(b'"checksum": "', b'"checksum": "0', 1)
    path.write_bytes(content)
    return what[:200]


def _sealed_again(head: bytes, before: str) -> bytes:
    from fedtailor._common.files import _sealed

    return _sealed(head, before)


def _another_value(record: dict[str, Any], draw: random.Random) -> str:
    """Delete, rename or change an entry; a changed one gets a mark, in whose place something weird is written."""
    place: Any = record
    where: list[Any] = []
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return f"nothing in {where}"
        key = draw.choice(keys)
        where.append(key)
        if isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
            place = place[key]
            continue
        how = draw.random()
        if how < 0.15:
            del place[key]
            return f"{where} deleted"
        if how < 0.25 and isinstance(place, dict):
            place[draw.choice(["", "-1", "x", "99", "9" * 30])] = place.pop(key)
            return f"{where} renamed"
        if how < 0.35 and isinstance(place, list):
            place.append(place[key])
            return f"{where} twice"
        place[key] = "a mark"
        return f"{where} mark := {draw.choice(WEIRD)}"


def _lines(path: Path, draw: random.Random) -> str:
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
    return f"{how}: {name[:100]}, now {lines[min(place, len(lines) - 1)][:100]}"


def _tensors(path: Path, draw: random.Random) -> str:
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
    return f"{ {name: tuple(tensor.shape) for name, tensor in tensors.items()} } of round {header['round']}"


def _names(path: Path, draw: random.Random) -> str:
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
    return how


# --- the surroundings ---


def _make(folder: Path) -> list[Path]:
    """A finished run, and one that was stopped after its first round."""

    def stop(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    ft.run("pgfed", out=folder / "finished", **SMALL)
    with suppress(KeyboardInterrupt):
        ft.run("pgfed", out=folder / "half", on_round=stop, **SMALL)
    return [folder / "finished", folder / "half"]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _in_time() -> Iterator[None]:
    """Raise `Hang` in whoever takes too long."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

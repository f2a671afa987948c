"""Golden records: every method on every engine, to compare the numbers of two versions of the code.

    python -m benchmarks.golden record DIRECTORY      before a change
    python -m benchmarks.golden compare DIRECTORY     after it

What is compared: all numbers of rounds.jsonl and clients.jsonl, the server's and every client's tensors in the last
checkpoint, and every client's personal model. A case with fewer than eight participants is to agree to the bit. From
eight on, versions may differ in the order in which a mean is summed: the largest difference is printed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedtailor as ft
from fedtailor.methods import all_methods

COMMON: dict[str, Any] = {"data": "digits", "model": "mlp:16", "rounds": 3, "epochs": 1, "max_train": 40, "seed": 3}
COMMON |= {"stratify": False}  # as the first records were made
MOMENTUM = {"momentum": 0.5, "keep_momentum": True, "weight_decay": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"clients": 8, "participation": 0.75},
    "momentum": {"clients": 6, "participation": 0.5, "states": "disk", "evaluation": {"model": "local"}, **MOMENTUM},
    "norm": {
        "model": "resnet",
        "clients": 6,
        "max_train": 12,
        "rounds": 2,
        "new_clients": 2,
        "evaluation": {"clients": "new", "fine_tune": 1},
        **MOMENTUM,
    },
    "own": {"clients": 5, "labels": "own", "partition": "classes:3", "evaluation": {"train": True}},
    "float64": {"clients": 5, "dtype": "float64", "batch": "full", "steps": 2, "participation": "independent:0.5"},
    "many": {"clients": 12},
}
ENGINES: dict[str, dict[str, Any]] = {
    "in-process": {"engine": "in-process"},
    "processes": {"engine": "processes", "workers": 2},
    "sites-in-memory": {"engine": "sites-in-memory"},
    "ray": {"engine": "ray", "workers": 2},  # in the case `plain` alone: each run starts a cluster
}


def numbers(method: str, case: str, engine: str) -> tuple[Any, dict[str, Tensor]]:
    """Run one case and return its records without times, and its tensors. A run that fails is its error."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        try:
            result = ft.run(method, out=path, **{**COMMON, **CASES[case], **ENGINES[engine]})
        except ft.FedtailorError as error:
            return str(error), {}
        records = [json.loads(line) for name in ("rounds", "clients") for line in (path / f"{name}.jsonl").open()]
        tensors: dict[str, Tensor] = {}
        for file in sorted((path / "checkpoint").rglob("*.safetensors")):
            owner = file.stem.split("-round-")[0]
            tensors |= {f"{owner}/{name}": tensor for name, tensor in load_file(file).items()}
        for client in range(len(result.names)):
            tensors |= {f"personal-{client}/{name}": t for name, t in result.personal(client).items()}
    for record in records:
        record.pop("seconds", None)
        record.pop("checksum", None)
    return records, tensors


def runs() -> Iterator[tuple[str, str, str]]:
    """All combinations, with the numbers of `auto` methods by name."""
    for method in all_methods():
        for case in CASES:
            for engine in ENGINES:
                if engine != "ray" or case == "plain":
                    yield method, case, engine


def record(directory: Path) -> None:
    """Write the numbers of all runs."""
    directory.mkdir(parents=True)
    for run in runs():
        records, tensors = numbers(*run)
        stem = directory / "--".join(run)
        stem.with_suffix(".json").write_text(json.dumps(records))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, stem.with_suffix(".safetensors"))
        print(*run, f"{len(tensors)} tensors", flush=True)


def compare(directory: Path, only: str, renamed: dict[str, str], ignored: set[str]) -> bool:
    """Compare all runs with what was recorded; True if every difference is at most 1e-6."""
    same, total, worst = 0, 0, 0.0
    for run in runs():
        if only and only not in "--".join(run):
            continue
        total += 1
        stem = directory / "--".join(run)
        before = json.loads(stem.with_suffix(".json").read_text()), load_file(stem.with_suffix(".safetensors"))
        for name in list(before[1]):
            owner, _, tensor = name.partition("/")
            before[1][f"{owner}/{renamed.get(tensor, tensor)}"] = before[1].pop(name)
        now = numbers(*run)
        differences = [*_differences(before[0], now[0], ignored), *_tensor_differences(before[1], now[1])]
        if not differences:
            same += 1
            continue
        largest = max(size for _, size in differences)
        worst = max(worst, largest)
        where = max(differences, key=lambda difference: difference[1])[0]
        print(*run, f"{len(differences)} differences, the largest {largest:.3g}: {where}", flush=True)
    print(f"{same} of {total} runs have the same bits; the largest difference is {worst:.3g}.")
    return worst <= 1e-6


def _differences(before: Any, now: Any, ignored: set[str], where: str = "") -> Iterator[tuple[str, float]]:
    """Numbers that differ, and by how much (relative to their size above 1); infinite where one is missing."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now} - ignored):
            yield from _differences(before.get(key), now.get(key), ignored, f"{where}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for place, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(one, other, ignored, f"{where}/{place}")
    elif before != now:
        numeric = isinstance(before, int | float) and isinstance(now, int | float)
        yield f"{where}: {before} {now}", abs(before - now) / max(1, abs(before)) if numeric else float("inf")


def _tensor_differences(before: dict[str, Tensor], now: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for name in sorted({*before, *now}):
        one, other = before.get(name), now.get(name)
        if one is None or other is None or one.shape != other.shape:
            yield name, float("inf")
        elif not torch.equal(one, other):
            yield name, float(((one - other).abs() / one.abs().clamp(min=1)).max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="", help="a part of METHOD--CASE--ENGINE")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW", help="tensors with another name now")
    parser.add_argument("--ignore", nargs="*", default=[], metavar="NAME", help="fields of records to leave out")
    asked = parser.parse_args()
    if asked.what == "record":
        record(asked.directory)
    else:
        renamed = dict(pair.split("=") for pair in asked.renamed)
        sys.exit(0 if compare(asked.directory, asked.only, renamed, set(asked.ignore)) else 1)

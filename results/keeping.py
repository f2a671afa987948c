"""Keep the records of finished runs, without what is large or empty: checkpoints, clients in rounds that do not count.

What is left is a run directory still: `fedtailor show` and `fedtailor reproduce --out` read it. It cannot be resumed.
Of a comparison, its question and its summary are kept, with each client's result, and of its runs nothing: there are
hundreds.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedtailor._common.files import seal, unseal
from fedtailor._common.toml import parse_toml
from fedtailor.engines.result import RunResult
from fedtailor.server.evaluation import LAST
from fedtailor.server.records import ClientsRecord, Plain
from fedtailor.server.run_directory import RunDirectory
from fedtailor.studies.runner import done
from results.shipping import SHIPPED, check_budget

MOST = 50_000  # bytes of a method's diagnostics; of larger ones those of the last round are kept alone
TOO_MUCH = 500_000  # bytes of diagnostics of one round, which are not kept: matrices of many clients
QUESTION, SUMMARY = "comparison.toml", "result.json"
COPIED = ("about.json", "experiment.toml", "network.json", "partition.json", "result.json")


def keep_runs(source: Path, to: Path) -> Iterator[Path]:
    """Copy the records of all finished runs below a directory that are not there yet; yield their places."""
    for experiment in sorted(source.rglob("experiment.toml")):
        run, kept = experiment.parent, to / experiment.parent.relative_to(source)
        if not kept.exists() and (result := done(run)) is not None and (run / "result.json").is_file():
            keep(result, run, kept)
            yield kept


def keep(result: RunResult, run: Path, kept: Path) -> None:
    """Copy the records of one run."""
    kept.mkdir(parents=True)
    for name in COPIED:
        shutil.copyfile(run / name, kept / name)
    for extra in sorted(run.glob("*.json")):  # what a study found beside the run, like Figure 2's gains
        if extra.name not in COPIED:
            shutil.copyfile(extra, kept / extra.name)
    counted, directory = rounds_that_count(result), RunDirectory(run)
    write_lines(kept / "rounds.jsonl", (defined(record.plain()) for record in directory.rounds()))
    clients = (
        record if record.round in counted else ClientsRecord(round=record.round) for record in directory.clients()
    )
    write_lines(kept / "clients.jsonl", (record.plain() for record in clients))
    observed = sorted((run / "observed").glob("round-*.safetensors"))
    if sum(path.stat().st_size for path in observed) > MOST:
        observed = [run / "observed" / f"round-{result.observations.rounds()[-1]}.safetensors"]
    for path in observed if all(path.stat().st_size < TOO_MUCH for path in observed) else ():
        (kept / "observed").mkdir(exist_ok=True)
        shutil.copyfile(path, kept / "observed" / path.name)


def defined(record: Plain) -> Plain:
    """Leave out what has no value. A record without `std` would be taken for an older version's."""
    return {name: value for name, value in record.items() if value is not None or name == "std"}


def write_lines(path: Path, records: Iterable[Plain]) -> None:
    """Write sealed lines."""
    checksum = ""
    with path.open("wb") as file:
        for record in records:
            line = seal(record, checksum)
            checksum = unseal(line, checksum)
            file.write(line)


def rounds_that_count(result: RunResult) -> set[int]:
    """List the rounds whose clients the result is of."""
    evaluated = [record.round for record in result.clients if record.results]
    if last := LAST.get(result.experiment.evaluation.choose):
        return set(evaluated[-last:])
    chosen = result.chosen()
    return {evaluated[-1], *([chosen.round] if chosen else [])} if evaluated else set()


def keep_comparisons(source: Path, to: Path) -> Iterator[Path]:
    """Copy the question and the summary of all finished comparisons of a directory; yield their places."""
    for question in sorted(source.glob(f"*/{QUESTION}")):
        summary, kept = question.with_name(SUMMARY), to / question.parent.name
        if summary.is_file() and not (kept / SUMMARY).is_file():
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(question, kept / QUESTION)
            content = json.loads(summary.read_text(encoding="utf-8"))
            (kept / SUMMARY).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
            yield kept


def keep_tunings(source: Path, to: Path) -> Iterator[Path]:
    """Copy the trials of all finished tunings of a directory; those that are shipped must rest on enough."""
    for chosen in sorted(source.glob("*/tuned.toml")):
        name, kept = chosen.parent.name, to / chosen.parent.name
        if not kept.exists():
            if name in SHIPPED:
                check_budget(name, parse_toml((chosen.parent / "tuning.toml").read_text(encoding="utf-8")))
            shutil.copytree(chosen.parent, kept, ignore=shutil.ignore_patterns("runs", "*.tmp"))
            yield kept

"""Reproducing a table: what it will cost, its runs, and our numbers beside the paper's."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

from fedtailor.api import OnRound, RunResult, isolated
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.local.network import Network
from fedtailor.presets import Preset, Row, Settings
from fedtailor.server.loop import Federation
from fedtailor.server.record import Record
from fedtailor.simulation import federation
from fedtailor.store import write_atomically
from fedtailor.studies.explicit import gains
from fedtailor.studies.measures import individual_gains, samples_per_second
from fedtailor.studies.runner import Benches, done, perform, run_name
from fedtailor.transport import Bench

SHORT = 100  # training samples in the measurement of a method's speed

OnStart = Callable[[Federation], None]


@dataclass(frozen=True)
class Cost:
    """What a run asks for: training samples passed through the network, and seconds on this machine."""

    samples: float
    seconds: float


class Reproduction:
    """A preset at work: its runs below a directory, shared with other presets that need the same ones."""

    def __init__(self, preset: Preset, out: Path, seeds: int = 1, changes: Settings | None = None) -> None:
        self.preset, self.out, self.seeds, self.changes = preset, out, seeds, changes or {}
        self.benches = Benches()
        self.full_rounds = max(preset.experiment(row, column).rounds for row, column in self.cells())
        self.rounds = int(self.changes.get("rounds", self.full_rounds))

    def cells(self) -> Iterator[tuple[Row, str]]:
        found = False
        for column in self.preset.columns:
            for row in self.preset.rows:
                if not row.missing:
                    found = True
                    yield row, column
        if not found:
            raise FedtailorError(f"None of the methods of {self.preset.name} is in the catalogue yet.")

    def experiment(self, row: Row, column: str, seed: int) -> Experiment:
        own = self.preset.experiment(row, column).rounds
        rounds = self.rounds if own == self.full_rounds else min(own, self.rounds)
        return self.preset.experiment(row, column, {**self.changes, "rounds": rounds, "seed": seed})

    def experiments(self) -> dict[Path, Experiment]:
        """All runs that are needed, each once, in the order of their data."""
        wanted = []
        for column in self.preset.columns:
            for seed in range(self.seeds):
                wanted += [self.experiment(row, column, seed) for row, column_ in self.cells() if column_ == column]
                if self.preset.measure == "gain":
                    wanted.append(self._local(column, seed))
        return {self.path(experiment): experiment for experiment in wanted}

    def path(self, experiment: Experiment) -> Path:
        return self.out / self.preset.name.partition("/")[0] / run_name(experiment)

    def _local(self, column: str, seed: int) -> Experiment:
        """The run of Local that individual gains are measured against."""
        return self.experiment(Row("local", "local", "local", {}, ()), column, seed)

    # --- the work ---

    def todo(self) -> dict[Path, Experiment]:
        return {path: run for path, run in self.experiments().items() if done(path, self.enough) is None}

    def enough(self, record: Record) -> bool:
        """Whether a run has reached the target, where only the rounds until then are asked for."""
        accuracy = record.get("accuracy")
        return self.preset.target is not None and accuracy is not None and bool(accuracy >= self.preset.target)

    def cost(self, experiment: Experiment) -> Cost:
        return run_cost(experiment, self.benches.prepare(experiment))

    def run(self, path: Path, experiment: Experiment, on_round: OnRound, on_start: OnStart) -> RunResult:
        return perform(experiment, path, self.benches.prepare, on_round, on_start, self.enough)

    # --- the numbers ---

    def ours(self, row: Row, column: str) -> tuple[float, float | None] | None:
        """The number of one cell and its spread: over seeds, or over clients where the paper's is."""
        values = [self._value(row, column, seed) for seed in range(self.seeds)]
        found = [value for value in values if value is not None]
        if not found:
            return None
        if self.preset.measure == "gain":
            return fmean(v for v, _ in found), fmean(s for _, s in found if s is not None)
        return fmean(v for v, _ in found), pstdev(v for v, _ in found) if len(found) > 1 else None

    def _value(self, row: Row, column: str, seed: int) -> tuple[float, float | None] | None:
        result = done(self.path(experiment := self.experiment(row, column, seed)), self.enough)
        if result is None:
            return None
        measure = self.preset.measure
        if measure == "rounds":
            first = next((record["round"] for record in result.rounds if self.enough(record)), None)
            return None if first is None else (float(first), None)
        if measure == "gain":
            base = done(self.path(self._local(column, seed)))
            gained = None if base is None else [100 * gain for gain in individual_gains(result, base).values()]
            return None if not gained else (fmean(gained), pstdev(gained))
        if measure == "throughput":
            first = self.experiment(next(row for row, _ in self.cells()), column, seed)
            yardstick = done(self.path(first))
            theirs = None if yardstick is None else samples_per_second(yardstick)
            return (100 * (samples_per_second(result) or 0) / theirs, None) if theirs else None
        if measure == "correlation":
            pair = result.observed(result.rounds[-1]["round"])["correlation"].tolist()
            return pair[list(self.preset.columns).index(column)], None
        if measure == "explicit":
            return self._explicit(row, experiment, result)
        if measure == "train_loss":
            return result.chosen()["train_loss"], None
        if self.preset.domains and column != list(self.preset.columns)[-1]:
            members = [m["accuracy"] for c, m in result.per_client.items() if result.names[c].startswith(f"{column}-")]
            return 100 * fmean(a for a in members if a is not None), None
        return None if result.accuracy is None else (100 * result.accuracy, None)

    def _explicit(self, row: Row, experiment: Experiment, result: RunResult) -> tuple[float, None]:
        """Figure 2's number, computed once and kept beside the run that it begins with."""
        assert result.path is not None
        kept = result.path / f"{row.name}.json"
        if not kept.is_file():
            with isolated():
                bench, theta = self.benches.prepare(experiment), result._federation.server.state["theta"]
                found = list(gains(bench, theta, row.name == "explicit", _workers(experiment)))
            write_atomically(kept, json.dumps(found) + "\n")
        return 100 * fmean(json.loads(kept.read_text(encoding="utf-8"))), None

    def outcome(self) -> Record:
        """All numbers, ours and theirs, as plain values."""
        rows = []
        for row in self.preset.rows:
            cells = []
            for place, column in enumerate(self.preset.columns):
                ours = None if row.missing else self.ours(row, column)
                cells.append(
                    {"column": column, "paper": row.theirs[place], "ours": ours[0] if ours else None,
                     "spread": ours[1] if ours else None}
                )  # fmt: skip
            rows.append({"row": row.name, "title": row.title, "missing": row.missing, "cells": cells})
        return {
            "preset": self.preset.name,
            "title": self.preset.title,
            "paper": self.preset.paper,
            "measure": self.preset.measure,
            "rounds": self.rounds,
            "full_rounds": self.full_rounds,
            "seeds": self.seeds,
            "claim": self.preset.claim,
            "notes": list(self.preset.notes),
            "rows": rows,
        }


def run_cost(experiment: Experiment, bench: Bench) -> Cost:
    """What a run will cost, from one visit to a client of middling size, cut to a few samples."""
    with isolated():
        run = federation(experiment.model_copy(update={"engine": "in-process", "states": "memory"}), bench, None)
        run.start()
        participants = run._call(1) or [0]
        sizes = bench.data.samples.tolist()
        chosen = sorted(participants, key=lambda client: sizes[client])[len(participants) // 2]
        client = bench.client(chosen, 1, {})
        kept = min(client.samples, SHORT) if experiment.steps is None or experiment.batch == "full" else client.samples
        client = replace(client, train=(client.train[0][:kept], client.train[1][:kept]))
        message = bench.method.send(run.server, chosen)
        few = (client.train[0][:2], client.train[1][:2])
        bench.method.train(replace(client, state={}, train=few), message)  # a first time for everything, not measured
        with counted_samples(bench.network) as passed:
            begin = time.perf_counter()
            bench.method.train(client, message)
            seconds = time.perf_counter() - begin
    training = bench.data.clients - len(bench.data.new)
    mean_size = fmean(sizes[:training])
    scale = mean_size / kept if kept < client.samples or experiment.steps is None or experiment.batch == "full" else 1
    visits = experiment.rounds * bench.participation * training * scale
    evaluations = 1 + experiment.rounds // experiment.evaluation.every
    bounds = bench.data.bounds
    held_out = float((bounds[:, 3] - bounds[:, 1]).sum()) / 3  # a pass forward is a third of one there and back
    tuned = experiment.evaluation.fine_tune * float(bench.data.samples.sum())
    each = seconds / max(sum(passed), 1)
    total = visits * seconds + evaluations * (held_out + tuned) * each
    return Cost(visits * sum(passed), total / _workers(experiment))


def _workers(experiment: Experiment) -> int:
    return 1 if experiment.engine == "in-process" else experiment.workers or len(os.sched_getaffinity(0))


@contextmanager
def counted_samples(network: Network) -> Iterator[list[int]]:
    """Count the samples that pass through the first layer: a head on cached features costs next to nothing."""
    passed: list[int] = []
    first = network.module.get_submodule(next(iter(network.layers)))
    hook = first.register_forward_hook(lambda module, inputs, output: passed.append(len(inputs[0])))
    try:
        yield passed
    finally:
        hook.remove()


def markdown(outcome: Record) -> str:
    """The table as Markdown, with all that must be known to read it."""
    columns = [cell["column"] for cell in outcome["rows"][0]["cells"]]
    head = ["method", *(f"{column}, {whose}" for column in columns for whose in ("ours", "paper"))]
    lines = [f"# {outcome['preset']}", "", outcome["title"], "", f"{outcome['paper']}.", ""]
    if text := shortened(outcome):
        lines += [f"**{text}**", ""]
    lines += ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in outcome["rows"]:
        cells = [text for cell in row["cells"] for text in (ours_text(outcome, row, cell), cell["paper"] or "–")]
        lines.append("| " + " | ".join([row["title"], *cells]) + " |")
    notes = [*outcome["notes"], *([f"The paper: {outcome['claim']}"] if outcome["claim"] else [])]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def shortened(outcome: Record) -> str:
    """Says so, if this is not the paper's number of rounds."""
    asked, full = outcome["rounds"], outcome["full_rounds"]
    return (
        "" if asked >= full else f"Shortened: {asked} of {full} rounds. The numbers cannot be compared as they stand."
    )


def ours_text(outcome: Record, row: Record, cell: Record) -> str:
    """Our number as it is printed."""
    if row["missing"]:
        return "missing"
    if cell["ours"] is None:
        return f"> {outcome['rounds']}" if outcome["measure"] == "rounds" else "–"
    digits = 0 if outcome["measure"] == "rounds" and outcome["seeds"] == 1 else 2
    spread = "" if cell["spread"] is None else f" ± {cell['spread']:.2f}"
    return f"{cell['ours']:.{digits}f}{spread}"

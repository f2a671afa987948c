"""Reproduction of a paper's table: its expected cost, its runs, and our numbers beside the paper's."""

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated

from pydantic import Field
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import read_sealed, seal, write_atomically
from fedtailor.client.sites import Site
from fedtailor.engines.preparation import Prepared
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import OnRound, OnStart, PreparedRuns
from fedtailor.engines.simulation import Simulation
from fedtailor.engines.transports import cores
from fedtailor.experiment import EXECUTION_ONLY, Experiment, flat
from fedtailor.server.evaluation import averages
from fedtailor.server.records import Plain, Record, RoundRecord
from fedtailor.server.run_directory import plain
from fedtailor.studies.explicit import Steps, keep_steps, kept_steps
from fedtailor.studies.measures import individual_gains, majority_baseline, samples_per_second
from fedtailor.studies.outcome import add_histogram, add_speedups, markdown
from fedtailor.studies.presets import Preset, Row, Settings
from fedtailor.studies.runner import done, perform, run_name
from fedtailor.training.client import Client
from fedtailor.training.isolation import isolated
from fedtailor.training.network import Network

SHOWN = (1, 2, 5, 10, 20, 50, 100)  # rounds of pFedMB's Figure 3, and the last one
CLEAR = 1e-6  # a client's largest α exceeds its second by more than this, or it has no branch yet
SHORT = 100  # training samples in the measurement of a method's speed
Value = tuple[float, float | None]  # a number and its spread


@dataclass(frozen=True)
class Cost:
    """The expected cost of a run: training samples passed through the network, and seconds on this machine."""

    samples: float
    seconds: float


class Reproduction:
    """A preset at work: its runs below a directory, shared with other presets that need the same ones."""

    def __init__(self, preset: Preset, out: Path, seeds: int = 1, changes: Settings | None = None) -> None:
        self.preset, self.out, self.seeds, self.changes = preset, out, seeds, changes or {}
        self._prepared = PreparedRuns()
        self.full_rounds = max(preset.experiment(row, column).rounds for row, column in self.cells())
        self.rounds = int(self.changes.get("rounds", self.full_rounds))

    def cells(self) -> Iterator[tuple[Row, str]]:
        """Yield the row and column of every cell whose method is there."""
        found = False
        for column in self.preset.columns:
            for row in self.preset.rows:
                if not row.missing:
                    found = True
                    yield row, column
        if not found:
            raise FedtailorError(f"None of the methods of {self.preset.name} is in the catalogue yet.")

    def experiment(self, row: Row, column: str, seed: int) -> Experiment:
        """Make the experiment of one cell and seed."""
        own = self.preset.experiment(row, column).rounds
        rounds = self.rounds if own == self.full_rounds else min(own, self.rounds)
        return self.preset.experiment(row, column, {**self.changes, "rounds": rounds, "seed": seed})

    def experiments(self) -> dict[Path, Experiment]:
        """List all runs that are needed, each once, in the order of their data."""
        wanted = []
        for column in self.preset.columns:
            for seed in range(self.seeds):
                wanted += [self.experiment(row, column, seed) for row, column_ in self.cells() if column_ == column]
                if self.preset.measure == "gain":
                    wanted.append(self._local(column, seed))
        return {self.path(experiment): experiment for experiment in wanted}

    def path(self, experiment: Experiment) -> Path:
        """Return the directory of a run."""
        return self.out / self.preset.name.partition("/")[0] / run_name(experiment)

    def _local(self, column: str, seed: int) -> Experiment:
        """Make the experiment of Local that individual gains are measured against."""
        return self.experiment(Row("local", "local", "local", {}, ()), column, seed)

    # --- the work ---

    def todo(self) -> dict[Path, Experiment]:
        """List the runs that are not finished yet."""
        return {path: run for path, run in self.experiments().items() if done(path, self.enough) is None}

    def enough(self, record: RoundRecord) -> bool:
        """Find out whether a run may end with this round: it has reached the target of a preset that counts rounds."""
        target = self.preset.target
        return target is not None and record.accuracy is not None and record.accuracy >= target

    def cost(self, experiment: Experiment) -> Cost:
        """Estimate the cost of a run."""
        return run_cost(experiment, self._prepared.prepare(experiment))

    def run(self, path: Path, experiment: Experiment, on_round: OnRound, on_start: OnStart) -> RunResult:
        """Do one run, or what is left of it."""
        return perform(experiment, path, self._prepared.prepare, on_round, on_start, self.enough)

    # --- the numbers ---

    def ours(self, row: Row, column: str, last: bool = False) -> Value | None:
        """Compute the number of one cell and its spread: over seeds, or over clients where the paper's is.

        It is that of the round that counts, or of the `last` one.
        """
        values = [self._value(row, column, seed, last) for seed in range(self.seeds)]
        found = [value for value in values if value is not None]
        if not found:
            return None
        if self.preset.measure == "gain":
            return fmean(v for v, _ in found), fmean(s for _, s in found if s is not None)
        return fmean(v for v, _ in found), pstdev(v for v, _ in found) if len(found) > 1 else None

    def _value(self, row: Row, column: str, seed: int, last: bool) -> Value | None:
        """Compute the number of one cell from one seed's run; a spread is over its clients."""
        experiment = self.experiment(row, column, seed)
        result = self._done(experiment, last)
        if result is None:
            return None
        measure = self.preset.measure
        if measure == "rounds":
            reached = next((record.round for record in result.rounds if self.enough(record)), None)
            return None if reached is None else (float(reached), None)
        if measure == "gain":
            base = self._done(self._local(column, seed), last)
            gained = None if base is None else [100 * gain for gain in individual_gains(result, base).values()]
            return None if not gained else (fmean(gained), pstdev(gained))
        if measure == "throughput":
            first = self.experiment(next(row for row, _ in self.cells()), column, seed)
            yardstick = done(self.path(first))
            theirs = None if yardstick is None else samples_per_second(yardstick)
            return (100 * (samples_per_second(result) or 0) / theirs, None) if theirs else None
        if measure == "correlation":
            pair = result.observed(result.rounds[-1].round).get("correlation")
            return None if pair is None else (float(pair[list(self.preset.columns).index(column)]), None)
        if measure == "explicit":
            return 100 * fmean(self._steps(row, experiment, result).gains), None
        if measure == "pairs":
            alpha = result.observed(result.rounds[-1].round).get("alpha")
            place = list(self.preset.columns).index(column)
            return None if alpha is None else (float(shared_branches(alpha)[place]), None)
        if measure == "train_loss":
            chosen = result.chosen()
            return None if chosen is None or chosen.train_loss is None else (chosen.train_loss, None)
        if self.preset.domains and column != list(self.preset.columns)[-1]:
            members = [m.accuracy for c, m in result.per_client.items() if result.names[c].startswith(f"{column}-")]
            return 100 * fmean(a for a in members if a is not None), None
        return None if result.accuracy is None else (100 * result.accuracy, None)

    def results(self, row: Row, column: str, last: bool = False) -> list[RunResult]:
        """Load the finished runs of one cell, one for each seed; see `ours` for `last`."""
        found = [self._done(self.experiment(row, column, seed), last) for seed in range(self.seeds)]
        return [result for result in found if result is not None]

    def _done(self, experiment: Experiment, last: bool = False) -> RunResult | None:
        """Load the result of a finished run; its result may be made that of the `last` round, whatever rule it has."""
        result = done(self.path(experiment), self.enough)
        if result is None or not last:
            return result
        result, evaluation = copy(result), experiment.evaluation.model_copy(update={"choose": "last"})
        result.experiment = result.experiment.model_copy(update={"evaluation": evaluation})
        return result

    def _flattered(self, row: Row, column: str) -> bool:
        """Find out whether the round that counts is the best one by test accuracy."""
        best = self.preset.experiment(row, column).evaluation.choose == "best-test"
        return best and self.preset.measure in ("accuracy", "gain")

    def _steps(self, row: Row, experiment: Experiment, result: RunResult) -> Steps:
        """Compute Figure 2's numbers once, and keep them beside the run that they begin with."""
        assert result.path is not None
        file = result.path / f"{row.name}.json"
        if (kept := kept_steps(file)) is not None:
            return kept
        with isolated():
            prepared, theta = self._prepared.prepare(experiment), result.server_state["theta"]
            return keep_steps(file, prepared, theta, row.name == "explicit", _workers(experiment))

    def _majority(self) -> dict[str, float]:
        """Compute for each column of a table of accuracies, in %, that of the clients' most frequent classes."""
        found: dict[str, dict[int, float]] = {}
        for row, column in self.cells() if self.preset.measure == "accuracy" and not self.preset.domains else ():
            for seed in range(self.seeds):
                known = found.setdefault(column, {})
                result = None if seed in known else self._done(self.experiment(row, column, seed))
                if result is not None and (share := majority_baseline(result)) is not None:
                    known[seed] = 100 * share
        return {column: fmean(shares.values()) for column, shares in found.items() if shares}

    def curves(self) -> list[Row]:
        """List the rows whose curve is computed after the runs: PGFed's Figures 2 and 4, minutes of work."""
        return [row for row in self.preset.rows if not row.missing and self._has_curve(row)]

    def _has_curve(self, row: Row) -> bool:
        evaluation = self.preset.experiment(row, next(iter(self.preset.columns))).evaluation
        return self.preset.measure == "explicit" or (evaluation.clients == "new" and evaluation.fine_tune > 0)

    def details(self, row: Row) -> Plain:
        """Collect what a figure shows of a row beside its number: a curve, the clients' gains, α over rounds."""
        if row.missing:
            return {}
        column = next(iter(self.preset.columns))
        wanted = [self.experiment(row, column, seed) for seed in range(self.seeds)]
        runs = [(experiment, result) for experiment in wanted if (result := self._done(experiment)) is not None]
        if self.preset.measure == "explicit":
            steps = [self._steps(row, *run) for run in runs]
            gains = [100 * gain for found in steps for gain in found.gains]
            return {"curve": _mean_curve([found.accuracy for found in steps]), "gains": gains}
        if self._has_curve(row):
            kept = [fine_tuning_curve(path / "fine-tuning.json", run) for _, run in runs if (path := run.path)]
            return {"curve": _mean_curve(kept)}
        if self.preset.measure == "pairs" and runs:
            return {"alpha": alpha_over_rounds(runs[0][1])}
        return {}

    def write(self, outcome: Plain) -> Path:
        """Write the outcome beside the runs, as Markdown and JSON; return the files' common stem."""
        stem = self.out / self.preset.name.replace("/", "-")
        write_atomically(stem.with_suffix(".json"), json.dumps(plain(outcome), indent=2, ensure_ascii=False) + "\n")
        write_atomically(stem.with_suffix(".md"), markdown(outcome))
        return stem

    def outcome(self) -> Plain:
        """Collect all numbers, ours and the paper's, as JSON has them."""
        rows = []
        for row in self.preset.rows:
            cells = []
            for place, column in enumerate(self.preset.columns):
                ours = None if row.missing else self.ours(row, column)
                cell = {"column": column, "paper": row.theirs[place], "ours": ours[0] if ours else None,
                        "spread": ours[1] if ours else None}  # fmt: skip
                if not row.missing and self._flattered(row, column):
                    last = self.ours(row, column, last=True)
                    cell["last"] = last[0] if last else None
                cells.append(cell)
            about = {"row": row.name, "title": row.title, "missing": row.missing, "in_paper": not row.added}
            rows.append({**about, "cells": cells, **self.details(row)})
        outcome = {
            "preset": self.preset.name,
            "title": self.preset.title,
            "paper": self.preset.paper,
            "measure": self.preset.measure,
            "rounds": self.rounds,
            "full_rounds": self.full_rounds,
            "seeds": self.seeds,
            "changed": {name: value for name, value in flat(self.changes) if name not in {"rounds", *EXECUTION_ONLY}},
            "claim": self.preset.claim,
            "notes": list(self.preset.notes),
            "not_in_paper": self.preset.not_in_paper,
            "majority": self._majority(),
            "rows": rows,
        }
        if self.preset.measure == "rounds":
            add_speedups(outcome, self.preset)
        add_histogram(outcome)
        return outcome


def _mean_curve(curves: list[list[float]]) -> list[float]:
    """Average curves of seeds, in %."""
    return [100 * fmean(values) for values in zip(*curves, strict=True)]


def run_cost(experiment: Experiment, prepared: Prepared) -> Cost:
    """Estimate the cost of a run from one client's work in round 1: one of middling size, cut to a few samples."""
    alone = experiment.model_copy(update={"engine": "in-process", "states": "memory"})
    data, terms, method = prepared.data, prepared.terms, prepared.terms.method
    sizes = data.n_samples.tolist()
    with isolated(), closing(Simulation(replace(prepared, experiment=alone))) as simulation:
        simulation.start()
        participants = simulation.loop.call(1) or [0]
        chosen = sorted(participants, key=lambda client: sizes[client])[len(participants) // 2]
        simulation.server.participants = [chosen]  # nobody else needs a message
        message = method.send_all(simulation.server)[chosen]
        site, n_samples = simulation.sites.site(chosen), sizes[chosen]
        whole_batches = experiment.steps is not None and experiment.batch != "full"  # a step costs the same for all
        kept = n_samples if whole_batches else min(n_samples, SHORT)
        method.train(_first_samples(site, 2), message)  # a first time for everything, not measured
        client = _first_samples(site, kept)
        with counted_samples(prepared.terms.network) as passed:
            begin = time.perf_counter()
            method.train(client, message)
            seconds = time.perf_counter() - begin
    training = data.n_training
    scale = 1 if whole_batches else fmean(sizes[:training]) / kept
    participations = experiment.rounds * terms.participation * training * scale
    evaluations = 1 + experiment.rounds // experiment.evaluation.every
    held_out = int((data.places[:, 3] - data.places[:, 1]).sum()) / 3  # a forward pass: a third of both
    tuned = experiment.evaluation.fine_tune * sum(sizes)
    each = seconds / max(sum(passed), 1)
    total = participations * seconds + evaluations * (held_out + tuned) * each
    return Cost(participations * sum(passed), total / _workers(experiment))


def _first_samples(site: Site, count: int) -> Client:
    """Make a site's client of round 1 with its first training samples alone."""
    x, y = site.data.train
    return replace(site.client(1, {}), train_data=(x[:count], y[:count]))


def _workers(experiment: Experiment) -> int:
    return 1 if experiment.engine == "in-process" else experiment.workers or cores()


@contextmanager
def counted_samples(network: Network) -> Iterator[list[int]]:
    """Count the samples that pass through the first layer: a head on cached features costs next to nothing.

    The hook that counts them also keeps the hand-written passes of `chain_of` from being used meanwhile.
    """
    passed: list[int] = []
    first = network.module.get_submodule(next(iter(network.layout.layers)))
    hook = first.register_forward_hook(lambda module, inputs, output: passed.append(len(inputs[0])))
    try:
        yield passed
    finally:
        hook.remove()


# --- pFedMB's Figure 3: whether clients with the same classes come to use the same branch ---


def shared_branches(alpha: Tensor) -> tuple[int, int]:
    """Count the pairs (clients 2k and 2k+1) with both clients on the same branch, and the different branches of these.

    `alpha` is clients × layers × branches. A client's branch is the one with its largest α, on average over layers.
    """
    own = [_branch(weights.tolist()) for weights in alpha.mean(1)]
    shared = [one for one, other in zip(own[::2], own[1::2], strict=True) if one is not None and one == other]
    return len(shared), len(set(shared))


def _branch(weights: list[float]) -> int | None:
    largest, *others = sorted(weights, reverse=True)
    return weights.index(largest) if not others or largest - others[0] > CLEAR else None


def alpha_over_rounds(result: RunResult) -> list[Plain]:
    """Return the α of all clients after a few rounds of a run, and what they come to."""
    recorded, last = result.observations.rounds(), result.rounds[-1].round
    found = []
    for number in (number for number in recorded if number in SHOWN or number == last):
        alpha = result.observed(number)["alpha"]
        pairs, branches = shared_branches(alpha)
        weights = [[round(value, 4) for value in own] for own in alpha.mean(1).tolist()]
        found.append({"round": number, "pairs": pairs, "branches": branches, "alpha": weights})
    return found


# --- PGFed's Figure 4: learning curves of new clients that fine-tune a finished run's model ---


@dataclass(kw_only=True)
class FineTuning(Record):
    """The new clients' mean test accuracy before (entry 0) and after each epoch."""

    accuracy: Annotated[list[float], Field(min_length=1)]


def fine_tuning_curve(kept: Path, result: RunResult) -> list[float]:
    """Compute the curve that a run's evaluation on new clients ends with, once, and keep it in a file."""
    if not kept.is_file():
        with isolated():
            found = _curve(result)
        write_atomically(kept, seal({"accuracy": found}))
    return read_sealed(kept, FineTuning.from_json).accuracy


def _curve(result: RunResult) -> list[float]:
    simulation, protocol = result.simulation, result.experiment.evaluation
    method, server, data = simulation.loop.method, simulation.server, simulation.data
    terms = replace(simulation.prepared.terms, fine_tune=protocol.fine_tune, on_train=False)
    message, shared = method.broadcast(server), method.global_model(server) if protocol.model == "global" else None
    measured = {}
    for number in sorted(data.new):
        site = Site(number, data.client(number), terms)
        start = method.personal_model(site.client(simulation.finished, {}), message) if shared is None else shared
        measured[number] = [site.measure(site.network_at(theta)) for theta in site.fine_tuning_path(start)]
    epochs = range(protocol.fine_tune + 1)
    means = [averages({c: of[k] for c, of in measured.items()}, protocol.average, result.metric) for k in epochs]
    return [mean.accuracy for mean in means if mean.accuracy is not None]

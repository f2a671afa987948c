"""The evaluation protocol at work: which models are measured in a round, and what is made of the numbers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fedtailor.errors import FedtailorError
from fedtailor.experiment import Evaluation
from fedtailor.method import Message, Method, Server
from fedtailor.server.record import Record
from fedtailor.site.work import Measured
from fedtailor.store import States, of_client
from fedtailor.transport import Engine, Result, Task

# Held-out samples of clients that are evaluated together: as many as make this number of tasks, within these bounds.
# The workers' number counts for nothing, so that figures do not depend on it.
TASKS, FEWEST, MOST = 16, 64, 1024
METRICS = ("accuracy", "loss", "balanced_accuracy", "auc")
AVERAGED = (*METRICS, "accuracy_std", "accuracy_worst_decile", "validation_accuracy", "validation_loss", "train_loss",
            "train_accuracy")  # fmt: skip


@dataclass
class Evaluator:
    """Measures what the protocol asks for, and nothing twice: a model that did not change keeps its numbers."""

    protocol: Evaluation
    method: Method
    engine: Engine
    states: States
    clients: list[int]  # who may be evaluated: the training clients, or the new ones
    test_samples: list[int]
    train_samples: list[int]
    held_out_samples: list[int]  # validation and test
    known: dict[int, tuple[int | None, Measured]] = field(default_factory=dict)

    def due(self, round: int, last: int) -> bool:
        """Whether this round is evaluated. Local models always are: they are gone after the round."""
        return self.protocol.model == "local" or round % self.protocol.every == 0 or round == last

    def evaluate(self, server: Server, trained: Iterable[Result]) -> dict[int, Measured]:
        """The round's measurements by client."""
        if self.protocol.model == "local":
            for result in trained:
                self.known[result.clients[0]] = (None, result.measured[0])
        chosen = self.clients
        if self.protocol.clients == "participants":
            called = set(server.participants)
            chosen = [client for client in chosen if client in called]
        if self.protocol.model == "local":
            return {client: self.known[client][1] for client in chosen if client in self.known}
        fresh: dict[int, Measured] = {}
        for result in self.engine.run(list(self._tasks(server, chosen))):
            if result.error:
                raise FedtailorError(f"The evaluation of client {result.clients[0]} failed: {result.error}.")
            fresh |= dict(zip(result.clients, result.measured, strict=True))
            if not result.used_message:
                client = result.clients[0]
                self.known[client] = (self.states.versions.get(of_client(client)), fresh[client])
        return {client: fresh[client] if client in fresh else self.known[client][1] for client in chosen}

    def remember(self, clients: Iterable[Record]) -> None:
        """Take up what a resumed run had recorded: a participant's local model is measured only once."""
        if self.protocol.model == "local":
            for record in clients:
                self.known |= {int(client): (None, _as_measured(m)) for client, m in record["results"].items()}

    def _tasks(self, server: Server, chosen: list[int]) -> Iterator[Task]:
        if self.protocol.model == "global":
            theta = self.method.central(server)
            assert theta is not None  # checked before the run
            message: Message = {"theta": theta}
        else:
            message = self.method.broadcast(server)
        if self.protocol.model == "global" or type(self.method).personal is Method.personal:
            for group in self._groups(chosen):
                yield Task("evaluate shared", server.round, group, message)
            return
        for client in chosen:
            if client not in self.known or self.known[client][0] != self.states.versions.get(of_client(client)):
                yield Task("evaluate", server.round, (client,), message, partial(self.states.get, of_client(client)))

    def _groups(self, chosen: list[int]) -> Iterator[tuple[int, ...]]:
        """Neighbouring clients, as many as fit one pass; one by one where each fine-tunes the model first."""
        group: list[int] = []
        samples = 0
        fit = min(max(sum(self.held_out_samples[client] for client in chosen) // TASKS, FEWEST), MOST)
        for client in chosen:
            samples += self.held_out_samples[client]
            if group and (self.protocol.fine_tune or samples > fit):
                yield tuple(group)
                group, samples = [], self.held_out_samples[client]
            group.append(client)
        if group:
            yield tuple(group)


def _as_measured(recorded: Measured) -> Measured:
    """What was measured, from its record: a loss that was no finite number is null there."""
    return {
        split: {**metrics, "loss": float("nan")}
        if metrics["loss"] is None and metrics["accuracy"] is not None
        else metrics
        for split, metrics in recorded.items()
    }


def summary(
    measured: dict[int, Measured], average: str, test_samples: list[int], train_samples: list[int]
) -> dict[str, Any]:
    """A round's figures: the mean of each metric, the spread of the accuracy over clients, its worst decile (the mean
    of the worst tenth of the clients, at least one), the mean on validation samples and, where it was measured, on
    training samples, weighted by their number: the objective Σ n_i/n f_i."""

    def values(split: str, metric: str) -> tuple[list[float], list[int]]:
        samples = train_samples if split == "train" else test_samples
        pairs = [(m[split][metric], samples[client]) for client, m in sorted(measured.items()) if split in m]
        return [v for v, _ in pairs if v is not None], [n for v, n in pairs if v is not None]

    def mean(split: str, metric: str) -> float | None:
        found, weights = values(split, metric)
        if not found:
            return None
        by_samples = (average == "sample" or split == "train") and any(weights)
        return float(np.average(found, weights=weights if by_samples else None))

    figures: dict[str, Any] = {metric: mean("test", metric) for metric in METRICS}
    accuracies = sorted(values("test", "accuracy")[0])
    figures["accuracy_std"] = float(np.std(accuracies)) if accuracies else None
    worst = accuracies[: max(1, len(accuracies) // 10)]
    figures["accuracy_worst_decile"] = float(np.mean(worst)) if worst else None
    figures["validation_accuracy"] = mean("validation", "accuracy")
    figures["validation_loss"] = mean("validation", "loss")
    if any("train" in of_client for of_client in measured.values()):
        figures |= {"train_loss": mean("train", "loss"), "train_accuracy": mean("train", "accuracy")}
    figures["evaluated"] = len(values("test", "loss")[0])
    return figures


def chosen_round(rounds: list[dict[str, Any]], choose: str) -> dict[str, Any] | None:
    """The round whose figures are the result. Best is by accuracy, or by loss where there is no accuracy; the first
    of equals."""
    evaluated = [record for record in rounds if record.get("evaluated")]
    if not evaluated:
        return None
    if choose == "last-10":
        return _mean_round(evaluated[-10:])
    if choose == "last":
        return evaluated[-1]
    prefix = "validation_" if choose == "best-validation" else ""
    by_accuracy = [record for record in evaluated if record.get(f"{prefix}accuracy") is not None]
    if by_accuracy:
        return max(by_accuracy, key=lambda record: float(record[f"{prefix}accuracy"]))
    by_loss = [record for record in evaluated if record.get(f"{prefix}loss") is not None]
    return min(by_loss, key=lambda record: float(record[f"{prefix}loss"])) if by_loss else None


def _mean_round(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    mean = dict(rounds[-1])
    for name in (name for name in mean if name in AVERAGED):
        found = [record[name] for record in rounds if record[name] is not None]
        mean[name] = float(np.mean(found)) if found else None
    return mean

"""Evaluation: which models are measured in a round, and the averages of their metrics."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedtailor.errors import FedtailorError
from fedtailor.experiment import Evaluation
from fedtailor.messages import NEVER, Evaluate, EvaluateShared, Measured, Message, Metrics, Reply, Request
from fedtailor.method import Method, Server
from fedtailor.server.records import Averages, ClientsRecord, RoundRecord
from fedtailor.transport import Transport

METRICS = ("accuracy", "loss", "balanced_accuracy", "auc")
AVERAGED = (*METRICS, "accuracy_std", "accuracy_worst_decile", "validation_accuracy", "validation_loss", "train_loss",
            "train_accuracy")  # fmt: skip
LAST = {"last-5": 5, "last-10": 10}  # evaluated rounds of which a result is the mean


@dataclass
class Evaluator:
    """Measures what the protocol asks for, and nothing twice: a model that did not change keeps its metrics."""

    protocol: Evaluation
    method: Method
    clients: list[int]  # that may be evaluated: the training clients, or the new ones
    names: Sequence[str]  # of all clients
    known: dict[int, tuple[int, Measured]] = field(default_factory=dict)  # with the version of the state behind it

    def due(self, round: int, last: int) -> bool:
        """Find out whether this round is evaluated. Local models always are: they are gone after the round."""
        every = self.protocol.every
        return every > 0 and (self.protocol.model == "local" or round % every == 0 or round == last)

    def evaluate(
        self, server: Server, versions: dict[int, int], trained: Iterable[Reply], transport: Transport
    ) -> dict[int, Measured]:
        """Measure what the protocol asks for in this round, by client."""
        chosen = self.clients
        if self.protocol.clients == "participants":
            called = set(server.participants)
            chosen = [client for client in chosen if client in called]
        if self.protocol.model == "local":
            self.known |= {reply.clients[0]: (NEVER, reply.measured[0]) for reply in trained}
            return {client: self.known[client][1] for client in chosen if client in self.known}
        message, lasts = self._message(server)
        for reply in transport.ask(list(self._requests(server.round, chosen, versions, message, lasts))):
            if reply.error:
                raise FedtailorError(
                    f"The evaluation of client {self.names[reply.clients[0]]} failed: {reply.error}."
                ) from reply.cause
            for client, measured in zip(reply.clients, reply.measured, strict=True):
                self.known[client] = (versions.get(client, NEVER), measured)
        return {client: self.known[client][1] for client in chosen}

    def remember(self, clients: Iterable[ClientsRecord]) -> None:
        """Take up what a resumed run had recorded: a participant's local model is measured only once."""
        if self.protocol.model == "local":
            for record in clients:
                self.known |= {client: (NEVER, _as_measured(m)) for client, m in record.results.items()}

    def _message(self, server: Server) -> tuple[Message, bool]:
        """Return the message of an evaluation, and whether clients that have trained do without it."""
        if self.protocol.model == "global":
            theta = self.method.global_model(server)
            assert theta is not None  # checked before the run
            return {"theta": theta}, False
        return self.method.broadcast(server), self.method.keeps_model

    def _requests(
        self, round: int, chosen: list[int], versions: dict[int, int], message: Message, lasts: bool
    ) -> Iterator[Request]:
        if (self.protocol.model == "global" or self.method.shares_model) and chosen:
            yield EvaluateShared(round, chosen[0], message, others=tuple(chosen[1:]))
            return
        for client in chosen:
            version = versions.get(client, NEVER)
            unchanged = client in self.known and self.known[client][0] == version
            if not (unchanged and (not message or (lasts and version != NEVER))):
                yield Evaluate(round, client, message, version)


def _as_measured(recorded: Measured) -> Measured:
    """The metrics behind a record: a loss that was no finite number is None there."""

    def with_loss(metrics: Metrics) -> Metrics:
        lost = metrics.loss is None and (metrics.accuracy is not None or metrics.n_samples > 0)
        return replace(metrics, loss=float("nan")) if lost else metrics

    return {split: with_loss(metrics) for split, metrics in recorded.items()}


def averages(measured: dict[int, Measured], average: str) -> Averages:
    """Average the metrics of all clients: over clients, or over the samples of the split (`average = "sample"`)."""
    ordered = [measured[client] for client in sorted(measured)]

    def values(split: str, metric: str) -> tuple[list[float], list[int]]:
        pairs = [(getattr(m[split], metric), m[split].n_samples) for m in ordered if split in m]
        return [v for v, _ in pairs if v is not None], [n for v, n in pairs if v is not None]

    def mean(split: str, metric: str) -> float | None:
        found, weights = values(split, metric)
        if not found:
            return None
        by_samples = (average == "sample" or split == "train") and any(weights)
        return float(np.average(found, weights=weights if by_samples else None))

    accuracies = sorted(values("test", "accuracy")[0])
    worst = accuracies[: max(1, len(accuracies) // 10)]
    return Averages(
        **{metric: mean("test", metric) for metric in METRICS},
        accuracy_std=float(np.std(accuracies)) if len(accuracies) > 1 else None,  # one client has no spread
        accuracy_worst_decile=float(np.mean(worst)) if worst else None,
        validation_accuracy=mean("validation", "accuracy"),
        validation_loss=mean("validation", "loss"),
        train_loss=mean("train", "loss"),
        train_accuracy=mean("train", "accuracy"),
        evaluated=len(values("test", "loss")[0]),
    )


def chosen_round(rounds: list[RoundRecord], choose: str) -> RoundRecord | None:
    """Find the round whose metrics are the result. Best is by accuracy, or by loss where there is no accuracy; the
    first of equals."""
    evaluated = [record for record in rounds if record.evaluated]
    if not evaluated:
        return None
    if choose in LAST:
        return _mean_round(evaluated[-LAST[choose] :])
    if choose == "last":
        return evaluated[-1]
    prefix = "validation_" if choose == "best-validation" else ""
    by_accuracy = [record for record in evaluated if getattr(record, f"{prefix}accuracy") is not None]
    if by_accuracy:
        return max(by_accuracy, key=lambda record: float(getattr(record, f"{prefix}accuracy")))
    by_loss = [record for record in evaluated if getattr(record, f"{prefix}loss") is not None]
    return min(by_loss, key=lambda record: float(getattr(record, f"{prefix}loss"))) if by_loss else None


def _mean_round(rounds: list[RoundRecord]) -> RoundRecord:
    means: dict[str, Any] = {}
    for name in AVERAGED:
        found = [value for record in rounds if (value := getattr(record, name)) is not None]
        means[name] = float(np.mean(found)) if found else None
    return replace(rounds[-1], **means)

"""Evaluation: which models are measured in a round, who is missing, and the averages of the metrics."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from fedtailor._common.errors import shown
from fedtailor.experiment import Evaluation
from fedtailor.messages import NEVER, Evaluate, EvaluateShared, Measured, Message, Metrics, Reply, Request
from fedtailor.messages.transport import Transport
from fedtailor.method import Method, Server
from fedtailor.server.records import MORE, Averages, ClientsRecord, RoundRecord
from fedtailor.training.metrics import ACCURACY, LOSS, METRICS, Metric

MEASURED = (*METRICS, "own")
AVERAGED = tuple(each.name for each in fields(Averages) if each.name not in ("evaluated", *MORE))
SHARES = ("accuracy", "balanced_accuracy", "auc", "f1", "exact_match")  # which are from 0 to 1
MOST_SAMPLES = 2**40  # that a client may say it has: the sum over clients is still exact
LAST = {"last-5": 5, "last-10": 10}  # evaluated rounds of which a result is the mean


class Evaluated(NamedTuple):
    """An evaluation: the metrics by client, the clients that have none, and the reply of each that was asked now.

    A client is missing if its evaluation failed, or if it tells no metrics: then its reply has no error.
    """

    measured: dict[int, Measured]
    missing: list[int]
    replies: dict[int, Reply]


@dataclass
class Evaluator:
    """Measures what the protocol asks for, and nothing twice: a model that did not change keeps its metrics."""

    protocol: Evaluation
    method: Method
    clients: Sequence[int]  # that may be evaluated, in order: the training clients, or the new ones
    # Metrics with the version of the state behind them; of a local model with its round, None if it tells none.
    known: dict[int, tuple[int, Measured | None]] = field(default_factory=dict)

    def due(self, round: int, last: int) -> bool:
        """Find out whether this round is evaluated. Local models always are: they are gone after the round."""
        every = self.protocol.every
        return every > 0 and (self.protocol.model == "local" or round % every == 0 or round == last)

    def evaluate(
        self,
        server: Server,
        versions: dict[int, int],
        trained: Iterable[Reply],
        transport: Transport,
        away: Collection[int] = (),
    ) -> Evaluated:
        """Measure what the protocol asks for in this round. A client that is not measured now is missing, whatever is
        known of it from before, unless its model is still the same. Those that are `away` are not asked, and count with
        what they had when they were asked last."""
        chosen = self.clients
        if self.protocol.clients == "participants":  # there may be many more clients
            chosen = [client for client in sorted(server.participants) if client in chosen]
        if self.protocol.model == "local":
            chosen, missing, replies = self._local(server.round, chosen, trained)
        else:
            requests, asked = self._requests(server, [c for c in chosen if c not in away], versions)
            replies = self._ask(requests, asked, transport)
            for client, reply in replies.items():
                if reply.measured:
                    self.known[client] = (versions.get(client, NEVER), reply.measured[0])
            missing = [client for client, reply in replies.items() if not reply.measured]
            missing += [client for client in chosen if client in away and client not in self.known]
        lacking = set(missing)
        left = {client: self.known[client][1] for client in chosen if client not in lacking}
        return Evaluated({client: measured for client, measured in left.items() if measured}, missing, replies)

    def _local(
        self, round: int, chosen: Sequence[int], trained: Iterable[Reply]
    ) -> tuple[Sequence[int], list[int], dict[int, Reply]]:
        """Take the metrics that came with this round's training. The other clients keep those of their last local
        model, unless only participants count. Return the clients that count, those that are missing, and the replies.
        """
        replies = {reply.clients[0]: self._checked(reply, 0) for reply in trained}
        for client, reply in replies.items():
            self.known[client] = (round, reply.measured[0] if reply.measured else None)
        current = replies if self.protocol.clients == "participants" else self.known
        due = chosen if self.protocol.clients == "participants" else [client for client in chosen if client in current]
        missing = [client for client in due if client not in current or self.known[client][1] is None]
        return due, missing, replies

    def _ask(self, requests: Sequence[Request], asked: Sequence[int], transport: Transport) -> dict[int, Reply]:
        """Ask these clients, and return one checked reply for each: without metrics if it failed, or tells none. Where
        several clients of one place fail together, each is asked again on its own."""
        waiting, together = set(asked), set[int]()
        replies = {client: Reply((client,), error="it did not answer") for client in asked}
        for reply in transport.ask(requests):
            for place, client in enumerate(reply.clients):
                if client in waiting:
                    waiting.remove(client)
                    replies[client] = self._checked(reply, place)
                    if reply.error and len(reply.clients) > 1:
                        together.add(client)
        if together:
            shared, again = requests[0], [client for client in asked if client in together]
            alone = [EvaluateShared(shared.round, client, shared.message) for client in again]
            replies |= self._ask(alone, again, transport)
        return replies

    def _checked(self, reply: Reply, place: int) -> Reply:
        """Return one client's part of a reply, with an error if its metrics are none. Nothing that a site sends is
        believed; but a client may tell nothing at all."""
        clients, error, measured = reply.clients, reply.error, reply.measured
        if not error and measured and len(measured) != len(clients):
            error = f"it was asked for {len(clients)} measurements and sent {len(measured)}"
        own = {} if error or not measured else measured[place]
        if not isinstance(own, dict) or (own and "test" not in own):
            own, error = {}, "its metrics are not those of its test samples"
        splits = ("test", "validation", "train") if self.protocol.train else ("test", "validation")
        for split, metrics in own.items():
            if split not in splits or not isinstance(metrics, Metrics):
                error = error or f"its metrics on {shown(split)} were not asked for, or are none"
                continue
            if type(count := metrics.n_samples) is not int or not 0 <= count <= MOST_SAMPLES:
                error = error or f"its number of {split} samples is {shown(count)}"
            more = metrics.more
            if (
                not isinstance(more, dict)
                or not more.keys() <= {*(self.protocol.metrics or ())}
                or None in more.values()
            ):
                error = error or f"its own metrics on {split} samples were not asked for, or are none"
                continue
            for name, value in [*((name, getattr(metrics, name)) for name in MEASURED), *more.items()]:
                possible = value is None or isinstance(value, float)  # NaN and infinity: its training diverged
                if not possible or (value is not None and name in SHARES and isfinite(value) and not 0 <= value <= 1):
                    error = error or f"its {name.replace('_', ' ')} on {split} samples is {shown(value)}"
        return Reply((clients[place],), measured=[own] if own and not error else [], error=error, cause=reply.cause)

    def remember(self, clients: Iterable[ClientsRecord], rounds: Iterable[RoundRecord] = ()) -> None:
        """Take up what a resumed run had recorded: a participant's local model is measured only once."""
        if self.protocol.model != "local":
            return
        for record in clients:
            self.known |= {client: (record.round, _as_measured(record, client)) for client in record.results}
        for of_round in rounds:
            for client in of_round.missing:
                if self.known.get(client, (NEVER, None))[0] < of_round.round:
                    self.known[client] = (of_round.round, None)

    def _requests(
        self, server: Server, chosen: Sequence[int], versions: dict[int, int]
    ) -> tuple[list[Request], Sequence[int]]:
        """Make the requests of an evaluation, and list whom they ask. Nothing is asked of a client whose metrics are
        known: it predicts with a state that is still the same, and needs nothing of the server for it."""
        number, method, asked_globally = server.round, self.method, self.protocol.model == "global"
        message: Message = method.broadcast(server) if not asked_globally else {}
        if asked_globally:
            theta = method.global_model(server)
            assert theta is not None  # checked before the run
            message = {"theta": theta}
        if (asked_globally or method.shares_model) and chosen:
            return [EvaluateShared(number, chosen[0], message, others=tuple(chosen[1:]))], chosen
        requests: list[Request] = []
        for client in chosen:
            version = versions.get(client, NEVER)
            unchanged = client in self.known and self.known[client][0] == version
            if not (unchanged and (not message or (method.keeps_model and version != NEVER))):
                requests.append(Evaluate(number, client, message, version))
        return requests, [request.client for request in requests]


def clients_record(
    number: int, measured: dict[int, Measured], bytes_down: dict[int, int], bytes_up: dict[int, int]
) -> ClientsRecord:
    """Make the record of all clients in a round. Metrics that are NaN or infinite become None, and are named."""
    record = ClientsRecord(round=number, results=dict(measured), bytes_down=bytes_down, bytes_up=bytes_up)
    for client, of_client in measured.items():
        for split, metrics in of_client.items():
            values = {name: value for name in MEASURED if (value := getattr(metrics, name)) is not None}
            values |= metrics.more
            if lost := [name for name, value in values.items() if not isfinite(value)]:
                record.not_finite.setdefault(client, {})[split] = lost
                more = {name: value for name, value in metrics.more.items() if name not in lost}
                known = replace(metrics, more=more)
                for name in set(lost) - metrics.more.keys():
                    setattr(known, name, None)
                record.results[client] = {**record.results[client], split: known}
    return record


def _as_measured(record: ClientsRecord, client: int) -> Measured:
    """Return the metrics behind a client's record, where those that were no finite numbers are None. (An older
    version's record does not name them: it is the loss.)"""
    measured = {}
    for split, metrics in record.results[client].items():
        lost = {"loss"} if metrics.loss is None and (metrics.accuracy is not None or metrics.n_samples > 0) else set()
        lost |= {*record.not_finite.get(client, {}).get(split, [])}
        more = {name: float("nan") for name in lost if name not in MEASURED}
        measured[split] = replace(metrics, more={**metrics.more, **more})
        for name in lost - more.keys():
            setattr(measured[split], name, float("nan"))
    return measured


def averages(measured: dict[int, Measured], average: str, metric: Metric = ACCURACY) -> Averages:
    """Average the metrics of all clients: over clients, or over the samples of the split (`average = "sample"`).
    The spread over clients and the worst of them are by the metric that decides."""
    values: dict[str, list[float]] = {}
    means: dict[str, float] = {}
    more: dict[str, dict[str, float]] = {"": {}, "validation_": {}}
    for split, of_split in (("", "test"), ("validation_", "validation"), ("train_", "train")):
        metrics = [measured[client][of_split] for client in sorted(measured) if of_split in measured[client]]
        own = [name for name in dict.fromkeys(name for of in metrics for name in of.more) if split != "train_"]
        for name in (*MEASURED, *own):
            each = [(getattr(of, name) if name in MEASURED else of.more.get(name), of.n_samples) for of in metrics]
            found = values[split + name] = [value for value, _ in each if value is not None]
            weights = [count for value, count in each if value is not None]
            by_samples = (average == "sample" or split == "train_") and any(weights)
            if not found or not isfinite(mean := float(np.average(found, weights=weights if by_samples else None))):
                continue
            if name in MEASURED:
                means[split + name] = mean
            else:
                more[split][name] = mean
    std, worst_decile = _spread(values.get(metric.field, []), metric.higher_is_better)
    accuracy_std, accuracy_worst_decile = _spread(values["accuracy"], higher_is_better=True)
    return Averages(
        **{name: mean for name, mean in means.items() if name in AVERAGED},
        std=std,
        worst_decile=worst_decile,
        accuracy_std=accuracy_std,
        accuracy_worst_decile=accuracy_worst_decile,
        more=more[""],
        validation_more=more["validation_"],
        evaluated=len(values["loss"]),
    )


def _spread(values: list[float], higher_is_better: bool) -> tuple[float | None, float | None]:
    """Compute the standard deviation over clients, and the mean of the worst tenth of them; None if one of them has no
    finite value."""
    ordered = sorted(values, reverse=not higher_is_better) if np.isfinite(values).all() else []
    std = float(np.std(ordered)) if len(ordered) > 1 else None  # one client has no spread
    return std, float(np.mean(ordered[: max(1, len(ordered) // 10)])) if ordered else None


def chosen_round(rounds: list[RoundRecord], choose: str, metric: Metric = ACCURACY) -> RoundRecord | None:
    """Find the round whose metrics are the result. Best is by the metric, or by the loss where no round has it; the
    first of equals."""
    evaluated = [record for record in rounds if record.evaluated]
    if not evaluated:
        return None
    if choose in LAST:
        return _mean_round(evaluated[-LAST[choose] :])
    if choose == "last":
        return evaluated[-1]
    return _best(evaluated, metric, choose == "best-validation") or _best(evaluated, LOSS, choose == "best-validation")


def _best(rounds: list[RoundRecord], metric: Metric, validation: bool) -> RoundRecord | None:
    """Find the best round by a metric, on validation or on test samples; None if no round has it."""
    of = metric.validation if validation else metric.of
    values = [(record, value) for record in rounds if (value := of(record)) is not None]
    return max(values, key=lambda pair: metric.gain(pair[1], 0.0))[0] if values else None


class EarlyStop(NamedTuple):
    """The round after which a run ended, and the one with the best validation metric."""

    round: int
    best: int

    def in_words(self, metric: Metric) -> str:
        return f"no better validation {metric.title} since round {self.best}"


def early_stop(rounds: list[RoundRecord], patience: int | None, metric: Metric) -> EarlyStop | None:
    """Find the round after which a run ends: so many evaluated rounds without a better validation metric."""
    best, since = None, 0
    for record in (record for record in rounds if record.evaluated) if patience else ():
        value = metric.validation(record)
        if value is not None and (best is None or metric.gain(value, best[1]) > 0):
            best, since = (record.round, value), 0
        elif (since := since + 1) == patience and best is not None:
            return EarlyStop(record.round, best[0])
    return None


def _mean_round(rounds: list[RoundRecord]) -> RoundRecord:
    """Average the rounds. A client that is missing in one of them is missing."""
    missing = sorted({client for record in rounds for client in record.missing})
    means: dict[str, Any] = {}
    if missing:
        most = max(record.evaluated + len(record.missing) for record in rounds)
        means = {"missing": missing, "evaluated": max(0, most - len(missing))}
    for name in AVERAGED:
        found = [value for record in rounds if (value := getattr(record, name)) is not None]
        means[name] = float(np.mean(found)) if found else None
    for name in MORE:
        own = [getattr(record, name) for record in rounds]
        names = dict.fromkeys(each for of_round in own for each in of_round)
        means[name] = {each: float(np.mean([of[each] for of in own if each in of])) for each in names}
    return replace(rounds[-1], **means)

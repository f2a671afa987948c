"""The records of a round and of its clients: types with named fields, written as lines of JSON."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any, Self

from fedtailor.messages import Measured, Metrics

Plain = dict[str, Any]  # as JSON has it


@dataclass(kw_only=True)
class Averages:
    """Metrics averaged over clients; None where there is nothing to average.

    `accuracy_worst_decile` is the mean of the worst tenth of the clients, at least one. Training metrics are weighted
    by samples: the objective Σ n_i/n f_i. `evaluated` counts the clients with test samples.
    """

    accuracy: float | None = None
    loss: float | None = None
    balanced_accuracy: float | None = None
    auc: float | None = None
    accuracy_std: float | None = None
    accuracy_worst_decile: float | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    train_loss: float | None = None
    train_accuracy: float | None = None
    evaluated: int = 0

    def plain(self) -> Plain:
        """All fields as JSON has them: None for NaN and infinities."""
        return {each.name: finite(getattr(self, each.name)) for each in fields(self)}


@dataclass(kw_only=True)
class RoundRecord(Averages):
    """One round: its metrics, who took part and who failed, what it cost, and warnings by subject."""

    round: int
    participants: list[int]
    failed: list[int] = field(default_factory=list)
    misled: list[int] = field(default_factory=list)  # of those, the ones that failed because of what they were sent
    warnings: dict[str, str] = field(default_factory=dict)
    bytes_down: int
    bytes_up: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Up and down."""
        return self.bytes_up + self.bytes_down

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read a record; one that lacks what every round has is a TypeError."""
        known = {each.name for each in fields(cls)}
        record = cls(**{name: value for name, value in plain.items() if name in known})
        lists = (record.participants, record.failed, record.misled)
        needed = ("round", "bytes_down", "bytes_up", "seconds", "evaluated")
        if not all(isinstance(value, list) and all(isinstance(client, int) for client in value) for value in lists):
            raise TypeError("its participants are no list of clients")
        if not isinstance(record.warnings, dict) or not all(isinstance(v, str) for v in record.warnings.values()):
            raise TypeError("its warnings are no text")
        for name in known - {"participants", "failed", "misled", "warnings"}:
            value = getattr(record, name)
            if not isinstance(value, int | float) and (value is not None or name in needed):
                raise TypeError(f"{name} is {value!r}, no number")
        if "accuracy" not in plain or "loss" not in plain:
            raise TypeError("it has no accuracy or no loss")
        return record


@dataclass(kw_only=True)
class ClientsRecord:
    """Every client in one round: its metrics if it was evaluated, the bytes it got and sent if it took part."""

    round: int
    results: dict[int, Measured] = field(default_factory=dict)
    bytes_down: dict[int, int] = field(default_factory=dict)
    bytes_up: dict[int, int] = field(default_factory=dict)

    def plain(self) -> Plain:
        """All fields as JSON has them: text for keys, None for NaN and infinities."""
        results = {
            str(client): {split: plain_metrics(metrics) for split, metrics in measured.items()}
            for client, measured in self.results.items()
        }
        down, up = ({str(c): n for c, n in counts.items()} for counts in (self.bytes_down, self.bytes_up))
        return {"round": self.round, "results": results, "bytes_down": down, "bytes_up": up}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        results = {
            int(client): {split: Metrics(**metrics) for split, metrics in measured.items()}
            for client, measured in plain["results"].items()
        }
        if any("test" not in measured for measured in results.values()):
            raise ValueError("a client was not measured on its test samples")
        down, up = ({int(c): n for c, n in plain.get(name, {}).items()} for name in ("bytes_down", "bytes_up"))
        return cls(round=plain["round"], results=results, bytes_down=down, bytes_up=up)

    def finite(self) -> Self:
        """The same as it will be read from a file."""
        return type(self).from_plain(self.plain())


Failures = dict[int, tuple[int, int]]  # of each client that failed: in how many rounds, of how many with it


def failures(rounds: Sequence[RoundRecord]) -> Failures:
    """Count the rounds in which clients failed."""
    failed = Counter(client for record in rounds for client in record.failed)
    called = Counter(client for record in rounds for client in record.participants)
    return {client: (failed[client], called[client]) for client in sorted(failed)}


def failures_in_words(runs: Sequence[Failures], clients: int) -> str:
    """Say how many of the clients failed, on average over runs; "" if none did."""
    always = fmean(sum(failed == called for failed, called in of_run.values()) for of_run in runs)
    parts = [(always, "in every round that they took part in"), (fmean(map(len, runs)) - always, "in some rounds")]
    said = [f"{number:.3g} of {clients} clients failed {when}" for number, when in parts if number]
    return ", ".join(said) + (" (mean over seeds)" if said and len(runs) > 1 else "")


METRICS = tuple(each.name for each in fields(Metrics))


def plain_metrics(metrics: Metrics) -> Plain:
    return {name: finite(getattr(metrics, name)) for name in METRICS}


def finite(value: Any) -> Any:
    """The value, or None for NaN and infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

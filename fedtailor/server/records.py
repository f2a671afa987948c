"""The records of a run directory: types with named fields, written as JSON, and checked when they are read.

Reading is strict: a number is a finite one, and a whole one where it counts something. Unknown fields are left out.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, TypeAdapter

from fedtailor._common.files import Count
from fedtailor._common.text import human_time
from fedtailor.data.client_data import Join
from fedtailor.messages import Measured, Metrics
from fedtailor.training.metrics import Metric

Plain = dict[str, Any]  # as JSON has it
MORE = ("more", "validation_more")
UNEVEN = ("clock", "late", "stale")
AnyRecord = TypeVar("AnyRecord", bound="Record")


class Record:
    """A dataclass that is written as one line of JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(allow_inf_nan=False)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Make a record of values as JSON has them."""
        return _validator(cls).validate_python(plain)

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """Read a record; one with a field that is missing or of another type is a ValueError."""
        return _validator(cls).validate_json(line, strict=True)


_VALIDATORS: dict[type, TypeAdapter[Any]] = {}


def _validator(kind: type[AnyRecord]) -> TypeAdapter[AnyRecord]:
    if kind not in _VALIDATORS:
        _VALIDATORS[kind] = TypeAdapter(kind)
    return _VALIDATORS[kind]


@dataclass(kw_only=True)
class Averages(Record):
    """Metrics averaged over clients; None where there is nothing to average.

    `worst_decile` is the mean of the worst tenth of the clients, at least one, by the metric that decides; `std` is the
    standard deviation over clients of the same. Training metrics are weighted by samples: the objective Σ n_i/n f_i.
    `evaluated` counts the clients with test samples that were measured.
    """

    accuracy: float | None = None
    loss: float | None = None
    balanced_accuracy: float | None = None
    auc: float | None = None
    f1: float | None = None
    log_loss: float | None = None
    exact_match: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None
    own: float | None = None
    std: float | None = None
    worst_decile: float | None = None
    accuracy_std: float | None = None
    accuracy_worst_decile: float | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    validation_balanced_accuracy: float | None = None
    validation_auc: float | None = None
    validation_f1: float | None = None
    validation_log_loss: float | None = None
    validation_exact_match: float | None = None
    validation_rmse: float | None = None
    validation_mae: float | None = None
    validation_r2: float | None = None
    validation_own: float | None = None
    more: dict[str, float] = field(default_factory=dict)  # the user's own metrics beside the one that decides, by name
    validation_more: dict[str, float] = field(default_factory=dict)
    train_loss: float | None = None
    train_accuracy: float | None = None
    evaluated: Count = 0

    def plain(self) -> Plain:
        """All fields as JSON has them; none for metrics of the user's own where there are none."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in plain.items() if name not in MORE or value}

    def flat(self) -> Plain:
        """All fields, with the user's metrics under their own names."""
        plain = {name: value for name, value in self.plain().items() if name not in MORE}
        return {**plain, **self.more, **{f"validation_{name}": value for name, value in self.validation_more.items()}}


@dataclass(kw_only=True)
class RoundRecord(Averages):
    """One round: its metrics, who took part and who failed, what it cost, and warnings by subject.

    `missing` are the clients that should have been evaluated and were not: the averages are of the others.
    """

    round: Count
    participants: list[Count]
    failed: list[Count] = field(default_factory=list)
    misled: list[Count] = field(default_factory=list)  # of those, the ones that failed because of what they were sent
    missing: list[Count] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    bytes_down: Count
    bytes_up: Count
    differentiated: Count = 0  # samples of which the participants computed the gradient
    seconds: float
    clock: float | None = None  # virtual seconds from the run's beginning to the end of this round
    late: list[Count] = field(default_factory=list)  # whose work came to nothing: too late, or gone before it was done
    stale: dict[Count, Count] = field(default_factory=dict)  # of the replies that counted: how many rounds old, if any
    epsilon: float | None = None  # spent up to this round, in a private run
    epsilon_rdp: float | None = None  # the same by RDP
    stop: str = ""  # why there is no round after this one

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        record = super().from_json(line)
        if b'"std"' not in line:  # an older version's, which has these of the accuracy alone
            record.std, record.worst_decile = record.accuracy_std, record.accuracy_worst_decile
        return record

    def plain(self) -> Plain:
        """All fields as JSON has them, without those of uneven clients where there are none."""
        plain = super().plain()
        left_out = {name for name in UNEVEN if not plain[name] and plain[name] != 0}
        stale = {"stale": {str(client): age for client, age in self.stale.items()}}
        return {name: value for name, value in {**plain, **stale}.items() if name not in left_out}

    @property
    def bytes(self) -> int:
        """Up and down."""
        return self.bytes_up + self.bytes_down

    @property
    def of_clients(self) -> str:
        """Say of how many clients the averages are: "of 3 of 4 clients", or "" if none is missing."""
        return f"of {self.evaluated} of {self.evaluated + len(self.missing)} clients" if self.missing else ""


@dataclass(kw_only=True)
class ClientsRecord(Record):
    """Every client in one round: its metrics if it was evaluated, the bytes it got and sent if it took part.

    `not_finite` names the metrics that were NaN or infinite, by client and split: in a file these are null.
    """

    round: Count
    results: dict[Count, Measured] = field(default_factory=dict)
    bytes_down: dict[Count, Count] = field(default_factory=dict)
    bytes_up: dict[Count, Count] = field(default_factory=dict)
    not_finite: dict[Count, dict[str, list[str]]] = field(default_factory=dict)

    def plain(self) -> Plain:
        """All fields as JSON has them: text for keys, no entry for a metric that is not defined."""
        results = {
            str(client): {split: plain_metrics(metrics) for split, metrics in measured.items()}
            for client, measured in self.results.items()
        }
        down, up = ({str(c): n for c, n in counts.items()} for counts in (self.bytes_down, self.bytes_up))
        plain: Plain = {"round": self.round, "results": results, "bytes_down": down, "bytes_up": up}
        bad = {str(client): self.not_finite[client] for client in sorted(self.not_finite)}
        return {**plain, "not_finite": bad} if bad else plain

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        record = super().from_json(line)
        if any("test" not in measured for measured in record.results.values()):
            raise ValueError("a client was not measured on its test samples")
        return record


def stop_in_words(rounds: Sequence[RoundRecord], asked: int) -> str | None:
    """Say after which of the rounds that were asked for a run ended, and why; None if it did all of them, or is not at
    its end."""
    last = rounds[-1] if rounds else None
    if last is None or not last.stop or last.round >= asked:
        return None
    return f"stopped after round {last.round}: {last.stop}"


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


def late_in_words(rounds: Sequence[RoundRecord]) -> str:
    """Say how long the rounds took in virtual time, how much work came to nothing, and how old replies were; "" where
    clients are even."""
    said = []
    if rounds and (clock := rounds[-1].clock) is not None:
        said.append(f"{human_time(clock)} of virtual time")
    if late := sum(len(record.late) for record in rounds):
        of = sum(len(record.participants) for record in rounds)
        said.append(f"{late} of {of} trainings came to nothing, too late or interrupted")
    if ages := [age for record in rounds for age in record.stale.values()]:
        said.append(f"{len(ages)} replies were old, by {fmean(ages):.1f} rounds on average and {max(ages)} at most")
    return "; ".join(said)


def joined_in_words(joined: Sequence[Join], most: int = 5) -> str:
    """Say who joined a run after it had begun, and when; "" if nobody did."""
    came: dict[int, list[str]] = {}
    for join in joined:
        came.setdefault(join.after, []).extend(join.clients)
    said = []
    for after, names in came.items():
        shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
        said.append(f"{len(names)} client{'s' if len(names) > 1 else ''} joined after round {after} ({shown})")
    return "; ".join(said)


SPLITS = ("train", "validation", "test")


@dataclass(kw_only=True)
class Partition(Record):
    """Every client's name and its samples by class, with checksums of the samples and of the initial vector. A sample
    with several labels counts for each of them. Sites do not tell their classes: rows are then one number, as they are
    for a regression."""

    data: str
    classes: list[str]  # none for a regression
    clients: list[str]
    new: list[Count]  # clients that are held out from training
    partition: str | None = field(default=None, compare=False)  # as used; an older version did not write it down
    assignment: str | None = None  # checksum of a partition of the user's own: who has which sample
    train: list[list[Count]]  # a row a client, of a column for each class, or one
    validation: list[list[Count]]
    test: list[list[Count]]
    n_train: list[Count] = field(default_factory=list)  # each client's training samples
    fingerprint: str
    network: str
    joined: list[Join] = field(default_factory=list)  # the last of the training clients, in their order
    hostile: list[Count] = field(default_factory=list)  # training clients of a study's attack: no average counts them
    preprocessing: Plain | None = None  # of a table
    shifts: list[dict[str, list[float]]] = field(default_factory=list)  # each client's, if features shift
    picture: str = field(default="", compare=False)  # then of images: a PNG in base64, one image of each client

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        record = super().from_json(line)
        clients, classes = len(record.clients), max(len(record.classes), 1)
        rows = [[len(row) for row in getattr(record, split)] for split in SPLITS]
        if any(widths != [classes] * clients for widths in rows) and any(widths != [1] * clients for widths in rows):
            raise ValueError("it does not have every client's samples of each class")
        if any(client >= clients for client in record.new):
            raise ValueError("it names new clients that do not exist")
        if any(client >= clients or client in record.new for client in record.hostile):
            raise ValueError("it names hostile clients that do not train")
        training = [name for client, name in enumerate(record.clients) if client not in record.new]
        came = [name for join in record.joined for name in join.clients]
        if came and came != training[-len(came) :]:
            raise ValueError("it names other clients that joined than it has")
        record.n_train = record.n_train or [sum(row) for row in record.train]  # an older version's has none
        if len(record.n_train) != clients:
            raise ValueError("it does not have every client's number of training samples")
        if record.shifts and len(record.shifts) != clients:
            raise ValueError("it does not have every client's shift")
        return record


def counted_classes(partition: Mapping[str, Any]) -> list[str]:
    """The classes by which a partition counts samples; none for a regression, and where sites do not tell them."""
    classes: list[str] = partition["classes"]
    return classes if all(len(row) == len(classes) for row in partition["train"]) else []


@dataclass(kw_only=True)
class About(Record):
    """The origin of a run: its format, the versions that made it, the settings that decide its numbers, and the metric
    that they lead to."""

    format: Count
    versions: dict[str, str]
    experiment: Plain
    metric: Metric | None = None  # an older version's run has none here


@dataclass(kw_only=True)
class Outcome(Record):
    """The part of `result.json` that is read again; the rest is for people and other programs."""

    rounds: Count
    stopped: str | None = None  # why it ended before its last round
    backdoor: float | None = None  # the success of such an attack


METRICS = tuple(each.name for each in fields(Metrics) if each.name != "more")


def plain_metrics(metrics: Metrics) -> Plain:
    """All metrics as JSON has them, without those that are not defined."""
    plain = {name: value for name in METRICS if (value := finite(getattr(metrics, name))) is not None}
    more = {name: value for name, value in metrics.more.items() if finite(value) is not None}
    return {**plain, "more": more} if more else plain


def finite(value: float | None) -> float | None:
    """The value, or None for NaN and infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

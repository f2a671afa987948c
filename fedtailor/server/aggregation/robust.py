"""Aggregation that some hostile clients cannot move: by a rule in place of the mean, or of uploads of bounded norm; and
the mean as it is by default, without a client whose change is absurdly long."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.participation import Participation
from fedtailor.messages import Message, fetched
from fedtailor.method import Each, Mean, Method, Total, Uploads, room
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.aggregation.rules import (
    geometric_median,
    mean_of,
    median,
    nearest,
    squared_distances,
    trimmed_mean,
)
from fedtailor.training.layout import bounded, is_model

TOGETHER = 5  # clients of a round whose changes are measured before the first is added: two may be absurd
SHORT = 10  # changes shorter than this part of the initial vector are not told from each other


@dataclass
class RobustAggregator(Aggregator):
    """Aggregates the uploads of which there is a mean by a rule. It needs all of them at once: a row for each client.

    No client has a weight, as a hostile one could claim any number of samples.
    """

    rule: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs = self.rule.needs if self._means else 0
        self._rows: dict[str, Tensor] = {}  # of each upload; those of the clients that replied come first

    def _add(self, client: int, upload: Message) -> None:
        xs = self._numbers(upload)
        self._sums |= {name: self._sum(name, x, None) for name, x in xs.items()}  # or it is refused
        for name, x in xs.items():
            if name not in self._rows:
                self._rows[name] = room(len(self.participants), x.flatten().cpu())
            self._rows[name][len(self.clients)] = x.flatten()
        for name, tensors in self._single.items():
            if name in upload:
                tensors[client] = upload[name]
        self.clients.append(client)

    def total(self) -> Total:
        rows = {name: matrix[: len(self.clients)] for name, matrix in self._rows.items()}
        found = self._krum(rows) if "krum" in self.rule.kind else {name: self._apply(name, rows[name]) for name in rows}
        means = {name: self._sums[name].value.copy_(x.view(self._sums[name].value.shape)) for name, x in found.items()}
        return Total(self.clients, self.n_samples[self.clients], means, {}, self._single)

    @property
    def lacking(self) -> str:
        if len(self.clients) >= self.needs:
            return ""
        return (
            f"like others with as few replies: the rule {self.rule} needs at least {self.needs} clients in a round, "
            f"not {len(self.clients)}"
        )

    def _apply(self, name: str, rows: Tensor) -> Tensor:
        """Apply a rule that looks at one upload at a time."""
        if self.rule.kind == "median":
            return median(rows)
        if self.rule.kind == "trimmed":
            return trimmed_mean(rows, self.rule.amount)
        return geometric_median(rows, self._buffers(name))

    def _krum(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Choose clients by the distances between all that they uploaded, and average these clients' uploads."""
        squares = torch.zeros((), dtype=torch.float64)
        for name, matrix in rows.items():
            squares = squares + squared_distances(matrix, self._buffers(name))
        chosen = nearest(squares, int(self.rule.amount), self.rule.selected) if rows else []
        return {name: mean_of(matrix, chosen) for name, matrix in rows.items()}

    def _buffers(self, name: str) -> list[slice]:
        """List the columns of an upload's matrix that are buffers, if it is whole models."""
        size, x = self.layout.size, self._sums[name].value
        if not is_model(x, self.layout):
            return []
        starts = range(0, x.numel(), size)
        return [slice(start + place.start, start + place.stop) for start in starts for place in self.layout.buffers]


@dataclass
class NormBoundAggregator(Aggregator):
    """Adds up uploads whose change against what the client was sent has at most a norm (Sun et al. 2019)."""

    bound: float = math.inf
    method: Method | None = None
    messages: Mapping[int, Message] = field(default_factory=dict)  # that went to the participants

    def _add(self, client: int, upload: Message) -> None:
        super()._add(client, {name: self._bounded(client, name, x) for name, x in upload.items()})

    def _bounded(self, client: int, name: str, x: Tensor) -> Tensor:
        """Bound an upload that moves the server's state."""
        if not has_length(self.uploads, name, x):
            return x
        assert self.method is not None
        x = x if x.is_floating_point() else x.double()
        return bounded(x, self.method.sent(self.messages[client], name, x), self.bound, self.layout)


@dataclass(kw_only=True)
class GuardedAggregator(Aggregator):
    """Adds up uploads, without those of a client whose change is `times` as long as usual: as the median of those of
    this round so far or, where these are short, a tenth of the network's initial vector.

    The order of the clients decides, not that of arrival. The first few wait for each other, so that the first one
    does not pass because it is alone; they are all that a round needs memory for beside the sum.
    """

    times: float
    method: Method
    messages: Mapping[int, Message]  # that went to the participants
    initial: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.together = TOGETHER
        self._lengths: dict[str, dict[int, float]] = {}  # of each upload's changes
        start = float(self.layout.without_buffers(self.initial).norm())
        self._short = max(start, 1.0) / SHORT  # a network may begin with zeros

    def _length(self, client: int, name: str, x: Tensor) -> Tensor:
        sent = self.method.sent(self.messages[client], name, x)
        change = x if sent is None else x - sent
        body = self.layout.body
        if is_model(x, self.layout):
            change = self.layout.without_buffers(change)
        elif x.shape[-1:] == (body.stop - body.start,) and (buffers := self.layout.buffers_in(body)):
            change = change.clone()  # BatchNorm's counter of batches alone would make a large client's change long
            for place in buffers:
                change[..., place.start - body.start : place.stop - body.start] = 0
        length: Tensor = change.norm()
        return length

    def _add(self, client: int, upload: Message) -> None:
        new = [
            (other, name, self._length(other, name, x))
            for other, its in self._held
            for name, x in its.items()
            if other not in self._lengths.get(name, {}) and has_length(self.uploads, name, x)
        ]
        for (other, name, _), length in zip(new, fetched([length for *_, length in new]), strict=True):
            self._lengths.setdefault(name, {})[other] = float(length)
        for name, lengths in sorted(self._lengths.items()):
            usual = max(statistics.median(lengths.values()), self._short)
            if len(lengths) > 2 and client in lengths and lengths[client] > self.times * usual > 0:
                raise ValueError(
                    f"the change of its upload {name!r} is more than {self.times:g} times as long as usual in this "
                    "round (--aggregation mean:inf counts it all the same)"
                )
        super()._add(client, upload)


def has_length(uploads: Uploads, name: str, x: Tensor) -> bool:
    """Find out whether an upload moves the server's state by a vector: choices, single numbers, weights of a mean and
    what is for the record alone do not."""
    how = uploads.get(name)
    if how is None or name in {mean.weights for mean in uploads.values() if isinstance(mean, Mean)}:
        return False
    return not (isinstance(how, Each) and (how.record or not x.is_floating_point() or x.numel() < 2))


def check_aggregation(experiment: Experiment, method: Method, clients: int) -> None:
    """Refuse a rule that cannot be applied to what the method uploads, or needs more clients than can take part.
    `clients` is the number of training clients."""
    rule = Rule.parse(experiment.aggregation)
    if rule.kind == "mean" or not method.uploads:
        return
    if rule.kind == "norm-bound":
        return
    title, advice = type(method).__name__, "take --aggregation mean or norm-bound, or a method whose uploads are means"
    if single := [name for name, how in method.uploads.items() if isinstance(how, Each) and not how.record]:
        named = " and ".join(filter(None, [", ".join(single[:-1]), single[-1]]))
        raise FedtailorError(
            f"{title} needs every client's own {named}, and no rule can be robust where single uploads count: {advice}"
            ", like fedavg."
        )
    weights = [how.weights for how in method.uploads.values() if isinstance(how, Mean)]
    if own := [weight for weight in weights if weight not in ("samples", "equal")]:
        raise FedtailorError(
            f"{title}'s mean is by weights that clients upload themselves ({own[0]}), and no rule can be robust where "
            f"they choose these: {advice} by samples, like fedavg."
        )
    if (most := Participation.parse(experiment.participation).most_of(clients)) < rule.needs:
        raise FedtailorError(
            f"The rule {rule} needs at least {rule.needs} clients in a round, and no more than {most} take part: raise "
            "--participation or --clients, or take --aggregation median."
        )

"""A method in the race of `advise`: how far it is trained, its metric on validation samples, and its learning curve."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, nan, sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import Experiment
from fedtailor.studies.measures import Values
from fedtailor.training.metrics import ACCURACY, Metric
from fedtailor.training.predictions import sample_scores

POINTS = 8  # of a learning curve, at least, along rounds that are measured (or each of them, if they are fewer)

Report = Callable[[str, int, int], None]  # of progress: a title, rounds done, rounds to do


@dataclass(eq=False)
class Candidate:
    """A method in the race."""

    title: str
    experiment: Experiment
    simulation: Simulation | None = None
    seconds: float = 0.0  # a round
    rounds: int = 0
    values: Values = field(default_factory=dict)  # of the metric on validation samples, by client
    n_samples: dict[int, int] = field(default_factory=dict)  # how many validation samples those are
    parts: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # of each sample, where clients are few
    metric: Metric = ACCURACY
    curve: dict[int, float] = field(default_factory=dict)  # the mean of the metric, by rounds done
    failed: str = ""  # why it left the race, if it did

    @property
    def mean(self) -> float:
        """The mean of the metric over clients; NaN where the training failed."""
        return fmean(self.values.values()) if self.values else nan

    @property
    def by_samples(self) -> bool:
        """True if the metric is a mean over samples that were looked at one by one."""
        return bool(self.parts)

    def gain(self, base: "Candidate") -> float:
        """Compute by how much the mean is better than another candidate's."""
        return self.metric.gain(self.mean, base.mean)

    def advance(self, rounds: int, report: Report, along: bool = False) -> None:
        """Train until so many rounds are done, and measure: at their end, and a few times on the way if asked to. One
        that cannot go on, as it diverged, leaves the race to the others."""
        if self.failed:
            return
        begin, before = time.perf_counter(), self.rounds
        try:
            while self.rounds < rounds:
                self._round(rounds, before, along)
                report(self.title, self.rounds, rounds)
        except FedtailorError as error:
            self.values, self.failed = {}, str(error)
        self.seconds = (time.perf_counter() - begin) / max(1, self.rounds - before)

    def _round(self, rounds: int, before: int, along: bool) -> None:
        """Train one of the rounds from `before` to `rounds`, and measure if it is one to measure at."""
        assert self.simulation is not None
        self.rounds += 1
        self.simulation.round(self.rounds)
        step = max(1, (rounds - before) // POINTS)
        if self.rounds == rounds or (along and (self.rounds - before) % step == 0):
            self._measure()

    def _measure(self) -> None:
        """Find the clients' values of the metric on their validation samples."""
        assert self.simulation is not None
        loop = self.simulation.loop
        evaluated = loop.evaluator.evaluate(loop.server, loop.versions, [], self.simulation.transport)
        for client in evaluated.missing:  # candidates are compared on the same clients
            reply = evaluated.replies[client]
            raise FedtailorError(
                f"The evaluation of client {loop.names[client]} failed: {reply.error}."
            ) from reply.cause
        on_validation = {client: of_client["validation"] for client, of_client in evaluated.measured.items()}
        found = {client: self.metric.of(metrics) for client, metrics in on_validation.items()}
        self.values = {client: value for client, value in found.items() if value is not None}
        self.n_samples = {client: on_validation[client].n_samples for client in self.values}
        if not self.values:
            raise FedtailorError(
                f"No client has validation samples to compute the {self.metric.title} of: give --validation 0.2."
            )
        self.curve[self.rounds] = self.mean

    def rise(self) -> float:
        """Compute by how much the metric became better in the last half of the rounds; 0 if that may be noise.

        It is the slope of a line through the learning curve there, by least squares, times these rounds, and counts if
        it is more than twice its standard error. So neither the luck of the last round nor a single bad one makes a
        rise, and a curve that fell has none.
        """
        points = [(n, self.metric.score(mean)) for n, mean in self.curve.items() if 2 * n >= self.rounds]
        x, y = np.array([(n, score) for n, score in points if isfinite(score)]).reshape(-1, 2).T
        if len(x) < 2:
            return 0.0
        x = x - x.mean()
        slope = float(x @ y / (x @ x))
        left = y - y.mean() - slope * x
        error = sqrt(float(left @ left) / (len(x) - 2) / float(x @ x)) if len(x) > 2 else 0.0
        return slope * self.rounds / 2 if slope > 2 * error else 0.0

    def look_closer(self) -> None:
        """Find each validation sample's part of the metric, if that is a mean over samples: whether it is right, say.

        This is more than the metrics that a site replies with: it is for whoever owns the simulation and its data.
        """
        assert self.simulation is not None
        for client in self.values:
            site = self.simulation.sites.site(client)
            x, y = site.data.validation
            scores = self.simulation.predict(client, x)
            parts = sample_scores(self.metric.name, scores, y, site.terms.multi_label)
            if parts is not None:
                self.parts[client] = parts

"""The cost of private trainings: the private gradients that a client asks for in a round, counted before the first one,
and the ε of all that it releases.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, explained
from fedtailor.client.sites import Site
from fedtailor.client.terms import Terms
from fedtailor.data import ClientData
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Message
from fedtailor.privacy.accountant import Releases, spent
from fedtailor.privacy.noise import Noise
from fedtailor.training.client import Client, NotPrivate
from fedtailor.training.descent import plain_loss, step_count
from fedtailor.training.private_gradients import Private, sampling_rate


class Counting(Client):
    """A client that counts the private gradients of its training, and computes none."""

    def descend(self, theta: Tensor, **given: Any) -> Tensor:
        """Count the steps; the model stays where it is."""
        names = {each.name for each in fields(self.optimizer)}
        settings = replace(self.optimizer, **{name: value for name, value in given.items() if name in names})
        if given.get("objective") is not None and not given.get("stays"):
            raise NotPrivate("an objective of its own")
        for _ in range(step_count(self.n_samples, settings)):
            if not given.get("stays"):
                self._count(sampling_rate(self.n_samples, settings.batch))
            for function in (given.get("correction"), given.get("each_step")):  # which may ask for gradients too
                if callable(function):
                    function(theta if given.get("part") is None else theta[given["part"]])
        return theta.clone()

    def gradient(self, theta: Tensor, batch: Any = None, objective: Any = plain_loss, *, stays: bool = False) -> Tensor:
        """Count one gradient, of zeros."""
        if not stays:
            if objective is not plain_loss:
                raise NotPrivate("an objective of its own")
            self._count(1.0 if batch is None else batch.rate)
        return torch.zeros_like(theta)

    def _count(self, rate: float) -> None:
        assert self.private is not None
        self.private.queries[rate] += 1


def private_queries(terms: Terms, message: Message, n_samples: int, round: int = 1) -> dict[float, int]:
    """Count the private gradients that a client with so many samples asks for in a round, by their sampling rate q.

    The method trains without samples: they decide about none of it. `message` is what the server sends.
    """
    nothing = ClientData("", torch.zeros(n_samples, 0), torch.zeros(n_samples, dtype=torch.int64), (n_samples,) * 2)
    site = Site(0, nothing, terms)
    client = site.client(round, {})
    client.augmentation, client.private = None, Private(1.0, 1.0, Noise(client.stream("counting")), Counter())
    given = {each.name: getattr(client, each.name) for each in fields(Client) if each.init}
    try:
        terms.method.train(Counting(**given), message)
    except NotPrivate as error:
        raise NotPrivate(error.what, type(terms.method).__name__) from None
    except Exception as error:  # a method's own fault, of any kind
        raise FedtailorError(
            f"The private gradients of {type(terms.method).__name__} cannot be counted, as its training fails without "
            f"samples: {explained(error)}."
        ) from error
    finally:
        terms.network.reset(terms.initial)
    return dict(client.private.queries)


# --- what it costs ---

Level = Literal["client", "sample"]


class Release(NamedTuple):
    """One noisy release: of a sum of clipped gradients of a random share of the samples, or of a clipped change."""

    level: Level
    noise: float  # as a multiple of the clip
    share: float = 1.0


Cost = Mapping[Release, int]  # so many releases of each kind


def cost_in_epsilon(cost: Cost, privacy: Privacy) -> float:
    """Compute ε of all these releases together, at the level and the δ of a plan's privacy."""
    if privacy.level == "client":
        if any(release.level == "sample" for release in cost):
            return inf  # that noise hides samples, and no whole client
        releases = [Releases(release.noise, count) for release, count in cost.items()]
    else:
        # One sample can turn a clipped change into any other: the sum moves by up to twice the clip.
        releases = [
            Releases(r.noise if r.level == "sample" else r.noise / 2, count, "poisson", r.share)
            for r, count in cost.items()
        ]
    return spent(releases, privacy.delta).epsilon

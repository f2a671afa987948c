"""Differential privacy at client level: the mean of clipped changes, with noise.

θ ← θ_sent + (Σ_i clip(θ_i − θ_sent) + N(0, σ²C²)) / M with M the expected number of participants: one client moves it
by C/M at most, whatever it uploads and whether or not it takes part. So all clients weigh the same, and M does not tell
how many replied. Where each client adds its share of the noise, it has clipped its change itself.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Message, State
from fedtailor.method import Method, Server, Total, expected_upload
from fedtailor.privacy.clipping import clipped, norm
from fedtailor.privacy.noise import Noise
from fedtailor.server.aggregation import Aggregator

CLIP = "privacy/clip"  # the adaptive clip, in the server's state
CLIP_RATE = 0.2  # of its geometric steps, η_C (Andrew et al. 2021)
COUNT_NOISE = 1 / 20  # deviation of the noise on the number of whole changes, as a share of the participants


class PrivateAggregator(Aggregator):
    """Adds up the changes of one round, and hands out their private mean: noise alone, if nobody replied."""

    def __init__(
        self, method: Method, server: Server, messages: Mapping[int, Message], privacy: Privacy, noise: Noise
    ) -> None:
        super().__init__(method.uploads, list(messages), server.n_samples, server.layout)
        self._method, self._server, self._messages = method, server, messages
        self._privacy, self._noise = privacy, noise
        self._changes: State = {}
        self._whole = 0  # changes that were not longer than the clip
        self._sent = _common(method, server, messages)
        self._clip = float(server.state.get(CLIP, torch.tensor(privacy.bound, dtype=torch.float64)))
        self.always = privacy.by == "server" and bool(self._means)

    def _add(self, client: int, upload: Message) -> None:
        change = self._method.changes(self._messages[client], self._numbers(upload))
        if self._privacy.by == "server":
            self._whole += norm(change) <= self._clip
            change = clipped(change, self._clip)
        for name, tensor in change.items():
            self._changes.setdefault(name, torch.zeros_like(tensor)).add_(tensor)
        self.clients.append(client)

    def total(self) -> Total:
        """Close the round: noise on the sum, divided by the expected number of participants."""
        expected = self._server.per_round
        means: State = {}
        for name, (like, sent) in self._sent.items():
            total = self._changes.get(name, torch.zeros_like(like))
            if self._privacy.by == "server":
                total = total + self._noise.normal(total, self._deviation * self._clip)
            means[name] = total / expected if sent is None else sent + total / expected
        self._adapt()
        share = expected / self._server.n_clients
        return Total(self.clients, self.n_samples[self.clients], means, {}, self._single, share)

    @property
    def _deviation(self) -> float:
        """The noise of the sum. Beside an adaptive clip it is a little larger, so that both together cost as much as
        the noise that was asked for: z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2)."""
        z = self._privacy.noise
        assert z is not None  # it was found before the run
        if self._privacy.quantile is None:
            return z
        return float((z**-2 - (2 * self._count_noise) ** -2) ** -0.5)

    @property
    def _count_noise(self) -> float:
        """The deviation of the noise on the number of whole changes, σ_b."""
        assert self._privacy.noise is not None
        return max(COUNT_NOISE * self._server.per_round, self._privacy.noise)

    def _adapt(self) -> None:
        """Move the clip towards the quantile of the changes' norms: C ← C exp(−η_C (b̃ − γ)), b̃ the noisy share of
        whole changes."""
        quantile = self._privacy.quantile
        if quantile is None:
            return
        # Counted from one half each, a client moves the number by one half at most.
        centred = self._whole - len(self.clients) / 2
        noisy = centred + float(self._noise.normal(torch.zeros((), dtype=torch.float64), self._count_noise))
        share = noisy / self._server.per_round + 0.5
        clip = self._clip * math.exp(-CLIP_RATE * (share - quantile))
        self._server.state[CLIP] = torch.tensor(clip, dtype=torch.float64)


def _common(method: Method, server: Server, messages: Mapping[int, Message]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Find what all participants were sent of each mean, beside a tensor of its shape."""
    first = min(messages, default=0)
    message = messages[first] if messages else method.broadcast(server)
    like = expected_upload(method, server, first)
    return {name: (like[name], method.sent(message, name, like[name])) for name in method.means}

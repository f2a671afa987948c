"""A canary: whether a client, or a sample, was there is seen without noise, and with noise no better than ε says.

The attacker knows everything but that: all other contributions, the canary itself and the mechanism. In many trials he
guesses from what is released; his rates of false and true alarms give a lower bound of ε (with 95 % confidence).
"""

from collections.abc import Callable
from math import inf, log

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import beta

from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Train
from fedtailor.privacy.accountant import Releases, spent
from fedtailor.privacy.noise import Noise
from fedtailor.server.aggregation.private import PrivateAggregator
from fedtailor.training.private_gradients import Private
from tests.helpers import make_simulation

TRIALS, DELTA = 2000, 1e-5
Scores = NDArray[np.float64]


def lower_bound(absent: Scores, present: Scores) -> float:
    """ε that an attacker has shown at the best of all thresholds: log((true alarms − δ) / false alarms), with
    Clopper-Pearson bounds of both. Half of the trials choose the threshold, the others count."""
    half = len(absent) // 2

    def shown(threshold: float, a: Scores, p: Scores) -> float:
        false, true = int((a > threshold).sum()), int((p > threshold).sum())
        most = beta.ppf(0.975, false + 1, len(a) - false)
        least = beta.ppf(0.025, true, len(p) - true + 1) if true else 0.0
        return log((least - DELTA) / most) if least > DELTA else -inf

    thresholds = np.quantile(np.concatenate([absent[:half], present[:half]]), np.linspace(0.02, 0.98, 49))
    best = max(thresholds, key=lambda threshold: shown(threshold, absent[:half], present[:half]))
    return shown(best, absent[half:], present[half:])


def scores(release: Callable[[bool, int], torch.Tensor], direction: torch.Tensor) -> tuple[Scores, Scores]:
    """What the attacker sees along the canary's direction, without and with it."""
    found = [[float(release(there, trial) @ direction) for trial in range(TRIALS)] for there in (False, True)]
    return np.array(found[0]), np.array(found[1])


@pytest.mark.parametrize("noise", [1e-6, 1.0, 3.0])
def test_a_client_is_hidden_as_epsilon_says(noise: float) -> None:
    simulation = make_simulation("fedavg", data="digits", model="mlp:4", clients=6, max_train=20)
    loop = simulation.loop
    loop.call(1)
    messages = loop._messages()
    canary = torch.nn.functional.normalize(torch.randn(len(loop.server.initial), generator=torch.Generator()), dim=0)

    def release(there: bool, trial: int) -> torch.Tensor:
        source = Noise(torch.Generator().manual_seed(2 * trial + there))
        total = PrivateAggregator(
            loop.method, loop.server, messages, Privacy.parse(f"client, clip=0.5, noise={noise}"), source
        )
        for client, message in messages.items():
            change = 1e3 * canary if client == 0 and there else torch.zeros_like(canary)
            total.put(client, {"theta": message["theta"] + change} if client or there else None)
        return total.total()["theta"] - messages[0]["theta"]

    shown, promised = lower_bound(*scores(release, canary)), spent([Releases(noise)], DELTA).epsilon
    if noise < 1e-3:
        assert shown > 5  # seen at once; no more can be shown in so many trials
    else:
        assert (0.2 * promised if noise == 1 else 0) < shown <= promised  # hidden as promised, and the attack is real


@pytest.mark.parametrize("noise", [1e-6, 1.0, 3.0])
def test_a_sample_is_hidden_as_epsilon_says(noise: float) -> None:
    """A canary among the training samples of one client, in a gradient of all of them."""
    simulation = make_simulation("fedavg", data="digits", model="mlp:4", clients=2, max_train=12, dtype="float64")
    client = simulation.sites.site(0).client(1, {})
    x, y = client.train_data
    assert isinstance(x, torch.Tensor)
    loud = x.clone()
    loud[0] *= 100  # an outlier, whose gradient points where no other's does
    theta = client.initial

    def gradient(data: tuple[torch.Tensor, torch.Tensor], source: Noise, sigma: float) -> torch.Tensor:
        client.train_data, client.private = data, Private(1.0, sigma, source)
        return client.gradient(theta) * len(data[1])  # the noisy sum

    def quiet(there: bool) -> torch.Tensor:
        data = (loud, y) if there else (loud[1:], y[1:])
        return gradient(data, Noise(torch.Generator().manual_seed(0)), 1e-12)

    # What the samples have in common is known to the attacker; the sum is linear, so that noise can be added to it.
    without, with_it = quiet(False), quiet(True)
    direction = torch.nn.functional.normalize(with_it - without, dim=0)
    assert float((with_it - without).norm()) == pytest.approx(1.0, rel=1e-6)  # it was clipped

    def release(there: bool, trial: int) -> torch.Tensor:
        source = Noise(torch.Generator().manual_seed(2 * trial + there))
        return gradient((loud, y) if there else (loud[1:], y[1:]), source, noise)

    shown, promised = lower_bound(*scores(release, direction)), spent([Releases(noise)], DELTA).epsilon
    if noise < 1e-3:
        assert shown > 5
    else:
        assert (0.2 * promised if noise == 1 else 0) < shown <= promised


NO_NOISE = 1e-9


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_sample_in_a_whole_training_is_hidden_as_epsilon_says(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary in what a site uploads after three steps; and the same attack sees at once that the noise is missing."""
    rounds = {"privacy": "sample, clip=1, noise=3", "batch": "full", "steps": 3, "lr": 0.1}
    made = make_simulation(method, data="digits", model="mlp:4", clients=2, max_train=12, dtype="float64", **rounds)
    made.loop.call(1)
    site, message = made.sites.site(0), made.loop._messages()[0]
    (x, y), sent = site.data.train, next(iter(message.values()))
    loud = x[:].clone()
    loud[0] *= 100  # an outlier, whose gradient points where no other's does
    with_it, without = (loud, y), (loud[1:], y[1:])
    plain = Noise.normal

    def release(there: bool, trial: int) -> torch.Tensor:
        site.data.train = with_it if there else without
        reply, _ = site.work(Train(2 * trial + there + 1, 0, message), {})  # each round has noise of its own
        return (next(iter(reply.upload.values())) - sent) * len(site.data.train[1])

    def attack(factor: float) -> float:
        monkeypatch.setattr(Noise, "normal", lambda source, like, deviation: plain(source, like, factor * deviation))
        return lower_bound(*scores(release, direction))

    monkeypatch.setattr(Noise, "normal", lambda source, like, deviation: plain(source, like, NO_NOISE * deviation))
    direction = torch.nn.functional.normalize(release(True, 0) - release(False, 0), dim=0)
    promised = spent([Releases(3.0, count=3)], DELTA).epsilon
    assert 0 < attack(1.0) <= promised
    assert attack(NO_NOISE) > promised

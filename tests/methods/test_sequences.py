"""Every method on integer tokens, and texts that are learned."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn import datasets

import fedtailor as ft
from fedtailor.methods import CATALOGUE
from tests.helpers import numbers

RNG = np.random.default_rng(0)
LENGTH = 6


def tokens(n: int) -> tuple[Any, Any]:
    """Sequences with padding, and their first token modulo 3."""
    x = RNG.integers(1, 8, (n, LENGTH))
    x[:, 4:][RNG.random((n, 2)) < 0.5] = 0
    return x, x[:, 0] % 3


DATA = [tokens(n) for n in (8, 10, 12, 8)]
SMALL: dict[str, Any] = {"data": DATA, "rounds": 2, "epochs": 1, "batch": 6, "on_failure": "stop", "seed": 1}


@pytest.mark.parametrize("model", ["gru:8", "transformer:8"])
@pytest.mark.parametrize("method", CATALOGUE)
def test_every_method_takes_tokens(method: str, model: str) -> None:
    result = ft.run(method, model=model, engine="in-process", **SMALL)
    before = result.simulation.terms.initial
    for client in range(4):
        theta = result.personal_vector(client)
        assert theta.isfinite().all()
        assert not torch.equal(theta, before)
    assert result.rounds[-1].loss is not None


@pytest.mark.parametrize("method", ["pgfed", "fedrep", "moon", "pfedmb"])
def test_tokens_have_the_same_bits_on_every_engine(method: str) -> None:
    for model in ("gru:8", "transformer:8"):
        one, other = (ft.run(method, model=model, engine=e, workers=2, **SMALL) for e in ("in-process", "processes"))
        assert numbers(one.rounds) == numbers(other.rounds)
        assert all(torch.equal(one.personal_vector(c), other.personal_vector(c)) for c in range(4))


@pytest.mark.parametrize("model", ["gru:8", "transformer:8"])
def test_the_hessian_of_sequence_networks_is_exact(model: str) -> None:
    """The product with a direction is the difference of two gradients along it."""
    result = ft.run("per-fedavg", model=model, first_order=False, dtype="float64", engine="in-process", **SMALL)
    client = result.simulation.sites.site(0).client(1, {})
    theta, batch = client.initial, next(client.batches())
    direction = torch.randn(len(theta), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    exact = client.hessian_product(theta, direction, batch)
    ahead, behind = (client.gradient(theta + step * direction, batch) for step in (1e-4, -1e-4))
    assert torch.allclose(exact, (ahead - behind) / 2e-4, atol=1e-7)
    assert exact.abs().max() > 1e-3


def test_next_characters_of_real_texts_are_learned() -> None:
    """scikit-learn's descriptions of its data sets, each a client: the next character after 6 others."""
    names = ("load_iris", "load_wine", "load_breast_cancer")
    texts = ["".join(getattr(datasets, name)().DESCR.lower().split("\n"))[:900] for name in names]
    alphabet = {letter: number for number, letter in enumerate(sorted(set("".join(texts))), start=1)}  # 0 is padding
    clients = []
    for text in texts:
        codes = np.array([alphabet[letter] for letter in text])
        windows = np.lib.stride_tricks.sliding_window_view(codes, 7)
        clients.append((windows[:, :6], windows[:, 6]))
    settings: dict[str, Any] = {"rounds": 5, "epochs": 2, "lr": 2.0, "batch": 20, "engine": "in-process"}
    result = ft.run("fedavg", data=clients, model="gru:32", **settings)
    assert result.accuracy is not None
    tests = [result.data.test(client)[1] for client in range(3)]
    frequent = np.mean(
        [float((y == result.data.train(c)[1].mode().values).float().mean()) for c, y in enumerate(tests)]
    )
    assert result.accuracy > frequent + 0.12, f"{result.accuracy:.3f}, the most frequent character {frequent:.3f}"

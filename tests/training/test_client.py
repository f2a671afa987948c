"""The client as a method sees it."""

from itertools import product
from math import cos, pi

import pytest
import torch
from torch.nn import functional

from tests.reference.batches import batches, stream
from tests.training.parts import X, Y, client


def test_it_knows_its_samples_and_steps() -> None:
    one = client(batch=8, epochs=2)
    assert one.n_samples == 37
    assert one.n_steps == 2 * 5
    assert client(batch=8, epochs=2, drop_last=True).n_steps == 2 * 4
    assert client(batch=None, epochs=3).n_steps == 3
    assert client(steps=7).n_steps == 7
    assert (one.body, one.head) == (one.network.layout.body, one.network.layout.head)


def test_its_batches_are_those_of_the_specification() -> None:
    one = client(batch=8, epochs=2)
    expected = batches(37, 5, 3, 1, batch=8, epochs=2)
    assert [batch.indices.tolist() for batch in one.batches()] == [chosen.tolist() for chosen in expected]
    other = batches(37, 5, 3, 1, purpose="other", batch=8, epochs=1)
    assert [b.indices.tolist() for b in one.batches(purpose="other", epochs=1)] == [c.tolist() for c in other]


def test_its_streams_are_told_apart_by_purpose_round_and_client() -> None:
    one = client()
    for purpose in ("batches", "noise"):
        drawn = torch.rand(4, generator=one.stream(purpose))
        assert torch.equal(drawn, torch.rand(4, generator=stream(5, purpose, 3, 1)))
        for_good = torch.rand(4, generator=one.stream(purpose, every_round=False))
        assert torch.equal(for_good, torch.rand(4, generator=stream(5, purpose, 0, 1)))


def test_fresh_it_has_no_state_and_no_round() -> None:
    one = client(keep_momentum=True, momentum=0.9)
    one.state["own"] = torch.ones(3)
    fresh = one.fresh()
    assert (fresh.round, fresh.state, fresh.id) == (0, {}, 1)
    fresh.descend(fresh.initial)
    assert one.state.keys() == {"own"}
    later = client(keep_momentum=True, momentum=0.9)
    later.round = 8
    assert torch.equal(later.fresh().descend(one.initial), one.fresh().descend(one.initial))
    assert not torch.equal(later.descend(one.initial), client(keep_momentum=True, momentum=0.9).descend(one.initial))


@pytest.mark.parametrize("schedule", ["constant", "warmup:2,cosine", "step:2,0.5"])
@pytest.mark.parametrize(("momentum", "steps", "warm"), list(product([0.0, 0.5, 0.9], [1, 2, 9], [False, True])))
def test_the_length_of_a_path_along_a_constant_gradient(momentum: float, steps: int, warm: bool, schedule: str) -> None:
    """Written out, one step at a time; a warm client begins with the velocity that it would have in the long run."""
    one = client(momentum=momentum, steps=steps, lr=0.1, factor=0.5, step_schedule=schedule)
    velocity, away, carried = (1 / (1 - momentum) if warm else 0.0), 0.0, 0.0
    for k in range(1, steps + 1):
        cosine = (1 + cos(pi * (k - 3) / (steps - 2))) / 2 if steps > 2 else 0
        factor = {"constant": 1.0, "warmup:2,cosine": k / 2 if k <= 2 else cosine, "step:2,0.5": 0.5 ** ((k - 1) // 2)}
        velocity = momentum * velocity + 1.0
        away += 0.05 * factor[schedule] * velocity
        carried += 0.05 * factor[schedule] * momentum**k
    assert one.path_length(warm) == pytest.approx(away, rel=1e-12)
    assert one.carried_length() == pytest.approx(carried, rel=1e-12)


def test_losses_and_gradients_are_means_over_all_training_samples() -> None:
    one = client()
    module = one.network.module
    theta = one.initial + 0.01
    loss, gradient = one.loss_and_gradient(theta)
    one.network.vector.copy_(theta)
    module.eval()
    expected = functional.cross_entropy(module(X), Y)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(one.loss(theta), expected.detach())
    torch.testing.assert_close(one.loss(theta, (X[:5], Y[:5])), functional.cross_entropy(module(X[:5]), Y[:5]).detach())
    torch.testing.assert_close(one.gradient(theta), gradient)
    direction = torch.randn(len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = (one.loss(theta + 1e-6 * direction) - one.loss(theta - 1e-6 * direction)) / 2e-6
    assert float(gradient @ direction) == pytest.approx(float(slope), rel=1e-6)


def test_settings_of_one_descent_do_not_stay() -> None:
    one = client()
    first = one.descend(one.initial)
    one.descend(one.initial, lr=0.7, epochs=1, batch=None)
    assert torch.equal(one.descend(one.initial), first)
    assert one.optimizer.lr == 0.1


def test_features_are_what_the_head_takes() -> None:
    one = client()
    features = one.features(one.initial)
    assert features is not None
    head = one.network.head_module()
    assert head is not None
    torch.testing.assert_close(head(features), one.network.module(X))

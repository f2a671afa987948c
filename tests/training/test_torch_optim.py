"""Local training against torch.optim and its schedulers, step by step, on digits and a network with BatchNorm."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import fedtailor as ft
from fedtailor.training.client import Client
from fedtailor.training.network import Network
from fedtailor.training.optimizer import OptimizerSettings
from tests.reference.batches import batches

STEPS, BATCH, SEED = 50, 20, 5
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

Optimizer = torch.optim.Optimizer
Scheduler = lr_scheduler.LRScheduler
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., Optimizer]]] = {
    "sgd": ({"lr": 0.05}, torch.optim.SGD),
    "momentum": ({"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}, torch.optim.SGD),
    "adam": ({"kind": "adam", "lr": 0.001}, torch.optim.Adam),
    "adam, coupled decay": ({"kind": "adam", "lr": 0.001, "weight_decay": 0.1}, torch.optim.Adam),
    "adamw": ({"kind": "adamw", "lr": 0.001, "weight_decay": 0.1}, torch.optim.AdamW),
}


def linear(optimizer: Optimizer, n: int) -> Scheduler:
    return lr_scheduler.LinearLR(optimizer, start_factor=1 / n, total_iters=n - 1)


def after(n: int, then: Callable[[Optimizer, int], Scheduler]) -> Callable[[Optimizer, int], Scheduler]:
    """A warm-up of n, then another schedule over the rest."""
    return lambda optimizer, total: lr_scheduler.SequentialLR(
        optimizer, [linear(optimizer, n), then(optimizer, total - n)], milestones=[n]
    )


def cosine(optimizer: Optimizer, total: int) -> Scheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, total)


def to_a_tenth(optimizer: Optimizer, total: int) -> Scheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, total, eta_min=0.1 * optimizer.param_groups[0]["initial_lr"])


SCHEDULES: dict[str, Callable[[Optimizer, int], Scheduler]] = {
    "step:7,0.5": lambda optimizer, total: lr_scheduler.StepLR(optimizer, 7, 0.5),
    "cosine": cosine,
    "cosine:0.1": lambda optimizer, total: lr_scheduler.CosineAnnealingLR(
        optimizer, total, eta_min=0.1 * optimizer.param_groups[0]["lr"]
    ),
    "warmup:4": lambda optimizer, total: linear(optimizer, 4),
    "warmup:4,cosine": after(4, cosine),
    "warmup:4, cosine:0.1": after(4, to_a_tenth),
    "warmup:3,step:2,0.5": after(3, lambda optimizer, total: lr_scheduler.StepLR(optimizer, 2, 0.5)),
    "1.0 / sqrt(t)": lambda optimizer, total: lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) ** -0.5),
    "2 * 0.5^t": lambda optimizer, total: lr_scheduler.ExponentialLR(optimizer, 0.5),
}


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:190] / 16, dtype=dtype), torch.tensor(y[:190])


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)).to(dtype)


def client(dtype: torch.dtype, keep: bool = False, **settings: Any) -> Client:
    network = Network(small(dtype))
    x, y = samples(dtype)
    chosen = OptimizerSettings(**{"batch": BATCH, "steps": STEPS, **settings})
    initial, nothing = network.vector.clone(), (x[:0], y[:0])
    return Client(0, 1, SEED, {}, (x, y), nothing, network, initial, functional.cross_entropy, chosen, keep)


def by_torch(
    module: nn.Module,
    optimizer: Optimizer,
    scheduler: Scheduler | None = None,
    clip: float | None = None,
    steps: int = STEPS,
    round: int = 1,
    data: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The plain training loop of PyTorch's tutorials, a scheduler's step after each of the optimiser's."""
    x, y = data or samples(next(module.parameters()).dtype)
    module.train()
    for chosen in batches(len(x), SEED, round, 0, batch=BATCH, steps=steps):
        optimizer.zero_grad()
        functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_near(one: Client, theta: Tensor, module: nn.Module) -> None:
    """All parameters and buffers are the module's."""
    for name, tensor in one.network.state_dict(theta).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=TOLERANCE[theta.dtype], msg=name)


def torch_settings(ours: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ours.items() if name != "kind"}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_are_those_of_torch(name: str, clip: float | None, dtype: torch.dtype) -> None:
    settings, kind = OPTIMIZERS[name]
    module = small(dtype)
    by_torch(module, kind(module.parameters(), **torch_settings(settings)), clip=clip)
    one = client(dtype, clip=clip, **settings)
    theta = one.descend(one.initial)
    assert_near(one, theta, module)
    assert float((theta - one.initial).abs().max()) > 0.01  # it went somewhere
    if clip is not None:  # and clipping counts
        assert float((theta - client(dtype, **settings).descend(one.initial)).abs().max()) > 1e-4


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_schedule_within_a_round_is_that_of_torch(name: str, schedule: str, dtype: torch.dtype) -> None:
    settings, kind = OPTIMIZERS[name]
    module = small(dtype)
    optimizer = kind(module.parameters(), **torch_settings(settings))
    by_torch(module, optimizer, SCHEDULES[schedule](optimizer, STEPS))
    one = client(dtype, step_schedule=schedule, **settings)
    assert_near(one, one.descend(one.initial), module)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_schedule_over_rounds_is_that_of_torch(schedule: str, optimizer: str) -> None:
    """A run of ten rounds with five steps each, whose optimiser is kept, is one training loop in PyTorch."""
    rounds, lr = 10, 0.02
    result = ft.run(
        "local", data=[samples(torch.float64)], model=small(), dtype="float64", seed=SEED, rounds=rounds, steps=5,
        batch=BATCH, optimizer=optimizer, lr=lr, schedule=schedule, momentum=0.9 if optimizer == "sgd" else 0.0,
        keep_momentum=True, clip=2.0, test=0.0, validation=0.0, evaluation={"every": 0}, engine="in-process",
    )  # fmt: skip
    module = small(torch.float64)
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    made = sgd(module.parameters(), lr, momentum=0.9) if optimizer == "sgd" else adam(module.parameters(), lr)
    scheduler = SCHEDULES[schedule](made, rounds)
    for number in range(1, rounds + 1):
        by_torch(module, made, clip=2.0, steps=5, round=number, data=result.data.train(0))
        scheduler.step()
    for name, tensor in result.personal(0).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=1e-12, msg=name)


def test_the_factors_of_rounds_and_steps_multiply() -> None:
    """On a rate that a method gives, too; and fine-tuning, like all work outside of a round, has the own rate."""
    both = client(torch.float64, factor=0.5, step_schedule="step:10,0.5", lr=0.2)
    halved = client(torch.float64, step_schedule="step:10,0.5", lr=0.1)
    assert torch.equal(both.descend(both.initial), halved.descend(both.initial))
    assert torch.equal(both.descend(both.initial, lr=0.4), halved.descend(both.initial, lr=0.2))
    whole = client(torch.float64, step_schedule="step:10,0.5", lr=0.2)
    assert torch.equal(both.fresh().descend(both.initial), whole.fresh().descend(both.initial))
    assert both.lr == pytest.approx(0.1)
    rates = [both.lr for _ in both.batches()]
    assert rates == pytest.approx([0.1 * 0.5 ** (step // 10) for step in range(STEPS)])
    assert both.lr == pytest.approx(0.1)


def test_parts_have_taken_their_own_numbers_of_steps() -> None:
    """Kept moments of a head and a body that are trained by turns, and then together: torch.optim counts the steps of
    each parameter, and corrects the bias of its moments by them."""
    one = client(torch.float64, keep=True, kind="adam", lr=0.001, steps=7)
    module = small(torch.float64)
    adam = torch.optim.Adam(module.parameters(), lr=0.001)
    theta = one.initial
    for part, trained in ((one.head, [3]), (one.body, [0, 1]), (one.head, [3]), (None, [0, 1, 3])):
        theta = one.descend(theta, part=part)
        for number, layer in enumerate(module):
            for parameter in layer.parameters():
                parameter.requires_grad_(number in trained)
        if part == one.head:  # a frozen body is in evaluation mode
            steps_of_the_head(module, adam)
        else:
            by_torch(module, adam, steps=7)
        assert_near(one, theta, module)
    assert {float(one.state["steps/theta"][part].unique()) for part in (one.head, one.body)} == {14.0 + 7, 7.0 + 7}


def steps_of_the_head(module: nn.Sequential, adam: Optimizer) -> None:
    x, y = samples(torch.float64)
    module.eval()
    for chosen in batches(len(x), SEED, 1, 0, batch=BATCH, steps=7):
        adam.zero_grad()
        functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
        adam.step()


def test_no_step_touches_the_buffers() -> None:
    """BatchNorm's buffers are those of the pass, whatever a correction or weight decay says of them. One step is seen:
    at its pass the models are equal."""
    settings: dict[str, Any] = {"kind": "adamw", "lr": 0.1, "clip": 1.0, "steps": 1}
    one = client(torch.float64, **settings)
    plain = one.descend(one.initial)
    decayed = client(torch.float64, weight_decay=0.5, **settings)
    pushed = decayed.descend(one.initial, correction=torch.ones_like(one.initial))
    assert one.layout.buffers
    for place in one.layout.buffers:
        assert torch.equal(plain[place], pushed[place])
        assert not torch.equal(plain[place], one.initial[place])


def test_clipping_measures_the_trained_part_without_buffers_and_with_the_correction() -> None:
    one = client(torch.float64, lr=1.0, steps=1, batch=None, clip=0.01)
    for part in (None, one.head, one.body):
        places = part or slice(0, one.layout.size)
        correction = torch.ones_like(one.initial[places])  # counts in buffers too, if anybody let it
        theta = one.descend(one.initial, part=part, correction=correction)
        step = one.layout.without_buffers(theta - one.initial)
        assert float(step.norm()) == pytest.approx(0.01, rel=1e-3)
    batch = next(iter(one.batches()))
    gradient = one.gradient(one.initial, batch) + 1.0
    stepped = one.layout.without_buffers(one.step(one.initial, gradient) - one.initial)
    assert float(stepped.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_rate_for_every_entry_multiplies_the_step_of_adam() -> None:
    """Adam does not see the length of a gradient: a rate that multiplied it would do nothing."""
    one = client(torch.float64, kind="adamw", lr=0.01, weight_decay=0.1)
    scale = torch.full_like(one.initial, 0.25)
    quarter = client(torch.float64, kind="adamw", lr=0.0025, weight_decay=0.1)
    found, expected = one.descend(one.initial, scale=scale), quarter.descend(one.initial)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    still = one.descend(one.initial, scale=torch.zeros_like(one.initial))
    assert torch.equal(*(one.layout.without_buffers(theta) for theta in (still, one.initial)))


def test_adam_learns_about_what_sgd_learns() -> None:
    """With the default rate of each."""
    settings: dict[str, Any] = {"clients": 5, "partition": "iid", "rounds": 6, "epochs": 2, "engine": "in-process"}
    reached = {optimizer: ft.run("fedavg", optimizer=optimizer, **settings).accuracy for optimizer in ("sgd", "adam")}
    assert reached["sgd"] is not None
    assert reached["adam"] is not None
    assert reached["sgd"] > 0.88
    assert abs(reached["adam"] - reached["sgd"]) < 0.03


def test_moments_begin_anew_in_every_round_unless_they_are_kept() -> None:
    fresh, kept = client(torch.float64, kind="adam"), client(torch.float64, keep=True, kind="adam")
    first = fresh.descend(fresh.initial)
    assert torch.equal(first, kept.descend(kept.initial))
    assert fresh.state == {}
    assert set(kept.state) == {"mean/theta", "square/theta", "steps/theta"}
    again = copy.deepcopy(kept.state)
    assert torch.equal(fresh.descend(fresh.initial), first)
    assert not torch.equal(kept.descend(kept.initial), first)
    assert all(not torch.equal(kept.state[name], again[name]) for name in again)

"""Methods with steps or formulas of their own under other optimisers and schedules, against plain PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import fedtailor as ft
from tests.helpers import digits, quadratic_clients, run_quadratic

STEPS, LR = 6, 0.01
EXACT: dict[str, Any] = {
    "dtype": "float64", "engine": "in-process", "test": 0.0, "validation": 0.0, "evaluation": {"every": 0},
    "batch": "full", "steps": STEPS,
}  # fmt: skip


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)).double()


def adam(parameters: Any) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Adam with a cosine over the steps of a round."""
    optimizer = torch.optim.Adam(parameters, lr=LR)
    return optimizer, CosineAnnealingLR(optimizer, STEPS)


@pytest.mark.parametrize("keep", [False, True])
def test_both_heads_of_fedrod_have_an_adam_of_their_own(keep: bool) -> None:
    """Of two rounds, in which moments begin anew or are kept, and the schedule begins anew."""
    data, settings = digits([60]), {**EXACT, "optimizer": "adam", "lr": LR, "step_schedule": "cosine"}
    result = ft.run("fedrod", data=data, model=net(), rounds=2, keep_momentum=keep, **settings)
    (x, y), module = result.data.train(0), net()
    prior = y.bincount(minlength=10).double().log()
    phi = nn.Linear(8, 10).double()
    nn.init.zeros_(phi.weight)
    nn.init.zeros_(phi.bias)
    both = [(adam(module.parameters()), adam(phi.parameters()))]
    for number in range(2):
        if number and not keep:
            both.append((adam(module.parameters()), adam(phi.parameters())))
        for _ in range(STEPS):
            for optimizer, _ in both[-1]:
                optimizer.zero_grad()
            features = module[:2](x)
            generic = module[2](features)
            loss = functional.cross_entropy(generic + prior, y)
            loss += functional.cross_entropy(generic.detach() + phi(features.detach()), y)
            loss.backward()
            for optimizer, schedule in both[-1]:
                optimizer.step()
                schedule.step()
        if keep:  # the same moments, and the rate from the beginning
            for optimizer, schedule in both[-1]:
                schedule.last_epoch = 0
                for group in optimizer.param_groups:
                    group["lr"] = LR
    found = torch.cat([result.client_state(0)["phi"], result.server_state["theta"]])
    expected = [phi.weight, phi.bias, *module.parameters()]
    torch.testing.assert_close(found, torch.cat([p.detach().flatten() for p in expected]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_scaffolds_variate_is_the_mean_gradient_of_a_path_with_schedules(momentum: float) -> None:
    """Each gradient counts by how far it led: Σ_j≥k η_j m^(j−k); what the kept velocity did is taken off."""
    data, centres, curvatures = quadratic_clients(2, 3, seed=1)
    settings = {"steps": 4, "rounds": 3, "lr": 0.2, "schedule": "step:1,0.5", "step_schedule": "1.0 / t"}
    result = run_quadratic("scaffold", data, 3, **settings, momentum=momentum, keep_momentum=True)
    x, c = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    own, velocity = [c, c], [c, c]
    for number in range(3):
        rates = [0.2 * 0.5**number / k for k in range(1, 5)]
        reach = [sum(rates[j] * momentum ** (j - k) for j in range(k, 4)) for k in range(4)]
        ends: list[Tensor] = []
        renewed: list[Tensor] = []
        for i in range(2):
            y, mean = x, torch.zeros_like(x)
            for k in range(4):
                gradient = curvatures[i] @ (y - centres[i]) - own[i] + c
                mean = mean + reach[k] / sum(reach) * gradient
                velocity[i] = momentum * velocity[i] + gradient
                y = y - rates[k] * velocity[i]
            ends.append(y)
            renewed.append(own[i] - c + mean)
        x = (ends[0] + ends[1]) / 2
        c, own = c + sum(after - before for after, before in zip(renewed, own, strict=True)) / 2, renewed
    for i in range(2):
        torch.testing.assert_close(result.client_state(i)["c"], own[i], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.server_state["theta"], x, rtol=1e-10, atol=1e-12)


def test_a_new_client_of_pfedme_steps_with_the_experiments_optimiser() -> None:
    settings = {**EXACT, "optimizer": "adam", "lr": LR, "schedule": "step:1,1e-9"}
    result = ft.run("pfedme", data=digits([60, 50]), model=net(), rounds=2, new_clients=1, lam=0.5, **settings)
    (new,) = result.data.new
    (x, y), w, module = result.data.train(new), result.server_state["theta"], net()
    torch.nn.utils.vector_to_parameters(w.clone(), module.parameters())
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)
    for _ in range(5):
        optimizer.zero_grad()
        theta = torch.nn.utils.parameters_to_vector(module.parameters())
        (functional.cross_entropy(module(x), y) + 0.25 * (theta - w).square().sum()).backward()
        optimizer.step()
    for name, tensor in result.personal(new).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=1e-10)


def test_apfls_share_has_the_rate_of_its_step() -> None:
    """α takes a step on a round's first batch, where a warm-up of the steps is at its beginning."""
    data, settings = digits([60]), {**EXACT, "lr": 0.4, "steps": 1, "rounds": 1}
    shares = [
        float(ft.run("apfl", data=data, model=net(), **settings, **more).client_state(0)["alpha"])
        for more in ({"alpha": 0.5}, {"alpha": 0.5, "step_schedule": "2 * 0.25^t"})
    ]
    assert shares == [0.5, 0.5]  # v and w begin equal: nothing pulls
    settings["rounds"] = 2
    moved = [
        float(ft.run("apfl", data=data, model=net(), **settings, **more).client_state(0)["alpha"]) - 0.5
        for more in ({"step_schedule": "constant"}, {"schedule": "step:1,0.25"})
    ]
    assert moved[0] != 0
    assert moved[1] == pytest.approx(moved[0] / 4, rel=1e-9)  # the same first round, a quarter of the second's step

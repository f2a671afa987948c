"""pFedFDA against Bayes' rule in NumPy, its limit cases, its choice of β, and its errors."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.pfedfda import PFedFDA, common, in_halves
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, personal, server
from tests.methods.problems import BODY, EXACT, OWN, close, features, on_a_network, own_label_clients, watched, who
from tests.reference.pfedfda import Gaussians, cross_validation, estimated, log_posteriors, mixed
from tests.reference.sgd import descend, mean


def posteriors(theta: Tensor, z: Tensor) -> Tensor:
    return (z @ theta[BODY : BODY + 60].view(10, 6).T + theta[BODY + 60 :]).log_softmax(1)


@pytest.mark.parametrize(("beta", "ridge"), [(0.0, 1.0), (0.3, 0.1), (1.0, 1.0)])
def test_follows_its_formulas(beta: float, ridge: float) -> None:
    """Bodies are trained under the common head, whose posteriors are those of Gaussian densities; personal models
    predict by such posteriors."""
    method, log = watched(PFedFDA, beta=beta, ridge=ridge)
    result, problem = on_a_network(method, rounds=3)
    samples = [result.data.client(client).train for client in range(6)]
    labels = [y.tolist() for _, y in samples]
    counts = [[of.count(c) for c in range(10)] for of in labels]
    first = log.down[1, who(result)[0][0]]
    body, shared = problem.initial[:BODY], (first["means"].numpy(), first["covariance"].numpy())
    for number, called in enumerate(who(result), 1):
        bodies, gaussians = [], []
        for i in called:

            def slope(at: Tensor, chosen: Tensor | None, i: int = i, shared: Gaussians = shared) -> Tensor:
                at = at.clone().requires_grad_()
                x, y = samples[i] if chosen is None else (part[chosen] for part in samples[i])
                found = densities(features(x, at), shared, counts[i]).log_softmax(1)
                return torch.autograd.grad(-found[torch.arange(len(y)), y].mean(), at)[0]

            found, _ = descend(slope, body, problem.order(number, i), lr=0.2)
            bodies.append(found)
            own = estimated(features(samples[i][0], found).numpy(), labels[i], shared[0], ridge)
            gaussians.append(mixed((beta, beta), own, shared))
        weights = [problem.samples[i] for i in called]
        body = mean(bodies, weights)
        means, covariances = ([torch.tensor(one) for one in of] for of in zip(*gaussians, strict=True))
        shared = mean(means, weights).numpy(), mean(covariances, weights).numpy()
    close(server(result, "body"), body)
    close(server(result, "means"), torch.tensor(shared[0]))
    close(server(result, "covariance"), torch.tensor(shared[1]))
    for i in range(6):
        z = features(samples[i][0], body)
        own = estimated(z.numpy(), labels[i], shared[0], ridge)
        expected = log_posteriors(z.numpy(), mixed((beta, beta), own, shared), counts[i])
        close(personal(result, i)[:BODY], body)
        close(posteriors(personal(result, i), z), torch.tensor(expected))


def densities(z: Tensor, gaussians: Gaussians, counts: list[int]) -> Tensor:
    """Logarithms of densities by class, up to what all classes have in common."""
    means, covariance = gaussians
    inverse = np.linalg.inv(0.9999 * covariance + 1e-4 * np.trace(covariance) / 6 * np.eye(6))
    away = z[:, None] - torch.tensor(means)
    prior = torch.tensor(np.log(np.array(counts) / sum(counts) + 1e-4))
    return prior - torch.einsum("kcd,de,kce->kc", away, torch.tensor(inverse), away) / 2


def test_the_two_betas_are_the_best_for_the_other_half() -> None:
    """No β on a grid has a lower cross-entropy, and the two differ."""
    data = [(x.double(), y) for x, y in digits([60, 45])]
    run = ft.run("pfedfda", data=data, model="mlp:6", rounds=4, ridge=0.01, **EXACT).simulation
    for i in range(2):
        client = run.sites.site(i).client(0, {})
        message = run.terms.method.broadcast(run.server)
        shared = common(message)
        theta = torch.cat([message["body"], client.initial[client.head]])
        z, y = client.flat_features(theta), client.train_data[1]
        halves = [half.tolist() for half in in_halves(y, client)]
        assert sorted(halves[0] + halves[1]) == [k for k, c in enumerate(y.tolist()) if y.tolist().count(c) > 1]
        beta = PFedFDA(ridge=0.01).validated(client, z, y, shared)
        theirs = (shared[0].numpy(), shared[1].numpy())
        counts = y.bincount(minlength=10).tolist()

        def loss(of_means: float, of_covariance: float) -> float:
            both = (of_means, of_covariance)
            return cross_validation(both, z.numpy(), y.tolist(), halves, theirs, 0.01, counts)  # noqa: B023

        grid = np.linspace(0, 1, 6)
        least = min(loss(one, other) for one in grid for other in grid)
        assert loss(*beta.tolist()) < least + 1e-3
        assert loss(*beta.tolist()) < loss(0, 0)
        assert not torch.equal(beta[0], beta[1])


def test_with_common_gaussians_clients_differ_by_their_classes_alone() -> None:
    result = ft.run("pfedfda", **SMALL, beta=0.0)
    head = result.simulation.server.head
    weights = [personal(result, client)[head][:160] for client in range(5)]
    biases = [personal(result, client)[head][160:] for client in range(5)]
    assert all(torch.equal(weights[0], other) for other in weights)
    assert not torch.equal(biases[0], biases[1])


def test_a_run_of_own_gaussians_takes_nothing_of_the_common_ones_but_missing_means() -> None:
    how = {**SMALL, "participation": "all"}
    result = ft.run("pfedfda", **how, beta=1.0)
    side = result.simulation
    message = side.terms.method.broadcast(side.server)
    for client in range(5):
        site = side.sites.site(client).client(0, {})
        has = site.class_counts >= 3
        other = {**message, "means": torch.where(has[:, None], message["means"] + 1, message["means"]),
                 "covariance": 3 * message["covariance"]}  # fmt: skip
        assert torch.equal(
            side.terms.method.personal_model(site, other), side.terms.method.personal_model(site, message)
        )


@pytest.mark.parametrize("change", [-0.5, 1e-8])
def test_a_covariance_that_noise_made_indefinite_is_repaired(change: float) -> None:
    covariance = torch.eye(3).double()
    covariance[0, 0], covariance[0, 1] = change, 0.3  # nor symmetric
    repaired = common({"means": torch.zeros(2, 3), "covariance": covariance})[1]
    assert (torch.linalg.eigvalsh(repaired) > -1e-12).all()
    assert torch.equal(common({"means": torch.zeros(2, 3), "covariance": torch.eye(3)})[1], torch.eye(3).double())


def test_few_samples_and_a_class_that_nobody_has() -> None:
    """One sample alone has no covariance, no β and no class mean of its own."""
    data = [(x[y < 9], y[y < 9]) for x, y in digits([1, 2, 5, 40])]
    result = ft.run("pfedfda", data=data, model="mlp:8", rounds=3, test=0.0, engine="in-process",
                    evaluation={"every": 0}, on_failure="stop")  # fmt: skip
    assert all(tensor.isfinite().all() for tensor in result.server_state.values())
    for client in range(4):
        assert personal(result, client).isfinite().all()


def test_buffers_are_the_global_ones() -> None:
    result = ft.run("pfedfda", **{**SMALL, "model": normed()})
    layout = result.simulation.server.layout
    assert len(layout.buffers) > 1
    for place in layout.buffers:
        assert torch.equal(personal(result, 1)[place], server(result, "body")[place])


def test_a_run_that_is_private_or_robust_ends() -> None:
    for how in ({"privacy": "client, noise=0.5, clip=1"}, {"aggregation": "median"}):
        result = ft.run("pfedfda", **{**SMALL, "participation": "all", **how})
        assert personal(result, 0).isfinite().all()


@pytest.mark.parametrize("model", [nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False)), "mlp:8"])
def test_another_head_is_refused_before_the_first_round(model: Any) -> None:
    with pytest.raises(ft.FedtailorError, match="pFedFDA needs a head that is one linear layer with a bias"):
        ft.run("pfedfda", **{**SMALL, "model": model, "head": 1 if isinstance(model, nn.Module) else 0})


def test_labels_that_every_client_numbers_for_itself_are_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="cannot train with labels own"):
        ft.run("pfedfda", data=own_label_clients(), **OWN)

"""What uploads say about gradients: with the true samples, what is predicted is what was seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fedtailor._common.errors import FedtailorError
from fedtailor.attacks.evidence import evidence
from fedtailor.attacks.inversion import Attack
from fedtailor.attacks.study import Question, Study
from fedtailor.messages import State
from fedtailor.methods import CATALOGUE
from fedtailor.models import build_model
from tests.attacks.parts import matched, observed, plain_gradient, study

EXACT = 1e-9  # of the squared distance, as a share: in float64, where changes lose digits
WHOLE = ("fedavg", "ditto", "pgfed", "pgfedmo", "pgfed-ce", "pfedmb", "fedacs", "ifca", "apfl", "fedbabu", "fednova")


def asked(round: int = 1, samples: int = 3) -> Question:
    return Question(Attack("analytic"), samples=samples, round=round)


@pytest.mark.parametrize("round", [1, 2])
@pytest.mark.parametrize("method", WHOLE)
def test_the_true_samples_give_what_was_seen(method: str, round: int) -> None:
    """After five local steps, with the corrections that the server itself has sent."""
    matching, _, guess, _, _ = matched(study(method, question=asked(round), dtype="float64"))
    assert matching.squared(guess).item() < EXACT
    assert matching.cosine(guess).item() < EXACT
    assert matching.squared(replace(guess, x=1 - guess.x)).item() > 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"clip": 0.5},
        {"schedule": "1.0 / (t + 1)"},
        {"step_schedule": "cosine:0.1"},
        {"label_smoothing": 0.1},
        {"model": "resnet", "steps": 2},
    ],
    ids=str,
)
def test_the_steps_are_those_of_the_experiment(settings: dict[str, Any]) -> None:
    matching, _, guess, _, _ = matched(study("fedavg", question=asked(), dtype="float64", **settings))
    assert matching.squared(guess).item() < EXACT


@pytest.mark.parametrize("round", [1, 2])
def test_fedpacs_head_is_known(round: int) -> None:
    made = study("fedpac", question=asked(round), dtype="float64", parameters={"lam": 0.0, "head_epochs": 3})
    matching, _, guess, _, _ = matched(made)
    assert matching.squared(guess).item() < EXACT


def test_the_branches_may_have_a_rate_of_their_own() -> None:
    made = study("pfedmb", question=asked(), dtype="float64", parameters={"branch_lr": 0.3})
    matching, _, guess, _, _ = matched(made)
    assert matching.squared(guess).item() < EXACT


def test_the_weights_of_branches_say_what_alpha_is() -> None:
    """A private run does not upload α for the record."""
    made = study("pfedmb", question=asked(), dtype="float64")
    seen, _, _ = observed(made)
    without = replace(seen, upload={name: tensor for name, tensor in seen.upload.items() if name != "alpha"})
    one, other = (evidence(made.prepared[0].terms.method, each) for each in (seen, without))
    assert torch.allclose(one.start, other.start)
    assert torch.allclose(one.seen, other.seen)


def test_a_new_clients_head_is_the_initial_one() -> None:
    matching, clue, guess, _, _ = matched(study("fedper", question=asked(), dtype="float64"))
    assert clue.unknown is None
    assert matching.squared(guess).item() < EXACT


@pytest.mark.parametrize("method", ["fedper", "fedrep", "pflego"])
def test_a_private_head_is_not_known(method: str) -> None:
    """Not even in part: with the initial head, the true samples give something else; with the private one, the same."""
    made = study(method, question=asked(round=2), dtype="float64")
    matching, clue, guess, before, after = matched(made)
    assert clue.unknown == made.prepared[0].terms.network.layout.head
    assert matching.squared(guess).item() > 1e-4
    head = {"fedper": before["head"], "fedrep": after["head"]}.get(method)
    head = _fitted_head(made, before) if head is None else head
    assert matching.squared(replace(guess, unknown=head)).item() < EXACT


def test_fedrecons_gradient_is_under_a_head_that_is_not_known() -> None:
    parameters = {"support": 1.0, "body_update": "adam", "keep_head": True}
    matching, clue, guess, _, after = matched(
        study("fedrecon", question=asked(), dtype="float64", parameters=parameters)
    )
    assert clue.unknown is not None
    assert matching.squared(guess).item() > 1e-4
    assert matching.squared(replace(guess, unknown=after["head"])).item() < EXACT


@pytest.mark.parametrize(("method", "parameters"), [("fedper", {}), ("fedrep", {"head_epochs": 0})])
def test_a_head_of_its_own_is_not_known_even_of_a_new_client(method: str, parameters: dict[str, Any]) -> None:
    for start, known in (("network", True), ("uniform", False)):
        made = study(method, question=asked(), dtype="float64", parameters={**parameters, "head_start": start})
        assert (matched(made)[1].unknown is None) == known


def _fitted_head(made: Study, before: State) -> Tensor:
    """PFLEGO's head at its joint gradient: 49 steps of logistic regression on the body's features."""
    seen, _, _ = observed(made)
    x, y = made.data.train(made.victims[0])
    weight, bias = seen.message["body"].split([20 * 64, 20])
    features = torch.relu(x.flatten(1) @ weight.view(20, 64).T + bias)
    W, b = (part.clone().requires_grad_() for part in before["head"].split([10 * 20, 10]))
    for _ in range(49):
        loss = torch.nn.functional.cross_entropy(features @ W.view(10, 20).T + b, y)
        slopes = torch.autograd.grad(loss, (W, b))
        W, b = ((p - 0.1 * g).detach().requires_grad_() for p, g in zip((W, b), slopes, strict=True))
    return torch.cat([W, b]).detach()


def test_one_step_is_the_gradient_of_plain_pytorch() -> None:
    made = study("fedavg", question=asked(), dtype="float64", steps=1)
    _, clue, guess, _, _ = matched(made)
    module = build_model("mlp:20", (1, 8, 8), 10, seed=0).double()
    module.load_state_dict(made.prepared[0].terms.network.state_dict(clue.start))
    plain = plain_gradient(module, guess.x, made.data.train(made.victims[0])[1])
    assert torch.allclose(clue.seen, torch.cat([plain[name].flatten() for name in plain]), atol=1e-12)


def test_pgfeds_gradient_is_at_its_own_model() -> None:
    """The upload is ∇f_i at the θ_i beside it, however many steps led there."""
    made = study("pgfed", question=asked(), dtype="float64", epochs=20)
    _, clue, guess, _, _ = matched(made)
    assert clue.rates == ()
    module = build_model("mlp:20", (1, 8, 8), 10, seed=0).double()
    module.load_state_dict(made.prepared[0].terms.network.state_dict(clue.start))
    plain = plain_gradient(module, guess.x, made.data.train(made.victims[0])[1])
    assert torch.allclose(clue.seen, torch.cat([plain[name].flatten() for name in plain]), atol=1e-12)


def test_long_paths_are_followed_in_fewer_steps_of_the_same_length() -> None:
    _, clue, _, _, _ = matched(study("fedavg", question=asked(), epochs=30, momentum=0.5))
    short = clue.in_steps(10)
    assert (len(clue.rates), len(short.rates)) == (30, 10)
    assert short.length == pytest.approx(clue.length)
    assert clue.length == pytest.approx(sum(0.1 * (1 - 0.5**k) / 0.5 for k in range(1, 31)))
    assert clue.in_steps(30) is clue


# Clients begin with a mix of their own; nothing of models is uploaded; several are, by weights that nobody sees.
SILENT = ("fedfomo", "fedproto", "fedem")


@pytest.mark.parametrize("method", sorted(set(CATALOGUE) - {"local"}))
def test_every_method_is_read_or_refused(method: str) -> None:
    made = study(method, question=asked(round=2))
    if method in SILENT:
        with pytest.raises(FedtailorError, match=f"not known what {CATALOGUE[method].__name__}'s uploads say"):
            matched(made)
        return
    matching, clue, _, _, _ = matched(made)
    assert clue.words
    assert len(clue.seen) == clue.place.stop - clue.place.start
    assert 0 < float(matching.seen.norm()) < float("inf")


def test_a_head_alone_is_not_read() -> None:
    with pytest.raises(FedtailorError, match="not known what LGFedAvg's uploads say"):
        matched(study("lg-fedavg", question=asked(), parameters={"warm_rounds": 0}))


def test_adam_is_refused() -> None:
    with pytest.raises(FedtailorError, match="no sums of gradients: take --optimizer sgd"):
        matched(study("fedavg", question=asked(), optimizer="adam"))


def test_a_vector_as_tensors_of_the_module() -> None:
    network = study("fedavg", model="resnet").prepared[0].assembled.network()
    theta = network.vector + torch.randn(len(network.vector), generator=torch.Generator().manual_seed(0)) / 10
    x = torch.rand(4, 1, 8, 8)
    network.module.eval()
    with torch.no_grad():
        other = functional_call(network.module, network.tensors(theta), (x,))
        network.vector.copy_(theta)
        assert torch.equal(other, network(x))

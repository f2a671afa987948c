"""Small studies of leakage, and what only the test knows of them: the true samples and the clients' states."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedtailor.attacks.evidence import Evidence, Observed, evidence
from fedtailor.attacks.gradient_matching import Guess, Matching
from fedtailor.attacks.inversion import Attack
from fedtailor.attacks.study import Listener, Question, Study
from fedtailor.engines.preparation import Objects
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.messages import NEVER, State
from fedtailor.training.schedule import factor_at

SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "max_train": 20, "model": "mlp:20", "lr": 0.1}


def study(
    *methods: str, question: Question | None = None, parameters: dict[str, Any] | None = None, **settings: Any
) -> Study:
    each = [{**SMALL, "method": name, "parameters": parameters or {}, **settings} for name in methods]
    return Study([make_experiment(one) for one in each], question or Question(Attack("analytic")), Objects())


def observed(made: Study) -> tuple[Observed, State, State]:
    """What the server has of the first attacked client of a study's first method, and the client's states before and
    after its work, which the server does not have."""
    (prepared, *_), victim, last = made.prepared, made.victims[0], made.question.round
    run = Simulation(prepared)
    run.start()
    for number in range(1, last):
        run.round(number)
    before = dict(run.state_of(victim))
    listener = Listener(run.sites, [victim])
    run.loop.round(last, listener)
    request, upload = listener.heard[victim]
    terms = prepared.terms
    settings = replace(terms.optimizer, factor=factor_at(terms.schedule, terms.rounds, last))
    layout, n = prepared.terms.network.layout, made.question.samples
    new = request.version == NEVER
    found = Observed(request.message, upload, layout, terms.initial, n, settings, last, new)
    return found, before, dict(run.state_of(victim))


def matched(made: Study) -> tuple[Matching, Evidence, Guess, State, State]:
    """The evidence against a study's first method, and the guess that is the truth but for the unknown part."""
    prepared = made.prepared[0]
    seen, before, after = observed(made)
    clue = evidence(prepared.terms.method, seen)
    x, y = made.data.train(made.victims[0])
    assert isinstance(x, Tensor)
    guess = Guess(x, one_hot(y, made.data.n_outputs).to(x.dtype))
    return Matching(prepared.assembled.network(), prepared.terms.training_loss, clue), clue, guess, before, after


def plain_gradient(module: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of a module's cross-entropy, by autograd and nothing of the library."""
    module.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}

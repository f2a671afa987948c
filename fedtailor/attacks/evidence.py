"""The evidence that a curious server has of one client's samples: what its upload says about a gradient of them.

`evidence` is a function of a method and of what the server observed of a client's round, by the method's class. A
method of anybody's own that uploads something else than a model or a body is added with `evidence.register`.
"""

from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import Message
from fedtailor.method import Method
from fedtailor.methods.cfl import CFL
from fedtailor.methods.fedacs import FedACS
from fedtailor.methods.fedamp import FedAMP
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.fedcac import FedCAC
from fedtailor.methods.fednova import FedNova
from fedtailor.methods.fedpac import FedPAC
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedrecon import FedRecon
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.ifca import IFCA
from fedtailor.methods.pfedgraph import PFedGraph
from fedtailor.methods.pfedmb import PFedMB, mix
from fedtailor.methods.pfedsim import PFedSim
from fedtailor.methods.pflego import PFLEGO
from fedtailor.methods.pgfed import PGFed
from fedtailor.methods.pgfed_ce import PGFedCE
from fedtailor.training.descent import step_count
from fedtailor.training.layout import Layout
from fedtailor.training.optimizer import OptimizerSettings
from fedtailor.training.schedule import value_at


@dataclass(frozen=True)
class Observed:
    """All that the server has of one client's round, and nothing of the client's own.

    `initial` is the network's initial vector, `optimizer` the experiment's settings with this round's factor, `new`
    says that the client takes part for the first time: it then has no state.
    """

    message: Message
    upload: Message
    layout: Layout
    initial: Tensor
    n_samples: int
    optimizer: OptimizerSettings
    round: int = 1
    new: bool = True


@dataclass(frozen=True)
class Evidence:
    """A gradient that the client computed, or the change of a model by its steps, as far as the server sees it.

    `start` is the model at which the gradient was taken or the steps began; its part `unknown` is a guess. `seen` is
    the gradient, or the change divided by the length of the path: the mean gradient along it. Both are of the part
    `place` of the vector. `rates` are those of the steps, none for a gradient; only the part `moves` is trained, along
    the gradient plus a `correction`, times a `scale`.
    """

    words: str
    start: Tensor
    seen: Tensor
    place: slice
    rates: tuple[float, ...] = ()
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    unknown: slice | None = None
    moves: slice | None = None
    correction: Tensor | None = None
    scale: Tensor | None = None
    training: bool = True  # the mode of the network while it was differentiated

    @property
    def length(self) -> float:
        """The length of the path along a constant gradient of length 1."""
        m = self.momentum
        return sum(rate * (1 - m**k) / (1 - m) for k, rate in enumerate(self.rates, 1))

    def in_steps(self, most: int) -> "Evidence":
        """The same path in at most so many equal steps without momentum, for an attack that cannot follow them all."""
        if len(self.rates) <= most:
            return self
        return replace(self, rates=(self.length / most,) * most, momentum=0.0)


def change(
    observed: Observed,
    words: str,
    start: Tensor,
    end: Tensor,
    place: slice,
    *,
    settings: OptimizerSettings | None = None,
    unknown: slice | None = None,
    moves: slice | None = None,
    correction: Tensor | None = None,
    scale: Tensor | None = None,
) -> Evidence:
    """The change of a part of a model by the client's steps, from `start` (the whole) to `end` (the part)."""
    used = settings or observed.optimizer
    if used.kind != "sgd":
        raise FedtailorError(f"Changes by {used.kind} are no sums of gradients: take --optimizer sgd.")
    steps = step_count(observed.n_samples, used)
    found = Evidence(
        f"{words} over {steps} step{'s' * (steps != 1)}",
        start,
        start[place] - end,
        place,
        tuple(used.lr * factor for factor in used.factors(steps)),
        used.momentum,
        used.weight_decay,
        used.clip,
        unknown,
        moves,
        correction,
        scale,
    )
    if not found.rates:
        raise FedtailorError(f"The client takes no step that would change {words}: there is nothing to invert.")
    return replace(found, seen=found.seen / found.length)


@singledispatch
def evidence(method: Method, observed: Observed) -> Evidence:
    """Find out what a client's upload says about a gradient of its samples.

    By default: the change of the one model, or body, among the uploads against what the client was sent.
    """
    message, upload, layout = observed.message, observed.upload, observed.layout
    for name in method.means:
        end = upload[name]
        start = method.sent(message, name, end)
        if start is not None and start.shape == observed.initial.shape:
            return change(observed, "the model's change", start, end, slice(0, layout.size))
    if len(upload.get("body", ())) and "body" in message:
        return _body(observed, known_head=False)
    raise FedtailorError(
        f"It is not known what {type(method).__name__}'s uploads say about gradients: leave it out, or register it in "
        "fedtailor.attacks.evidence."
    )


def _joined(observed: Observed) -> Tensor:
    """The body that was sent, under the network's initial head."""
    return torch.cat([observed.message["body"], observed.initial[observed.layout.head]])


def _body(
    observed: Observed, known_head: bool, alone: bool = False, settings: OptimizerSettings | None = None
) -> Evidence:
    """The change of a body under a head that is known, or not; the body is trained with it or `alone`."""
    layout = observed.layout
    return change(
        observed,
        f"the body's change {'' if known_head else 'under an unknown head '}".rstrip(),
        _joined(observed),
        observed.upload["body"],
        layout.body,
        settings=settings,
        unknown=None if known_head or layout.head.start == layout.head.stop else layout.head,
        moves=layout.body if alone else None,
    )


@evidence.register
def _(method: FedPer, observed: Observed) -> Evidence:
    """A client without a state begins with the initial head, which the server knows if it is the network's."""
    return _body(observed, known_head=observed.new and method.head_start == "network")


@evidence.register
def _(method: FedRep, observed: Observed) -> Evidence:
    settings = replace(
        observed.optimizer, epochs=method.body_epochs, steps=None, lr=min(observed.optimizer.lr, method.max_lr)
    )
    known = observed.new and not method.head_epochs and method.head_start == "network"
    return _body(observed, known_head=known, alone=True, settings=settings)


@evidence.register
def _(method: FedPAC, observed: Observed) -> Evidence:
    """The head under which the body was trained comes with it. The pull towards class means is left out."""
    start, body = torch.cat([observed.message["body"], observed.upload["head"]]), observed.layout.body
    return change(observed, "the body's change", start, observed.upload["body"], body, moves=body)


@evidence.register
def _(method: FedBABU, observed: Observed) -> Evidence:
    """The head is the same for all, always."""
    return _body(observed, known_head=method.head_start == "network", alone=True)


@evidence.register
def _(method: FedRecon, observed: Observed) -> Evidence:
    """The steps are on the query samples alone, whose number is uploaded."""
    queried = replace(observed, n_samples=int(observed.upload["n_query"].round().clamp(min=1)))
    if method.body_update == "descent":
        return _body(queried, known_head=False, alone=True)
    return _gradient(queried, known_head=False)


@evidence.register
def _(method: PFLEGO, observed: Observed) -> Evidence:
    """∇f_i of the body, at a head that the client has fitted for τ−1 steps."""
    known = observed.new and method.inner_steps == 1 and method.head_start == "network"
    return _gradient(observed, known)


def _gradient(observed: Observed, known_head: bool) -> Evidence:
    """The gradient of a body under a head that is known, or not."""
    layout = observed.layout
    words = "the body's gradient" if known_head else "the body's gradient under an unknown head"
    unknown = None if known_head or layout.head.start == layout.head.stop else layout.head
    seen = observed.upload["gradient"]
    return Evidence(words, _joined(observed), seen, layout.body, unknown=unknown, training=False)


@evidence.register
def _(method: PGFed, observed: Observed) -> Evidence:
    """∇f_i at the uploaded θ_i, after any number of local steps (Algorithm 1, line 14)."""
    upload, whole = observed.upload, slice(0, observed.layout.size)
    return Evidence("the uploaded gradient", upload["theta"], upload["gradient"], whole, training=False)


@evidence.register
def _(method: PGFedCE, observed: Observed) -> Evidence:
    """(θ_glob − θ_i) / path is the mean of ∇f_i + g̃_i, and the server has sent g̃_i."""
    message, whole = observed.message, slice(0, observed.layout.size)
    start, end, extra = message["theta"], observed.upload["theta"], message.get("g_tilde")
    return change(observed, "the model's change", start, end, whole, correction=extra)


@evidence.register
def _(method: FedNova, observed: Observed) -> Evidence:
    """The change divided by the length of the path in steps of the rate: the mean gradient, times that rate."""
    x, d, settings = observed.message["theta"], observed.upload["d"], observed.optimizer
    found = change(observed, "the model's change", x, x - d, slice(0, observed.layout.size))
    return replace(found, seen=d / (settings.lr * settings.factor))


@evidence.register
def _(method: PFedMB, observed: Observed) -> Evidence:
    """All branches of a layer move along one g_l: Σ_b α_lb (W'_lb − W_lb) is the change of their mix θ."""
    message, upload, layout = observed.message, observed.upload, observed.layout
    slices = list(layout.layers.values()) if method.per_layer else [slice(0, layout.size)]
    W, alpha = message["W"], _alpha(upload)
    theta, settings, scale = mix(alpha, W, slices), None, None
    if method.branch_lr is not None:
        settings, scale = replace(observed.optimizer, lr=method.branch_lr), layout.spread(alpha.square().sum(1))
    end = theta + layout.without_buffers(mix(alpha, upload["W"] - W, slices))
    words = "the branches' change, mixed by α"
    return change(observed, words, theta, end, slice(0, layout.size), settings=settings, scale=scale)


def _alpha(upload: Message) -> Tensor:
    """A client's α: an upload of its own or, where that is not made, the weights n·α of the mean."""
    if "alpha" in upload:
        return upload["alpha"]
    weight = upload["weight"].clamp(min=0)
    return (weight / weight.sum(0).clamp(min=1e-12)).T


@evidence.register
def _(method: FedACS, observed: Observed) -> Evidence:
    step = method.client_step
    lr = observed.optimizer.lr if step is None else value_at(step, observed.round)
    return _mixed(observed, replace(observed.optimizer, lr=lr))


@evidence.register
def _(method: FedAMP, observed: Observed) -> Evidence:
    return _mixed(observed, observed.optimizer)


@evidence.register(PFedSim)
@evidence.register(PFedGraph)
@evidence.register(FedCAC)
def _sent(method: Method, observed: Observed) -> Evidence:
    """The model that was sent is the one with which the client begins; pFedGraph's pull towards it is left out."""
    start, end = observed.message["theta"], observed.upload["theta"]
    return change(observed, "the model's change", start, end, slice(0, observed.layout.size))


def _mixed(observed: Observed, settings: OptimizerSettings) -> Evidence:
    """The change of the client's model w against the mix u that it was sent."""
    u, w, whole = observed.message["u"], observed.upload["w"], slice(0, observed.layout.size)
    return change(observed, "the model's change from its mix", u, w, whole, settings=settings)


@evidence.register
def _(method: IFCA, observed: Observed) -> Evidence:
    """The weights of the mean say which of the clusters' models the client began with."""
    upload = observed.upload
    start = observed.message["theta"][int(upload["member"].flatten().argmax())]
    return change(observed, "the model's change", start, upload["theta"], slice(0, observed.layout.size))


@evidence.register
def _(method: CFL, observed: Observed) -> Evidence:
    """The client began with the model that it was sent, or with that of the leaf at which it arrived."""
    models, upload = observed.message["theta"], observed.upload
    start = models if models.dim() == 1 else models[upload["leaf"]]
    return change(observed, "the model's change", start, upload["theta"], slice(0, observed.layout.size))

"""Gradient inversion: samples whose gradient, or change of the model, is the one that was seen.

DLG (Zhu et al., Deep Leakage from Gradients, 2019), iDLG (Zhao et al., 2020), cosine distance with total variation
(Geiping et al., Inverting Gradients, 2020), and the closed form for one sample and a dense first layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.attacks.gradient_matching import Guess, Matching
from fedtailor.training.network import Network

Inversion = Literal["dlg", "idlg", "cosine", "analytic"]
INVERSIONS: tuple[Inversion, ...] = get_args(Inversion)
ITERATIONS: dict[Inversion, int] = {"dlg": 300, "idlg": 300, "cosine": 1000, "analytic": 1}
RATE, PART_RATE = 0.1, 0.01  # of Adam: of labels and inputs, as shares of their range; of the unknown part of a model
SURE = 3.0  # the logit of a label that was read, where several samples make it an estimate
FALLS = (3 / 8, 5 / 8, 7 / 8)  # of the iterations: there Adam's rate falls to a tenth
OnStep = Callable[[], None]


@dataclass(frozen=True)
class Samples:
    """The number of samples, their shape and number of classes, and the range of pixels if they are images."""

    count: int
    shape: torch.Size
    classes: int
    pixels: tuple[float, float] | None


@dataclass(frozen=True)
class Attack:
    """An attack and its effort: iterations of the optimiser, restarts of which the best match counts, and the weight of
    the total variation."""

    kind: Inversion = "cosine"
    iterations: int | None = None
    restarts: int = 1
    tv: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in INVERSIONS:
            raise unknown("inversion", self.kind, INVERSIONS)
        if (self.iterations is not None and self.iterations < 1) or self.restarts < 1:
            raise FedtailorError("An inversion needs at least one iteration and one restart.")
        if self.tv < 0:
            raise FedtailorError(f"The weight of the total variation is {self.tv}: give 0 or more.")

    @property
    def length(self) -> int:
        """The iterations of each restart."""
        return self.iterations or ITERATIONS[self.kind]


@dataclass(frozen=True)
class Reconstruction:
    """The reconstructed inputs and labels, and the distance that is left between what was seen and what they give."""

    x: Tensor
    labels: Tensor
    distance: float


def invert(
    matching: Matching, samples: Samples, attack: Attack, stream: torch.Generator, step: OnStep
) -> Reconstruction:
    """Reconstruct samples; of several restarts, the one that matches best."""
    if attack.kind == "analytic":
        found = analytic(matching, samples)
        step()
        return found
    labels = read_labels(matching, samples) if attack.kind != "dlg" else None
    run = _adam if attack.kind == "cosine" else _lbfgs
    starts = (_begin(matching, samples, labels, stream) for _ in range(attack.restarts))
    return min((run(matching, attack, start, step) for start in starts), key=lambda found: found.distance)


def _begin(matching: Matching, samples: Samples, labels: Tensor | None, stream: torch.Generator) -> "_Dummy":
    """Draw where an attack begins: noise in the range of the pixels, or standard normal numbers."""
    like, shape = matching.evidence.start, (samples.count, *samples.shape)
    if samples.pixels is None:
        x = torch.randn(shape, generator=stream)
    else:
        low, high = samples.pixels
        x = low + (high - low) * torch.rand(shape, generator=stream)
    logits: Tensor | None = torch.randn(samples.count, samples.classes, generator=stream).to(like)
    if labels is not None:
        logits = None if samples.count == 1 else SURE * one_hot(labels, samples.classes).to(like)
    place = matching.evidence.unknown
    guess = None if place is None else matching.evidence.start[place].clone()
    return _Dummy(samples, x.to(like), labels, logits, guess)


class _Dummy:
    """The samples that are optimised, with their labels unless these were read, and the unknown part of the model."""

    def __init__(
        self, samples: Samples, x: Tensor, labels: Tensor | None, logits: Tensor | None, part: Tensor | None
    ) -> None:
        self.samples, self.x, self.labels, self.logits, self.part = samples, x, labels, logits, part
        for tensor in self.tensors:
            tensor.requires_grad_()

    @property
    def others(self) -> list[Tensor]:
        return [tensor for tensor in (self.logits, self.part) if tensor is not None]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, *self.others]

    def guess(self) -> Guess:
        if self.logits is not None:
            y = self.logits.softmax(1)
        else:
            assert self.labels is not None
            y = one_hot(self.labels, self.samples.classes).to(self.x)
        return Guess(self.x, y, self.part)

    def clamp(self) -> None:
        """Bring the inputs back into the range of pixels."""
        if self.samples.pixels is not None:
            self.x.data.clamp_(*self.samples.pixels)

    def found(self, distance: float) -> Reconstruction:
        self.clamp()
        labels = self.labels if self.logits is None else self.logits.detach().argmax(1)
        assert labels is not None
        return Reconstruction(self.x.detach().nan_to_num(), labels, distance)


def _lbfgs(matching: Matching, attack: Attack, dummy: _Dummy, step: OnStep) -> Reconstruction:
    """DLG and iDLG: minimise the squared distance with L-BFGS."""
    optimizer = torch.optim.LBFGS(
        dummy.tensors,
        lr=1.0,
        max_iter=1,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=100,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        distance = matching.squared(dummy.guess())
        for tensor, slope in zip(dummy.tensors, torch.autograd.grad(distance, dummy.tensors), strict=True):
            tensor.grad = slope
        return distance.detach()

    for _ in range(attack.length):
        optimizer.step(closure)
        step()
    return dummy.found(_left(float(matching.squared(dummy.guess()).detach())))


def _adam(matching: Matching, attack: Attack, dummy: _Dummy, step: OnStep) -> Reconstruction:
    """Minimise the cosine distance and the total variation with Adam on the signs of the inputs' gradient."""
    pixels = dummy.samples.pixels
    span = 1.0 if pixels is None else pixels[1] - pixels[0]
    rates = ((dummy.x, RATE * span), (dummy.logits, RATE), (dummy.part, PART_RATE))
    optimizer = torch.optim.Adam([{"params": [tensor], "lr": rate} for tensor, rate in rates if tensor is not None])
    falls = [int(share * attack.length) for share in FALLS]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, 0.1)
    for _ in range(attack.length):
        objective = matching.cosine(dummy.guess())
        if pixels is not None:
            objective = objective + attack.tv * total_variation(dummy.x) / span
        slopes = torch.autograd.grad(objective, dummy.tensors)
        dummy.x.grad = slopes[0].sign()
        for tensor, slope in zip(dummy.others, slopes[1:], strict=True):
            tensor.grad = slope
        optimizer.step()
        schedule.step()
        dummy.clamp()
        step()
    return dummy.found(_left(float(matching.cosine(dummy.guess()).detach())))


def _left(distance: float) -> float:
    """The distance at the end; an attack that ran away is the worst of all."""
    return distance if distance == distance else float("inf")


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbouring pixels."""
    down, right = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return down.abs().mean() + right.abs().mean()


def read_labels(matching: Matching, samples: Samples) -> Tensor | None:
    """Read the labels off the gradient of the last layer (iDLG); None if that is not in the upload.

    The gradient of the bias of class c is the mean of p_c − y_c: for one sample, negative for the true class alone.
    For several, N (1/C − g_c) estimates the number of samples of class c, with p_c about 1/C as in a network that is
    not trained yet; the largest estimates give the labels, one by one.
    """
    place = last_bias(matching.network)
    seen = matching.evidence.place
    if place is None or place.start < seen.start or place.stop > seen.stop:
        return None
    g = matching.evidence.seen[place.start - seen.start : place.stop - seen.start][: samples.classes]
    counts = samples.count * (1 / samples.classes - g)
    labels = []
    for _ in range(samples.count):
        labels.append(int(counts.argmax()))
        counts[labels[-1]] -= 1
    return torch.tensor(labels, device=g.device)


def last_bias(network: Network) -> slice | None:
    """Find the bias of the last layer, one number a class; None if the head ends in another layer."""
    if not network.head_names:
        return None
    layer = network.module.get_submodule(network.head_names[-1])
    return _bias(network, network.head_names[-1], layer)


def _bias(network: Network, name: str, layer: nn.Module) -> slice | None:
    """Find the bias of a dense layer in the vector: behind its weight."""
    if not isinstance(layer, nn.Linear) or layer.bias is None:
        return None
    place = network.layout.layers[name]
    return slice(place.start + layer.weight.numel(), place.stop)


def analytic(matching: Matching, samples: Samples) -> Reconstruction:
    """Compute one sample from the gradient of a dense first layer: ∂W = δ xᵀ and ∂b = δ, so x = ∂Wᵀ ∂b / ‖∂b‖².

    The same holds of any sum of such gradients, so of the change by any number of steps on the one sample.
    """
    network, seen = matching.network, matching.evidence.place
    name = next(iter(network.layout.layers))
    layer = network.module.get_submodule(name)
    bias = _bias(network, name, layer)
    if samples.count != 1:
        raise FedtailorError("The analytic inversion is for one sample: take --samples 1, or another inversion.")
    if not isinstance(layer, nn.Linear) or bias is None or layer.in_features != samples.shape.numel():
        raise FedtailorError(
            "The analytic inversion is for networks whose first layer is dense and has a bias, like mlp: take another."
        )
    if bias.start < seen.start or bias.stop > seen.stop:
        raise FedtailorError("The network's first layer is not in the upload: take another inversion than analytic.")
    start = network.layout.layers[name].start
    weights = matching.evidence.seen[start - seen.start : bias.start - seen.start].view(-1, layer.in_features)
    biases = matching.evidence.seen[bias.start - seen.start : bias.stop - seen.start]
    x = (biases @ weights / biases.square().sum().clamp(min=torch.finfo(biases.dtype).tiny)).view(1, *samples.shape)
    if samples.pixels is not None:
        x = x.clamp(*samples.pixels)
    labels = read_labels(matching, samples)
    return Reconstruction(x, labels if labels is not None else torch.full((1,), -1, device=x.device), 0.0)

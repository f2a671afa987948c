"""The outputs and features of a model on samples, and its metrics and predictions by them. `metrics.py` has the names
and directions of metrics."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedtailor._common.text import spreadsheet_cell
from fedtailor.messages import Metrics, fetched
from fedtailor.training.descent import EVALUATION_BATCH, frozen_features
from fedtailor.training.inputs import Held, Inputs
from fedtailor.training.metrics import Targets
from fedtailor.training.network import Loss, Network

ROWS = 32  # of a pass at least: products with few rows (below 16 were seen) have other last bits than with many
FEW_SAMPLES = 64  # of which all pairs are compared faster than each class is sorted
OwnMetric = Callable[[Tensor, Tensor], Any]  # a function of the user's: (outputs, targets) → a number, or None
Array = NDArray[Any]


@torch.no_grad()
def outputs(network: Network, theta: Tensor, x: Inputs, alone: bool = False) -> Tensor:
    """Compute the network's outputs on all samples in evaluation mode (dropout off, BatchNorm by its buffers); `alone`:
    not together with other clients."""
    if not alone and network.stack is not None and (found := network.stack.outputs(network, theta, x)) is not None:
        return cast(Tensor, found)
    _evaluate_at(network, theta)
    with network.precision():
        pieces = [network(padded(piece))[: len(piece)] for piece in x.split(EVALUATION_BATCH)]
    return torch.cat(pieces).to(theta.dtype) if len(x) else theta.new_empty(0, 1)


def features(network: Network, theta: Tensor, x: Inputs) -> Tensor | None:
    """Compute what enters the network's head, likewise; None if the network cannot be cut there."""
    _evaluate_at(network, theta)
    return frozen_features(network, x)


def _evaluate_at(network: Network, theta: Tensor) -> None:
    with torch.no_grad():
        network.vector.copy_(theta)
    network.module.eval()


def padded(x: Held) -> Held:
    """Repeat the last of very few samples, so that outputs do not depend on how many are measured together."""
    if not len(x) or len(x) >= ROWS:
        return x
    return x[torch.arange(ROWS, device=x.device).clamp(max=len(x) - 1)]


def targets_of(scores: Tensor, y: Tensor, multi_label: bool = False) -> Targets | None:
    """Find the kind of targets that these outputs are for; None if they do not fit, as one for each class or target."""
    if y.is_floating_point():
        fits = scores.shape == y.shape or (not multi_label and scores.numel() == y.numel())
        return None if not fits else "labels" if multi_label else "numbers"
    return "classes" if scores.dim() == 2 else None


@torch.no_grad()
def measure(
    scores: Tensor,
    y: Tensor,
    loss: Loss,
    multi_label: bool = False,
    own: OwnMetric | None = None,
    more: Mapping[str, OwnMetric] | None = None,
    fetch: Callable[[Sequence[Tensor]], list[Tensor]] = fetched,
) -> Metrics:
    """Compute all metrics that are defined for these targets, and the user's own: the one that decides, and `more` by
    name; None for the others, and for all of them without samples. Losses and metrics of the user's own see the tensors
    where they are; all others are computed on the host, to which `fetch` copies."""
    metrics = Metrics(n_samples=len(y))
    if len(y) == 0:
        return metrics
    value = loss(scores, y)
    if own is not None:
        metrics.own = _number(own(scores, y))
    values = {name: _number(metric(scores, y)) for name, metric in (more or {}).items()}
    metrics.more = {name: value for name, value in values.items() if value is not None}
    value, scores, y = fetch([value, scores, y])
    metrics.loss = float(value)
    match targets_of(scores, y, multi_label):
        case "classes":
            _measure_classes(metrics, scores, y)
        case "labels":
            _measure_labels(metrics, scores, y)
        case "numbers":
            _measure_numbers(metrics, scores, y)
    return metrics


def _number(value: Any) -> float | None:
    """Make a number of what a function of the user's returns; None if it is not defined, or no number (NaN)."""
    value = None if value is None else float(value)
    return None if value is None or np.isnan(value) else value


def _measure_classes(metrics: Metrics, scores: Tensor, y: Tensor) -> None:
    guesses = scores.argmax(1)
    labels, hits = y.numpy(), (guesses == y).numpy()
    present = np.bincount(labels, minlength=scores.shape[1])
    right = np.bincount(labels[hits], minlength=len(present))
    classes = np.flatnonzero(present)
    metrics.accuracy = float(hits.mean())
    metrics.balanced_accuracy = float(np.mean(right[classes] / present[classes]))
    metrics.f1 = _f1(right, present, np.bincount(guesses.numpy(), minlength=len(present)))
    metrics.log_loss = float(functional.nll_loss(scores.double().log_softmax(1), y))
    metrics.auc = area_under_curve(scores.double().softmax(1), y)


def _measure_labels(metrics: Metrics, scores: Tensor, y: Tensor) -> None:
    truth, guesses = y.numpy() > 0.5, (scores > 0).numpy()  # a logit above 0: more probable than not
    hits = truth == guesses
    metrics.accuracy = float(hits.mean())
    metrics.exact_match = float(hits.all(1).mean())
    metrics.f1 = _f1((truth & guesses).sum(0), truth.sum(0), guesses.sum(0))
    values = scores.double().numpy()
    areas = [_area(column, of_label) for column, of_label in zip(values.T, truth.T, strict=True)]
    defined = [area for area in areas if area is not None]
    metrics.auc = float(np.mean(defined)) if defined else None


def _measure_numbers(metrics: Metrics, scores: Tensor, y: Tensor) -> None:
    """Several targets count alike: each metric is the mean over them, as scikit-learn's are."""
    truth = y.double().numpy().reshape(len(y), -1)
    errors = scores.double().numpy().reshape(truth.shape) - truth
    spread, squared = ((truth - truth.mean(0)) ** 2).sum(0), (errors**2).sum(0)
    metrics.rmse = float(np.mean(np.sqrt(squared / len(truth))))
    metrics.mae = float(np.mean(np.abs(errors)))
    varied = np.ptp(truth, axis=0) > 0
    metrics.r2 = float(np.mean(1 - squared[varied] / spread[varied])) if varied.any() else None


def _f1(right: Array, present: Array, guessed: Array) -> float | None:
    """Compute the F1 of each class or label that is present or predicted, averaged; None if there is none."""
    seen = present + guessed > 0
    return float(np.mean(2 * right[seen] / (present + guessed)[seen])) if seen.any() else None


def area_under_curve(probabilities: Tensor, y: Tensor) -> float | None:
    """Compute the AUC of each class against the rest, averaged over the classes that are present; None below two."""
    values, labels = probabilities.cpu().numpy(), y.cpu().numpy()
    present = np.bincount(labels)
    classes = np.flatnonzero(present)
    if len(classes) < 2:
        return None
    if len(labels) <= FEW_SAMPLES and not np.isnan(values).any():
        own, of_class = present[classes], _pairs_in_order(values, labels)[classes]
        return float(np.mean(of_class / (2 * own * (len(labels) - own))))
    return float(np.mean([_area(values[:, number], labels == number) for number in classes]))


def _pairs_in_order(values: Array, labels: Array) -> Array:
    """Count twice the (positive, negative) pairs of each class that are in order, ties counting half, in all pairs at
    once: of few samples that takes a third of the time."""
    others = values[:, labels]  # of every sample (row), in the class of every sample (column)
    own = others.diagonal()
    in_order = ((own > others).astype(np.int8) + (own >= others)) * (labels[:, None] != labels)
    found: Array = np.bincount(labels, in_order.sum(0))
    return found


def _area(values: Array, positive: Array) -> float | None:
    """Compute the share of (positive, negative) pairs that are in order, ties counting half; None without pairs."""
    others, own = np.sort(values[~positive]), values[positive]
    if not len(own) or not len(others):
        return None
    below = others.searchsorted(own).sum() + others.searchsorted(own, "right").sum()  # twice the pairs in order
    return float(below / (2 * len(own) * len(others)))


def sample_scores(name: str, scores: Tensor, y: Tensor, multi_label: bool = False) -> Array | None:
    """Compute each sample's part of a metric that is a mean over samples; None for any other."""
    kind = targets_of(scores, y, multi_label)
    if name == "accuracy" and kind == "classes":
        return (scores.argmax(1) == y).double().cpu().numpy()
    if name == "accuracy" and kind == "labels":
        return ((scores > 0) == (y > 0.5)).double().mean(1).cpu().numpy()
    if name == "log_loss" and kind == "classes":
        return functional.nll_loss(scores.double().log_softmax(1), y, reduction="none").cpu().numpy()
    if name == "mae" and kind == "numbers":
        return (scores.reshape(y.shape).double() - y).abs().reshape(len(y), -1).mean(1).cpu().numpy()
    return None


@dataclass(frozen=True)
class Predictions:
    """A model's outputs on samples, samples × classes, and the names of the classes in their order."""

    outputs: Tensor
    classes: tuple[str, ...] = ()  # none for a regression
    labels: list[str] = field(default_factory=list)  # the samples' true classes, where these are known
    multi_label: bool = False  # a sample may have any of the classes

    @property
    def probabilities(self) -> Tensor:
        """The probability of each class, samples × classes."""
        return self.outputs.sigmoid() if self.multi_label else self.outputs.softmax(1)

    @property
    def predicted(self) -> list[str]:
        """The name of each sample's most probable class; of several labels, the names of those that it probably has."""
        if self.multi_label:
            return names_of((self.outputs > 0).float(), self.classes)
        return [self.classes[number] for number in self.outputs.argmax(1).tolist()] if self.classes else []

    @property
    def accuracy(self) -> float | None:
        """The share of the samples that were predicted right, if they have labels: with several, all of them."""
        if not self.labels or not self.classes:
            return None
        return sum(one == other for one, other in zip(self.predicted, self.labels, strict=True)) / len(self.labels)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample: the predicted class and its probability, or the outputs of a regression."""
        if not self.classes:
            for sample, outputs in enumerate(self.outputs.tolist()):
                yield {"sample": sample} | {f"output {number}": value for number, value in enumerate(outputs)}
            return
        rows = zip(self.predicted, self.outputs.tolist(), self.probabilities.tolist(), strict=True)
        for sample, (name, outputs, row) in enumerate(rows):
            label = {"label": self.labels[sample]} if self.labels else {}
            each = {f"p({name})": value for name, value in zip(self.classes, row, strict=True)}
            if self.multi_label:
                has = {f"has({name})": int(value > 0) for name, value in zip(self.classes, outputs, strict=True)}
                yield {"sample": sample, "prediction": name, **label, **has, **each}
            else:
                yield {"sample": sample, "prediction": name, "probability": max(row), **label, **each}

    def csv(self) -> str:
        """Write the rows as CSV with a header. A name that a spreadsheet takes for a formula gets an apostrophe."""
        text, rows = StringIO(), list(self.rows())
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: spreadsheet_cell(value) for name, value in row.items()} for row in rows)
        return text.getvalue()


def names_of(y: Tensor, classes: tuple[str, ...]) -> list[str]:
    """Name the classes of samples, all labels of one with commas between them; nothing for numbers."""
    if classes and y.is_floating_point():
        return [", ".join(name for name, has in zip(classes, row, strict=True) if has) for row in y.tolist()]
    return [classes[number] for number in y.tolist()] if classes else []

"""The metrics of a model on a client's samples: loss, accuracy, balanced accuracy and AUC."""

import numpy as np
import torch
from torch import Tensor

from fedtailor.local.descent import EVALUATION_BATCH
from fedtailor.local.inputs import Inputs
from fedtailor.local.network import Loss, Network
from fedtailor.messages import Metrics


@torch.no_grad()
def outputs(network: Network, theta: Tensor, x: Inputs) -> Tensor:
    """Compute the network's outputs on all samples in evaluation mode (dropout off, BatchNorm by its buffers)."""
    network.vector.copy_(theta)
    network.module.eval()
    with network.precision():
        pieces = [network(piece) for piece in x.split(EVALUATION_BATCH)]
    return torch.cat(pieces).to(theta.dtype) if len(x) else theta.new_empty(0, 1)


@torch.no_grad()
def measure(scores: Tensor, y: Tensor, loss: Loss) -> Metrics:
    """Compute the metrics of these outputs.

    One that is not defined is None: all of them without samples, all but the loss for a regression.
    """
    metrics = Metrics(n_samples=len(y))
    if len(y) == 0:
        return metrics
    metrics.loss = float(loss(scores, y))
    if y.is_floating_point() or scores.dim() != 2:
        return metrics
    labels, hits = y.cpu().numpy(), (scores.argmax(1) == y).cpu().numpy()
    present = np.bincount(labels)
    classes = np.flatnonzero(present)
    metrics.accuracy = float(hits.mean())
    metrics.balanced_accuracy = float(
        np.mean(np.bincount(labels[hits], minlength=len(present))[classes] / present[classes])
    )
    metrics.auc = area_under_curve(scores.double().softmax(1), y)
    return metrics


def area_under_curve(probabilities: Tensor, y: Tensor) -> float | None:
    """Compute the AUC of each class against the rest, averaged over the classes that are present; None below two.

    It is the share of (positive, negative) pairs that are in order, ties counting half.
    """
    values, labels = probabilities.cpu().numpy(), y.cpu().numpy()
    classes = np.flatnonzero(np.bincount(labels))
    if len(classes) < 2:
        return None
    areas = []
    for number in classes:
        positive = labels == number
        others, own = np.sort(values[~positive, number]), values[positive, number]
        below = others.searchsorted(own).sum() + others.searchsorted(own, "right").sum()  # twice the pairs in order
        areas.append(below / (2 * len(own) * len(others)))
    return float(np.mean(areas))

"""What is measured of a model on a client's samples: loss, accuracy, balanced accuracy and AUC."""

import torch
from torch import Tensor

from fedtailor.learning.descent import EVALUATION_BATCH, Loss
from fedtailor.learning.network import Network

Metrics = dict[str, float | None]


@torch.no_grad()
def outputs(network: Network, theta: Tensor, x: Tensor) -> Tensor:
    """The network's outputs on all samples, as it predicts (dropout off, BatchNorm by its statistics)."""
    network.vector.copy_(theta)
    network.module.eval()
    return torch.cat([network(piece) for piece in x.split(EVALUATION_BATCH)]) if len(x) else x.new_empty(0, 1)


@torch.no_grad()
def measure(scores: Tensor, y: Tensor, loss: Loss) -> Metrics:
    """The metrics of these outputs; without samples, or where one is not defined, it is None. A target that is no
    class number (regression) has a loss alone."""
    if len(y) == 0:
        return {"loss": None, "accuracy": None, "balanced_accuracy": None, "auc": None}
    metrics: Metrics = {
        "loss": float(loss(scores, y)),
        "accuracy": None,
        "balanced_accuracy": None,
        "auc": None,
    }
    if y.is_floating_point() or scores.dim() != 2:
        return metrics
    hits = (scores.argmax(1) == y).double()
    per_class = torch.zeros(scores.shape[1], dtype=torch.double, device=y.device).index_add_(0, y, hits)
    present = torch.bincount(y, minlength=scores.shape[1])
    metrics["accuracy"] = float(hits.mean())
    metrics["balanced_accuracy"] = float((per_class[present > 0] / present[present > 0]).mean())
    metrics["auc"] = area_under_curve(scores.double().softmax(1), y)
    return metrics


def area_under_curve(probabilities: Tensor, y: Tensor) -> float | None:
    """One class against the rest, averaged over the classes that are present; None with fewer than two.

    By ranks: the AUC is the share of (positive, negative) pairs that are in order, ties counting half.
    """
    present = torch.bincount(y, minlength=probabilities.shape[1])
    classes = torch.nonzero(present).flatten()
    if len(classes) < 2:
        return None
    columns = probabilities[:, classes]
    ordered = columns.sort(dim=0).values.T.contiguous()
    values = columns.T.contiguous()
    below, upto = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    ranks = (below + upto + 1).double() / 2  # the mean rank, from 1, of equal values
    positive = (y[None, :] == classes[:, None]).double()
    p = positive.sum(1)
    areas = ((ranks * positive).sum(1) - p * (p + 1) / 2) / (p * (len(y) - p))
    return float(areas.mean())

"""Data sets that are always there: UCI's handwritten digits, which scikit-learn has too, and the FedProx paper's
synthetic(α, β)."""

from pathlib import Path

import numpy as np
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data.dataset import DataInfo, Dataset, DataSets
from fedtailor.training.streams import numpy_stream

DIGITS = Path(__file__).with_name("digits.npz")  # what they are, and their licence: NOTICE
CLIENTS, FEATURES, CLASSES = 30, 60, 10


def read_digits(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read the 1,797 handwritten digits of 8×8 pixels, as float32 in [0, 1]."""
    with np.load(DIGITS) as file:
        pixels, labels = torch.from_numpy(file["pixels"]), torch.from_numpy(file["labels"])
    x = pixels[:, None].float() / 16  # pixels are 0..16
    return Dataset("digits", x, labels.long(), tuple(map(str, range(10))))


def read_synthetic(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Draw Synthetic(α, β) of Li et al. 2020 (also in LEAF): 30 clients, each with a linear model of its own.

    A client has y = argmax(W x + b) with W, b ~ N(u, 1) and u ~ N(0, α), and x ~ N(v, Σ) with v ~ N(B, 1),
    B ~ N(0, β) and Σ = diag(j^-1.2): α says how much models differ between clients, β how much features do.
    As in the authors' code α and β are standard deviations, and client sizes are 50 plus a log-normal number.
    Always the same draw.
    """
    alpha, beta = _parameters(variant or "0.5:0.5")
    rng = numpy_stream(0, "synthetic")
    sizes = 50 + rng.lognormal(4, 2, CLIENTS).astype(np.int64)
    deviation = np.arange(1, FEATURES + 1) ** -0.6
    xs, ys = [], []
    for size in sizes:
        u, b = alpha * rng.standard_normal(), beta * rng.standard_normal()
        weight = rng.normal(u, 1, (FEATURES, CLASSES))
        bias = rng.normal(u, 1, CLASSES)
        x = rng.normal(b, 1, FEATURES) + deviation * rng.standard_normal((size, FEATURES))
        xs.append(x)
        ys.append((x @ weight + bias).argmax(axis=1))
    return Dataset(
        name=f"synthetic:{alpha:g}:{beta:g}",
        x=torch.from_numpy(np.concatenate(xs)).float(),
        y=torch.from_numpy(np.concatenate(ys)),
        classes=tuple(map(str, range(CLASSES))),
        client=torch.from_numpy(np.repeat(np.arange(CLIENTS), sizes)),
        client_names=tuple(map(str, range(CLIENTS))),
    )


def _parameters(variant: str) -> tuple[float, float]:
    try:
        alpha, beta = map(float, variant.split(":"))
    except ValueError:
        alpha = beta = -1.0
    if not (0 <= alpha < float("inf") and 0 <= beta < float("inf")):
        raise FedtailorError(f"'synthetic:{variant}' needs two numbers from 0: write for example 'synthetic:0.5:0.5'.")
    return alpha, beta


DATA_SETS: DataSets = (
    (DataInfo("digits", "handwritten digits, 8×8 grey (UCI)", 10, bundled=True), read_digits),
    (
        DataInfo("synthetic", "linear models that differ by client", 10, bundled=True, variants="ALPHA:BETA"),
        read_synthetic,
    ),
)

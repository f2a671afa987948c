"""The catalogue of networks: the papers' own, as plain Sequentials for any input shape and number of classes, and those
for sequences. Any `nn.Module` of the user's own can stand for one of them.

Pooling comes before ReLU: max-pooling and ReLU commute, and this order does a quarter of the ReLU's work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.imports import import_object
from fedtailor.models import sequences
from fedtailor.models.own import build_own
from fedtailor.training.inputs import Shape, shape_words
from fedtailor.training.streams import torch_seed

ModelLike = str | nn.Module | Callable[..., nn.Module]
DIMENSIONS = {"images": (3,), "windows": (2,), "sequences": (1, 2)}  # of a sample; tokens have one
MOST_TOKENS = 1_000_000


def logistic(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(shape: Shape, classes: int, *widths: int) -> nn.Module:
    """Dense layers with ReLU between them; one of 200 units, as PFLEGO's for the MNIST family, if none are given."""
    sizes = [prod(shape), *(widths or (200,))]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn(shape: Shape, classes: int) -> nn.Module:
    """The FedAvg CNN, as PGFed uses it: 878,538 parameters on CIFAR-10."""
    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    )
    return _then_dense(convolutions, shape, 512, classes)


def lenet(shape: Shape, classes: int) -> nn.Module:
    """The LeNet-like network of pFedMB: convolutions of 6 and 16 maps, dense layers of 120 and 84."""
    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
    )
    return _then_dense(convolutions, shape, 120, 84, classes)


def pflego_cnn(shape: Shape, classes: int) -> nn.Module:
    """PFLEGO's network for CIFAR-10: two convolutions of 64 maps, dense layers of 384 and 192.

    Its pools halve an image, 32 to 16 to 8, as those of the release do: the last window of a row reaches over the edge
    by one ("SAME" in TensorFlow, for an even size), where nothing counts. That is PyTorch's ceil_mode.
    """
    convolutions = nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 5, padding="same"), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()),
        *(nn.Conv2d(64, 64, 5, padding="same"), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()),
        nn.Flatten(),
    )
    return _then_dense(convolutions, shape, 384, 192, classes)


def omniglot_cnn(shape: Shape, classes: int) -> nn.Module:
    """PFLEGO's network for Omniglot: four convolutions of 64 maps, each halved by pooling, and the head."""
    layers: list[nn.Module] = []
    for channels in (shape[0], 64, 64, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU()]
    return _then_dense(nn.Sequential(*layers, nn.Flatten()), shape, classes)


def resnet(shape: Shape, classes: int) -> nn.Module:
    """A small residual network with BatchNorm: a stem and three blocks of 16, 32 and 64 maps (ResNet-8)."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)),
    )


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def _then_dense(convolutions: nn.Sequential, shape: Shape, *widths: int) -> nn.Sequential:
    """Append dense layers to convolutions; their input size is what these give for an image of this shape."""
    with torch.no_grad():
        device = next(convolutions.parameters()).device
        features = convolutions(torch.zeros(1, *shape, device=device)).shape[1]
    sizes = [features, *widths]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*convolutions, *layers[:-1])


# --- by name ---


@dataclass(frozen=True)
class ModelInfo:
    """A network of the catalogue."""

    name: str
    description: str
    build: Callable[..., nn.Module]
    samples: Literal["any", "images", "sequences", "windows"] = "images"
    widths: int | None = 0  # at most so many can be given; None: any number

    def fits(self, shape: Shape, tokens: int | None = None) -> bool:
        """Find out whether the network takes samples of this shape; those of one dimension may be tokens."""
        if any(isinstance(part, tuple) for part in shape):  # of several inputs
            return False
        if self.samples == "sequences" and len(shape) == 1:
            return tokens is not None and tokens <= MOST_TOKENS
        return self.samples == "any" or len(shape) in DIMENSIONS[self.samples]


CATALOGUE: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        ModelInfo("mlp", "one dense layer of 200 units (PFLEGO); mlp:300,100 for other widths", mlp, "any", None),
        ModelInfo("logistic", "logistic regression", logistic, "any"),
        ModelInfo("cnn", "the FedAvg CNN: conv 32, conv 64, dense 512 (PGFed)", cnn),
        ModelInfo("lenet", "conv 6, conv 16, dense 120, 84 (pFedMB)", lenet),
        ModelInfo("pflego-cnn", "conv 64, conv 64, dense 384, 192 (PFLEGO on CIFAR-10)", pflego_cnn),
        ModelInfo("omniglot-cnn", "four convolutions of 64 (PFLEGO on Omniglot)", omniglot_cnn),
        ModelInfo("resnet", "a small residual network with BatchNorm (ResNet-8)", resnet),
        ModelInfo("gru", "tokens or windows: one GRU layer of 128 units; gru:64", sequences.gru, "sequences", 1),
        ModelInfo(
            "cnn1d", "windows: convolutions of 64 and 64, mean over time; cnn1d:32,64", sequences.cnn1d, "windows", None
        ),
        ModelInfo(
            "transformer",
            "tokens or windows: two blocks of attention, 4 heads, width 64; transformer:128",
            sequences.transformer,
            "sequences",
            1,
        ),
    )
}


def build_model(
    model: ModelLike, shape: Shape, classes: int, seed: int, device: str = "cpu", tokens: int | None = None
) -> nn.Module:
    """Build the network for inputs of this shape and so many classes, initialised from the seed.

    `shape` is a tuple of shapes where samples have several inputs. `tokens` is the size of the vocabulary, where
    samples are whole numbers. `model` is a name of the catalogue (with `:widths` for the MLP), a `module:Class` or
    callable (see `own` for how it is called), or a module, which is copied. On the device `meta`, the network has
    no values and takes no memory.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):  # the same initial vector for every device
        start = torch_seed(seed, "model")
        torch.manual_seed(start)
        if not isinstance(model, str):
            return build_own(model, shape, classes, tokens, start)[0]
        name, _, argument = model.partition(":")
        if name not in CATALOGUE:
            if not argument:
                raise unknown("model", model, CATALOGUE)
            return build_own(import_object(model, "model"), shape, classes, tokens, start)[0]
        info = CATALOGUE[name]
        if not info.fits(shape, tokens):
            raise _misfit(info, shape, tokens)
        widths = _widths(info, argument) if argument else []
        vocabulary = {"tokens": tokens} if info.samples == "sequences" and len(shape) == 1 else {}
        try:
            return info.build(shape, classes, *widths, **vocabulary)
        except RuntimeError:
            raise FedtailorError(
                f"The model {info.name} needs larger images than {shape[1]}×{shape[2]}: take mlp, logistic or resnet."
            ) from None


def wants_tokens(model: ModelLike) -> bool:
    """Find out whether a network is built for a number of token values: any but those of the catalogue for other
    samples."""
    info = CATALOGUE.get(model.partition(":")[0]) if isinstance(model, str) else None
    return info is None or info.samples == "sequences"


def import_lines(name: str, shape: Shape, classes: int, tokens: int | None = None) -> tuple[str, str]:
    """Write the line that imports the network of this name, and the expression that builds it."""
    module, _, attribute = name.partition(":")
    if module in CATALOGUE:
        more = "" if tokens is None else f", tokens={tokens}"
        return "from fedtailor.models import build_model", f"build_model({name!r}, {shape}, {classes}, 0{more})"
    if module in ("object", "__main__"):
        return "...", f"{attribute}(...)"  # nobody else knows where it is
    try:
        with torch.random.fork_rng(devices=[]):
            _, call = build_own(import_object(name, "model"), shape, classes, tokens, 0)
    except FedtailorError:  # it was made elsewhere than in this module, or cannot be made again
        call = "(...)"
    return f"from {module} import {attribute.partition('.')[0]}", f"{attribute}{call}"


def _widths(info: ModelInfo, argument: str) -> list[int]:
    """Read the widths behind a network's name."""
    try:
        widths = [int(word) for word in argument.split(",")]
    except ValueError:
        widths = [0]
    too_many = info.widths is not None and len(widths) > info.widths
    if too_many or min(widths) < 1 or (info.name == "transformer" and widths[0] % sequences.HEADS):
        raise FedtailorError(
            f"The model '{info.name}:{argument}' is not understood: only mlp and cnn1d take widths, whole numbers "
            "above 0 as in mlp:300,100, gru one width, and transformer one that is a multiple of 4."
        )
    return widths


def _misfit(info: ModelInfo, shape: Shape, tokens: int | None) -> FedtailorError:
    """Say why a network does not take such samples."""
    if any(isinstance(part, tuple) for part in shape):
        return FedtailorError(
            f"The model {info.name} takes one input, but the samples have {len(shape)}: give a network of your own."
        )
    if info.samples == "images":
        return FedtailorError(
            f"The model {info.name} is for images, but the samples have the shape {shape}: take mlp or logistic."
        )
    as_tokens = info.samples == "sequences" and len(shape) == 1
    if as_tokens and tokens is not None:
        return FedtailorError(
            f"The tokens go up to {tokens - 1}, more than a vocabulary has: number the different ones 0, 1, 2, …."
        )
    wanted = "windows (channels, length) of values"
    wanted += " or tokens (length) that are whole numbers from 0" if info.samples == "sequences" else ""
    return FedtailorError(
        f"The model {info.name} is for sequences, {wanted}, but the samples have the shape {shape_words(shape)}"
        f"{' and are not such tokens' if as_tokens else ''}: take mlp or logistic, or give them another shape."
    )

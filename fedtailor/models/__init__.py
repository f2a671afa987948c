"""The catalogue of networks. Any `nn.Module` of the user's own can stand for one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.imports import import_object
from fedtailor.models import networks, sequences
from fedtailor.models.own import build_own, is_several
from fedtailor.training.inputs import Shape, shape_words
from fedtailor.training.streams import torch_seed

DIMENSIONS = {"images": (3,), "windows": (2,), "sequences": (1, 2)}  # of a sample; tokens have one


@dataclass(frozen=True)
class ModelInfo:
    """A network of the catalogue."""

    name: str
    description: str
    build: Callable[..., nn.Module]
    samples: Literal["any", "images", "sequences", "windows"] = "images"
    widths: int | None = 0  # at most so many can be given; None: any number

    def fits(self, shape: Shape) -> bool:
        """Find out whether the network takes samples of this shape."""
        return self.samples == "any" or len(shape) in DIMENSIONS[self.samples]


CATALOGUE: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        ModelInfo(
            "mlp", "one dense layer of 200 units (PFLEGO); mlp:300,100 for other widths", networks.mlp, "any", None
        ),
        ModelInfo("logistic", "logistic regression", networks.logistic, "any"),
        ModelInfo("cnn", "the FedAvg CNN: conv 32, conv 64, dense 512 (PGFed)", networks.cnn),
        ModelInfo("lenet", "conv 6, conv 16, dense 120, 84 (pFedMB)", networks.lenet),
        ModelInfo("pflego-cnn", "conv 64, conv 64, dense 384, 192 (PFLEGO on CIFAR-10)", networks.pflego_cnn),
        ModelInfo("omniglot-cnn", "four convolutions of 64 (PFLEGO on Omniglot)", networks.omniglot_cnn),
        ModelInfo("resnet", "a small residual network with BatchNorm (ResNet-8)", networks.resnet),
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

ModelLike = str | nn.Module | Callable[..., nn.Module]


MOST_TOKENS = 1_000_000


def build_model(
    model: ModelLike, shape: Shape, classes: int, seed: int, device: str = "cpu", tokens: int | None = None
) -> nn.Module:
    """Build the network for inputs of this shape and so many classes, initialised from the seed.

    `shape` is a tuple of shapes where samples have several inputs. `tokens` is the size of the vocabulary, where
    samples are whole numbers. `model` is a name of the catalogue (with `:widths` for the MLP), a `module:Class` or
    callable (see `building` for how it is called), or a module, which is copied. On the device `meta`, the network has
    no values and takes no memory.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):  # the same initial vector for every device
        start = torch_seed(seed, "model")
        torch.manual_seed(start)
        if not isinstance(model, str):
            return build_own(model, shape, classes, tokens, start)[0]
        name, _, argument = model.partition(":")
        if name in CATALOGUE:
            return _build_known(CATALOGUE[name], argument, shape, classes, tokens)
        if argument:
            return build_own(import_object(model, "model"), shape, classes, tokens, start)[0]
        raise unknown("model", model, CATALOGUE)


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


def _build_known(info: ModelInfo, argument: str, shape: Shape, classes: int, tokens: int | None) -> nn.Module:
    _check_shape(info, shape, tokens)
    widths: list[int] = []
    if argument:
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
    vocabulary = {"tokens": tokens} if info.samples == "sequences" and len(shape) == 1 else {}
    try:
        return info.build(shape, classes, *widths, **vocabulary)
    except RuntimeError:
        raise FedtailorError(
            f"The model {info.name} needs larger images than {shape[1]}×{shape[2]}: take mlp, logistic or resnet."
        ) from None


def _check_shape(info: ModelInfo, shape: Shape, tokens: int | None) -> None:
    """Refuse samples of another kind than a network of the catalogue takes."""
    if is_several(shape):
        raise FedtailorError(
            f"The model {info.name} takes one input, but the samples have {len(shape)}: give a network of your own."
        )
    if info.samples == "images" and not info.fits(shape):
        raise FedtailorError(
            f"The model {info.name} is for images, but the samples have the shape {shape}: take mlp or logistic."
        )
    as_tokens = info.samples == "sequences" and len(shape) == 1
    if not info.fits(shape) or (as_tokens and tokens is None):
        wanted = "windows (channels, length) of values"
        wanted += " or tokens (length) that are whole numbers from 0" if info.samples == "sequences" else ""
        raise FedtailorError(
            f"The model {info.name} is for sequences, {wanted}, but the samples have the shape {shape_words(shape)}"
            f"{' and are not such tokens' if as_tokens else ''}: take mlp or logistic, or give them another shape."
        )
    if as_tokens and tokens is not None and tokens > MOST_TOKENS:
        raise FedtailorError(
            f"The tokens go up to {tokens - 1}, more than a vocabulary has: number the different ones 0, 1, 2, …."
        )

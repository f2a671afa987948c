"""The catalogue of networks. Any `nn.Module` of the user's own can stand for one of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedtailor.errors import FedtailorError, unknown
from fedtailor.imports import import_object
from fedtailor.local.streams import torch_seed
from fedtailor.models import networks
from fedtailor.models.building import build_own


@dataclass(frozen=True)
class ModelInfo:
    """A network of the catalogue."""

    name: str
    description: str
    build: Callable[..., nn.Module]
    images: bool = True  # needs (channels, height, width)


CATALOGUE: dict[str, ModelInfo] = {
    info.name: info
    for info in (
        ModelInfo("mlp", "one dense layer of 200 units (PFLEGO); mlp:300,100 for other widths", networks.mlp, False),
        ModelInfo("logistic", "logistic regression", networks.logistic, False),
        ModelInfo("cnn", "the FedAvg CNN: conv 32, conv 64, dense 512 (PGFed)", networks.cnn),
        ModelInfo("lenet", "conv 6, conv 16, dense 120, 84 (pFedMB)", networks.lenet),
        ModelInfo("pflego-cnn", "conv 64, conv 64, dense 384, 192 (PFLEGO on CIFAR-10)", networks.pflego_cnn),
        ModelInfo("omniglot-cnn", "four convolutions of 64 (PFLEGO on Omniglot)", networks.omniglot_cnn),
        ModelInfo("resnet", "a small residual network with BatchNorm (ResNet-8)", networks.resnet),
    )
}

ModelLike = str | nn.Module | Callable[..., nn.Module]


def build_model(
    model: ModelLike,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    device: str = "cpu",
    tokens: int | None = None,
) -> nn.Module:
    """Build the network for inputs of this shape and so many classes, initialised from the seed.

    `model` is a name of the catalogue (with `:widths` for the MLP), a `module:Class` or callable (see `building` for
    how it is called), or a module, which is copied. `tokens` is the size of the vocabulary, where inputs are tokens. On
    the device `meta`, the network has no values and takes no memory.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):  # the same initial vector for every device
        start = torch_seed(seed, "model")
        torch.manual_seed(start)
        if not isinstance(model, str):
            return build_own(model, shape, classes, tokens, start)[0]
        name, _, argument = model.partition(":")
        if name in CATALOGUE:
            return _build_known(CATALOGUE[name], argument, shape, classes)
        if argument:
            return build_own(import_object(model, "model"), shape, classes, tokens, start)[0]
        raise unknown("model", model, CATALOGUE)


def import_lines(name: str, shape: tuple[int, ...], classes: int, tokens: int | None = None) -> tuple[str, str]:
    """Write the line that imports the network of this name, and the expression that builds it."""
    module, _, attribute = name.partition(":")
    if module in CATALOGUE:
        return "from fedtailor.models import build_model", f"build_model({name!r}, {shape}, {classes}, 0)"
    if module in ("object", "__main__"):
        return "...", f"{attribute}(...)"  # nobody else knows where it is
    try:
        with torch.random.fork_rng(devices=[]):
            _, call = build_own(import_object(name, "model"), shape, classes, tokens, 0)
    except FedtailorError:  # it was made elsewhere than in this module, or cannot be made again
        call = "(...)"
    return f"from {module} import {attribute.partition('.')[0]}", f"{attribute}{call}"


def _build_known(info: ModelInfo, argument: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    if info.images and len(shape) != 3:
        raise FedtailorError(
            f"The model {info.name} is for images, but the samples have the shape {shape}: take mlp or logistic."
        )
    widths: list[int] = []
    if argument:
        try:
            widths = [int(word) for word in argument.split(",")]
        except ValueError:
            widths = [0]
        if info.name != "mlp" or min(widths) < 1:
            raise FedtailorError(
                f"The model '{info.name}:{argument}' is not understood: only mlp takes widths, whole numbers above 0 "
                "as in mlp:300,100."
            )
    try:
        return info.build(shape, classes, *widths)
    except RuntimeError:
        raise FedtailorError(
            f"The model {info.name} needs larger images than {shape[1]}×{shape[2]}: take mlp, logistic or resnet."
        ) from None

"""The catalogue of networks. Any `nn.Module` of the user's own can stand for one of them."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedtailor.errors import FedtailorError, brief, unknown
from fedtailor.imports import import_object
from fedtailor.local.streams import torch_seed
from fedtailor.models import networks


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


def build_model(model: ModelLike, shape: tuple[int, ...], classes: int, seed: int, device: str = "cpu") -> nn.Module:
    """Build the network for inputs of this shape and so many classes, initialised from the seed.

    `model` is a name of the catalogue (with `:widths` for the MLP), a `module:Class` or callable, or a module, which is
    copied. A callable is called with the input shape and the number of classes if it takes them, else with nothing.
    On the device `meta`, it has no values and takes no memory.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):  # the same initial vector for every device
        torch.manual_seed(torch_seed(seed, "model"))
        if not isinstance(model, str):
            return _build_own(model, shape, classes)
        name, _, argument = model.partition(":")
        if name in CATALOGUE:
            return _build_known(CATALOGUE[name], argument, shape, classes)
        if argument:
            return _build_own(import_object(model, "model"), shape, classes)
        raise unknown("model", model, CATALOGUE)


def import_lines(name: str, shape: tuple[int, ...], classes: int) -> tuple[str, str]:
    """Write the line that imports the network of this name, and the expression that builds it."""
    module, _, attribute = name.partition(":")
    if module in CATALOGUE:
        return "from fedtailor.models import build_model", f"build_model({name!r}, {shape}, {classes}, 0)"
    if module in ("object", "__main__"):
        return "...", f"{attribute}(...)"  # nobody else knows where it is
    found = import_object(name, "model")
    made = "" if isinstance(found, nn.Module) else f"({shape}, {classes})" if _takes(found, shape, classes) else "()"
    return f"from {module} import {attribute.partition('.')[0]}", f"{attribute}{made}"


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


def _build_own(factory: Any, shape: tuple[int, ...], classes: int) -> nn.Module:
    if isinstance(factory, nn.Module):
        return _materialised(_copied(factory), shape)
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        arguments: tuple[Any, ...] = (shape, classes) if _takes(factory, shape, classes) else ()
        module = factory(*arguments)
    except Exception as error:  # whatever the user's code does
        both, failed = f"{name}({shape}, {classes}), with the input shape and the number of classes,", brief(error)
        tried = f"{both} failed ({failed})" if arguments else f"it does not take {both} and {name}() failed ({failed})"
        raise FedtailorError(f"The model {name} cannot be built: {tried}.") from error
    if not isinstance(module, nn.Module):
        raise FedtailorError(f"The model {name} made a {type(module).__name__}, not an nn.Module.")
    return _materialised(module, shape)


def _copied(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # some modules cannot be copied, as nn.LazyBatchNorm1d
        raise FedtailorError(
            f"The model cannot be copied ({brief(error)}): give a function that makes it, as model=lambda: …."
        ) from error


def _materialised(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Give lazy layers (`nn.LazyLinear`) the sizes and initial values that they have for samples of this shape."""
    if not any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return module
    training = module.training
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(2, *shape))
    except Exception as error:  # whatever the user's code does
        size = "×".join(map(str, shape))
        raise FedtailorError(
            f"The model's lazy layers do not fit samples of the shape {size} ({brief(error)})."
        ) from error
    return module.train(training)


def _takes(factory: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(factory).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True

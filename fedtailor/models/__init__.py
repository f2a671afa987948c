"""The catalogue of networks. Any `nn.Module` of the user's own can stand for one of them."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedtailor.errors import FedtailorError, brief, unknown
from fedtailor.imports import import_object
from fedtailor.local.inputs import Shape, shape_words
from fedtailor.local.streams import torch_seed
from fedtailor.models import networks, sequences

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

    `shape` is a tuple of shapes where samples have several inputs. `tokens` is the number of token values, where
    samples are whole numbers.
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
            return _build_known(CATALOGUE[name], argument, shape, classes, tokens)
        if argument:
            return _build_own(import_object(model, "model"), shape, classes)
        raise unknown("model", model, CATALOGUE)


def wants_tokens(model: ModelLike) -> bool:
    """Find out whether a network of the catalogue is built for a number of token values."""
    info = CATALOGUE.get(model.partition(":")[0]) if isinstance(model, str) else None
    return info is not None and info.samples == "sequences"


def takes_integers(module: nn.Module) -> bool:
    """Find out whether a network has an embedding, which takes whole numbers."""
    return any(isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) for layer in module.modules())


def import_lines(name: str, shape: Shape, classes: int, tokens: int | None = None) -> tuple[str, str]:
    """Write the line that imports the network of this name, and the expression that builds it."""
    module, _, attribute = name.partition(":")
    if module in CATALOGUE:
        more = "" if tokens is None else f", tokens={tokens}"
        return "from fedtailor.models import build_model", f"build_model({name!r}, {shape}, {classes}, 0{more})"
    if module in ("object", "__main__"):
        return "...", f"{attribute}(...)"  # nobody else knows where it is
    found = import_object(name, "model")
    made = "" if isinstance(found, nn.Module) else f"({shape}, {classes})" if _takes(found, shape, classes) else "()"
    return f"from {module} import {attribute.partition('.')[0]}", f"{attribute}{made}"


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
    if any(isinstance(part, tuple) for part in shape):
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


def _build_own(factory: Any, shape: Shape, classes: int) -> nn.Module:
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


def _materialised(module: nn.Module, shape: Shape) -> nn.Module:
    """Give lazy layers (`nn.LazyLinear`) the sizes and initial values that they have for samples of this shape."""
    if not any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return module
    training = module.training
    try:
        with torch.no_grad():
            several = any(isinstance(part, tuple) for part in shape)
            dtype = torch.int64 if takes_integers(module) else None
            module.eval()(*(torch.zeros(2, *part, dtype=dtype) for part in (shape if several else (shape,))))
    except Exception as error:  # whatever the user's code does
        raise FedtailorError(
            f"The model's lazy layers do not fit samples of the shape {shape_words(shape)} ({brief(error)})."
        ) from error
    return module.train(training)


def _takes(factory: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(factory).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True

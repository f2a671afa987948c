"""From a module to the network of a run: its head, pretrained weights, frozen parts and adapters, in this order."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor.models.lora import LoRA, add_adapters
from fedtailor.training.inputs import Held
from fedtailor.training.layers import copied, find_head, freeze, freeze_body, owner, trained_layers
from fedtailor.training.network import Network
from fedtailor.training.streams import torch_seed

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")  # files of weights that are refused
OPTIONAL = "num_batches_tracked"  # a counter, which older files lack


@dataclass(frozen=True)
class Loaded:
    """The tensors that were loaded from a file, and those of the head that were left as initialised."""

    file: str
    sha256: str
    names: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        rest = f"; initialised: {listed(self.left)}" if self.left else ""
        return f"{len(self.names)} tensors loaded from {self.file}{rest}"


@dataclass(frozen=True)
class Assembled:
    """A network as every site begins with it: its module, the layers of its head, and what was done to it."""

    module: nn.Module
    head: list[str]
    loaded: Loaded | None = None
    lora: LoRA | None = None
    adapted: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # what the user should know, in sentences
    sizes: tuple[int | None, int | None] = (None, None)  # the numbers of features and of outputs
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # that the method trains beside the network

    def network(self) -> Network:
        """Make the vector view of a copy."""
        first = next(self.module.parameters())
        pretrained = self.loaded.names if self.loaded else ()
        module, head = copied(self.module), list(self.head)
        return Network(module, head, first.device, first.dtype, None, pretrained, self.extra, self.sizes)


def assemble(
    module: nn.Module,
    head: int | str,
    example: Held,
    *,
    weights: str | None = None,
    frozen: str | None = None,
    lora: int | str | None = None,
    seed: int = 0,
) -> Assembled:
    """Find the head of a network, load its pretrained weights, freeze parts of it and add adapters."""
    parts = [part.strip() for part in (frozen or "").split(",") if part.strip()]
    for part in parts:
        if part != "body":  # which is known when the head is
            freeze(module, part)
    doubts: list[str] = []
    names = find_head(module, head, example, doubts.append)
    loaded = load_weights(module, weights, names) if weights is not None else None
    adapters, adapted = None, list[str]()
    if lora is not None:
        if "body" in parts:
            raise FedtailorError("LoRA freezes the body already, but for its adapters: leave --frozen body out.")
        adapters = LoRA.parse(lora)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "adapters"))
            adapted = add_adapters(module, adapters, names, example, doubts.append)
    elif "body" in parts:
        freeze_body(module, names)
    trained = trained_layers(module)
    head_names = [name for name in names if name in trained]
    return Assembled(module, head_names, loaded, adapters, tuple(adapted), tuple(doubts))


# --- pretrained weights ---


@torch.no_grad()
def load_weights(module: nn.Module, file: str, head: Sequence[str]) -> Loaded:
    """Load the tensors of a safetensors file into a network with the same names. `head` names the layers of the head.

    What fits by name and shape is loaded. The head may be of another size, or missing, and is then left as initialised.
    Everything else that does not fit is refused by its name: a body that is pretrained in part is seldom meant.
    """
    path = _checked(Path(file))
    state = module.state_dict(keep_vars=True)
    try:
        with safe_open(path, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            fitting = _fitting(path, state, shapes, head)
            for name in fitting:
                state[name].copy_(tensors.get_tensor(name))
        names = _aliases(state, fitting)
        with path.open("rb") as content:
            checksum = file_digest(content, "sha256").hexdigest()
    except FedtailorError:
        raise
    except OSError as error:
        raise FedtailorError(f"The weights {path} cannot be read: {error.strerror or error}.") from None
    except Exception:  # a damaged file can make its parser raise anything
        raise FedtailorError(f"The weights {path} are no safetensors file, or a damaged one: make it anew.") from None
    return Loaded(file, checksum, tuple(names), tuple(name for name in state if name not in names))


def _aliases(state: dict[str, Tensor], names: Collection[str]) -> list[str]:
    """List all names of these tensors: a shared one has several, and files often have but one of them."""
    there = {id(state[name]) for name in names if name in state}
    return [name for name, tensor in state.items() if id(tensor) in there]


def _checked(path: Path) -> Path:
    if path.suffix in PICKLES:
        made = path.with_suffix(".safetensors").name
        raise FedtailorError(
            f"The weights {path} are a pickle, which can run code when it is read: if you trust it, convert it once, "
            f"with safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), {made!r})."
        )
    if not path.is_file():
        raise FedtailorError(f"There is no file {path} of weights: give a safetensors file.")
    return path


def _fitting(
    path: Path, state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], head: Sequence[str]
) -> list[str]:
    """List the tensors that are loaded; refuse a file that does not fit."""
    own = {name: owner(name) in head for name in state}  # is it of the head?
    if unknown := [name for name in shapes if name not in state]:
        raise FedtailorError(
            f"The weights {path} have {shown(unknown[0])}, which the network does not ({len(unknown)} of "
            f"{len(shapes)} such names): its own begin with {listed(list(state)[:3])}; rename or remove them."
        )
    given = _aliases(state, shapes)
    if missing := [name for name in state if name not in given and not own[name] and not name.endswith(OPTIONAL)]:
        raise FedtailorError(
            f"The weights {path} lack {missing[0]!r} of the network's body ({len(missing)} such names): add them, or "
            "name new layers as the head."
        )
    unfit = [name for name in shapes if shapes[name] != tuple(state[name].shape)]
    if wrong := [name for name in unfit if not own[name]]:
        there, here = ("×".join(map(str, shape)) for shape in (shapes[wrong[0]], state[wrong[0]].shape))
        raise FedtailorError(
            f"The tensor {wrong[0]!r} of the weights {path} has the shape {there}, but the network's has {here}: only "
            "the head may differ."
        )
    fitting = [name for name in shapes if name not in unfit]
    if not fitting:
        raise FedtailorError(f"Nothing in the weights {path} fits the network.")
    return fitting

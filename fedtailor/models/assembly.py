"""From a module to the network of a run: its head, pretrained weights, frozen parts and adapters, in this order."""

from dataclasses import dataclass

import torch
from torch import nn

from fedtailor._common.errors import FedtailorError
from fedtailor.models.lora import LoRA, add_adapters
from fedtailor.models.weights import Loaded, load_weights
from fedtailor.training.inputs import Held
from fedtailor.training.layers import copied, find_head, freeze, freeze_body, layers_of, trained_layers
from fedtailor.training.network import Network
from fedtailor.training.streams import torch_seed


@dataclass(frozen=True)
class Assembled:
    """A network as every site begins with it: its module, the layers of its head, and what was done to it."""

    module: nn.Module
    head: list[str]
    loaded: Loaded | None = None
    lora: LoRA | None = None
    adapted: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # what the user should know, in sentences

    def network(self) -> Network:
        """Make the vector view of a copy."""
        first = next(self.module.parameters())
        pretrained = self.loaded.names if self.loaded else ()
        return Network(copied(self.module), list(self.head), first.device, first.dtype, pretrained=pretrained)


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
    freeze(module, [part for part in parts if part != "body"])
    _trained(module)
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
    trained = _trained(module)
    head_names = [name for name in names if name in trained]
    return Assembled(module, head_names, loaded, adapters, tuple(adapted), tuple(doubts))


def _trained(module: nn.Module) -> list[str]:
    """List the layers that are trained; there must be some."""
    trained = trained_layers(layers_of(module))
    if not trained:
        raise FedtailorError("The network has no trained parameters: freeze less of it, or set a head.")
    return trained

"""LoRA: linear layers with a frozen weight and a small trained difference (Hu et al. 2022).

W x + (α/r) B A x, with A of r rows and B of r columns. B begins as zero, so a network with adapters begins as the
network that it was; A begins as a linear layer's weight does. State dicts have the sum W + (α/r) B A as the weight:
they are those of the plain network.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor._common.errors import FedtailorError, listed, shown, warn
from fedtailor.training.inputs import Held, apply
from fedtailor.training.layers import Say, copied, freeze_body, within

MOST_RANK = 10_000


@dataclass(frozen=True)
class LoRA:
    """The settings of adapters: their rank, the factor α, and the submodules whose linear layers get them."""

    rank: int
    alpha: float
    layers: tuple[str, ...] = ()  # none: the whole body

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}"

    @classmethod
    def parse(cls, text: int | str) -> "LoRA":
        """Read `8`, or `8,alpha=16,layers=encoder,decoder.0`."""
        settings, _, names = str(text).partition("layers=")
        words = [word.strip() for word in settings.split(",") if word.strip()]
        rank, *others = words or [""]
        try:
            known = dict(word.split("=") for word in others)
            made = cls(int(rank), float(known.pop("alpha", rank)), tuple(n.strip() for n in names.split(",") if n))
            if known or not 1 <= made.rank <= MOST_RANK or not 0 < made.alpha < math.inf:
                raise ValueError
        except ValueError:
            raise FedtailorError(
                f"The setting 'lora' is {shown(text)}, but it must be a rank, as 8, or 8,alpha=16,layers=encoder."
            ) from None
        return made


class LoRALinear(nn.Linear):
    """A linear layer with an adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    @staticmethod
    def adapt(layer: nn.Linear, lora: LoRA) -> None:
        """Give a frozen layer an adapter, in place: it stays the object that the network knows."""
        layer.__class__ = LoRALinear
        assert isinstance(layer, LoRALinear)
        layer.scale = lora.alpha / lora.rank
        layer.lora_A = nn.Parameter(layer.weight.new_empty(lora.rank, layer.in_features))
        layer.lora_B = nn.Parameter(layer.weight.new_empty(layer.out_features, lora.rank))
        layer.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        change = functional.linear(functional.linear(x, self.lora_A), self.lora_B)
        return super().forward(x) + self.scale * change

    def merged(self) -> Tensor:
        """Compute the weight of the plain layer that this one stands for."""
        return torch.addmm(self.weight, self.lora_B, self.lora_A, alpha=self.scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.merged().detach()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.detach()


def add_adapters(module: nn.Module, lora: LoRA, head: Sequence[str], example: Held, say: Say = warn) -> list[str]:
    """Give linear layers outside the head adapters, and freeze all else there; return the names of these layers.

    Frozen layers get none, nor do those that the network does not call: `nn.MultiheadAttention` uses the weights of its
    projections without them.
    """
    for part in lora.layers:
        if not any(within(name, [part]) for name, _ in module.named_modules()):
            raise FedtailorError(f"The network has no layer {part!r} for adapters; it has {listed(_names(module))}.")
    chosen = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
        and name not in head
        and (not lora.layers or within(name, lora.layers))
        and layer.weight.requires_grad
    }
    called = _called(module, list(chosen), example)
    if skipped := [*(name for name in chosen if name not in called), *_packed(module, lora.layers)]:
        say(f"These projections get no adapters, as the network uses their weights without them: {listed(skipped)}.")
    if not called:
        raise FedtailorError(
            "There is no nn.Linear to adapt outside the head: name other layers in lora, or leave it out."
        )
    _check_own(module, called)
    freeze_body(module, head)
    for name in called:
        LoRALinear.adapt(chosen[name], lora)
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.register_forward_pre_hook(_by_its_layers)
    return called


def plain(module: nn.Module) -> nn.Module:
    """Return the network without adapters that computes the same; a network that has none, as it is."""
    if not any(isinstance(layer, LoRALinear) for layer in module.modules()):
        return module
    module = copy.deepcopy(module)
    for layer in module.modules():
        if isinstance(layer, LoRALinear):
            layer.weight.data = layer.merged().detach()
            del layer.lora_A, layer.lora_B, layer.scale
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        for key, hook in list(layer._forward_pre_hooks.items()):
            if hook is _by_its_layers:
                del layer._forward_pre_hooks[key]
    return module


def _by_its_layers(layer: nn.Module, inputs: Any) -> None:
    """A hook that does nothing: with one, PyTorch's encoder layer calls its linear layers in evaluation mode too."""


@torch.no_grad()
def _called(module: nn.Module, names: list[str], example: Held) -> list[str]:
    """List those of the layers that a forward pass calls."""
    traced, called = copied(module).eval(), set[str]()
    for name in names:
        traced.get_submodule(name).register_forward_pre_hook(lambda _, inputs, name=name: called.add(name))
    try:
        with torch.random.fork_rng(devices=[]):
            apply(traced, example)
    except Exception:  # a network that fails is refused by whoever calls it next
        return names
    return [name for name in names if name in called]


def _packed(module: nn.Module, layers: Sequence[str]) -> Iterator[str]:
    """Yield the attention layers with a packed projection."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and (not layers or within(name, layers)):
            yield name


def _check_own(module: nn.Module, names: list[str]) -> None:
    """Refuse a weight that another layer shares: the sum with an adapter would be no longer the same for both."""
    for name in names:
        weight = module.get_parameter(f"{name}.weight")
        owners = [n for n, layer in module.named_modules() if any(p is weight for p in layer._parameters.values())]
        if len(owners) > 1:
            raise FedtailorError(
                f"The layers {' and '.join(owners)} share a weight, so {name} cannot get an adapter: name the others "
                "in lora, as in 8,layers=…."
            )


def _names(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]

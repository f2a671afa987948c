"""The beginning of a run: the layers of its network, body, head and frozen ones, and the uploads of a client."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedtailor._common.files import Count
from fedtailor._common.text import human_bytes
from fedtailor.experiment.fairness import LOSS
from fedtailor.experiment.privacy import Privacy
from fedtailor.method import Each, Method
from fedtailor.server.records import Record
from fedtailor.training.network import Network

FEW_LAYERS = 3  # that are all named
Part = Literal["body", "head", "frozen"]


@dataclass(kw_only=True)
class Layer(Record):
    """A layer of the network: its trained numbers (or its frozen ones), buffers among them."""

    name: str
    kind: str
    part: Part
    numbers: Count


@dataclass(kw_only=True)
class Setup(Record):
    """The network and the uploads of a run. The numbers and bytes are those of one client's upload in round 1."""

    network: str
    layers: list[Layer]
    notes: list[str] = field(default_factory=list)  # on pretrained weights and adapters
    method: str
    title: str = ""  # of the method, if it is a class of the user's own
    uploads: dict[str, str]  # what the server sees of each
    numbers: Count | None = None
    bytes: Count | None = None

    def lines(self) -> list[str]:
        """Say all of it in a few lines."""
        parts = [self._part(part) for part in ("body", "head")]
        parts += [self._part("frozen")] if any(layer.part == "frozen" for layer in self.layers) else []
        leaves = ", ".join(f"{name} ({how})" for name, how in self.uploads.items())
        size = ""
        if leaves and self.numbers is not None:
            much = f"{human_bytes(self.bytes or 0)} a round" if self.numbers else "so nothing is shared"
            size = f": {self.numbers:,} numbers, {much}"
        return [
            f"Network {self.network}: {'; '.join(parts)}.",
            *self.notes,
            f"{self.title or self.method}: a client uploads {leaves or 'nothing'}{size}.",
        ]

    def _part(self, part: Part) -> str:
        """Name the layers of a part, the first and the last of many, and count their numbers."""
        layers = [layer for layer in self.layers if layer.part == part]
        named = [f"{layer.name or 'the network itself'} ({layer.kind})" for layer in layers]
        if len(named) > FEW_LAYERS:
            named = [f"{len(named)} layers, {named[0]}", "…", named[-1]]
        return f"{part} {', '.join(named) or 'empty'}, {sum(layer.numbers for layer in layers):,} numbers"


def describe_layers(network: Network) -> list[Layer]:
    """List the layers that are trained, as they lie in the vector, and then the frozen ones."""
    layers = [
        Layer(
            name=name,
            kind=type(network.module.get_submodule(name)).__name__,
            part="head" if name in network.head_names else "body",
            numbers=place.stop - place.start,
        )
        for name, place in network.layout.layers.items()
    ]
    seen, fixed = set[int](), set(network.frozen)
    for name, layer in network.module.named_modules():
        tensors = [p for p in layer._parameters.values() if p is not None and not p.requires_grad]
        tensors = [p for p in tensors if id(p) not in seen]
        seen.update(map(id, tensors))
        sizes = [p.numel() for p in tensors]
        sizes += [b.numel() for b in layer._buffers.values() if b is not None and layer in fixed]
        if sizes:
            layers.append(Layer(name=name, kind=type(layer).__name__, part="frozen", numbers=sum(sizes)))
    return layers


def describe_secure(method: Method, seen: Mapping[str, str]) -> dict[str, str]:
    """Say what the server sees of each tensor that leaves in secure aggregation."""
    sums = ", ".join(f"{name} ({what})" for name, what in seen.items() if name not in method.recorded)
    return {
        "key": "public keys",
        "signature": "a signature by the site's certificate",
        "certificate": "the site's certificate",
        "masked": f"random numbers; only of all sites together: {sums}",
    }


def describe_uploads(method: Method, privacy: Privacy | None = None, fair: bool = False) -> dict[str, str]:
    """Say of each upload what the server sees of it. In a private run nothing is uploaded for the record alone."""
    seen = {LOSS: "each client's own"} if fair else {}
    for name, how in method.uploads.items():
        if privacy is not None and name in method.recorded:
            continue
        if privacy is not None and privacy.level == "client":
            seen[name] = "clipped, with noise, then the mean" if privacy.by == "clients" else "clipped mean with noise"
        elif isinstance(how, Each):
            seen[name] = "each client's own"
        elif how.weights in ("samples", "equal"):
            seen[name] = "mean by samples" if how.weights == "samples" else "plain mean"
        else:
            seen |= {name: f"mean by {how.weights}", how.weights: "sum"}
    if privacy is not None and privacy.level == "sample":
        seen = {name: f"{what}, of noisy gradients" for name, what in seen.items()}
    return seen

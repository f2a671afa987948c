"""Everything that crosses between the server and a site: named tensors, requests and replies.

Nothing else does. A request names the round, the client and the version of the state that the server believes the
client to have; a reply brings the upload and the version that came of it. A client's state is in neither.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import DIGITS, Count, checksum

Message = Mapping[str, Tensor]
State = dict[str, Tensor]
NEVER = 0  # the version of a state that no round has made
BLANK = "0" * DIGITS  # in the place of a frame's checksum while it is computed
MARK = rb"\"checksum\": \""  # in a frame's header, where JSON stands inside of JSON


@dataclass(slots=True)
class Metrics:
    """The metrics of one model on one set of samples; None where one is not defined. `own` is the user's own if that
    decides, and `more` has others of the user's by name, as far as they are defined."""

    loss: float | None = None
    accuracy: float | None = None
    balanced_accuracy: float | None = None
    auc: float | None = None
    f1: float | None = None
    log_loss: float | None = None
    exact_match: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None
    own: float | None = None
    n_samples: Count = 0
    more: dict[str, float] = field(default_factory=dict)


Measured = dict[str, Metrics]  # "test", "validation" and, where asked for, "train"


# --- named tensors ---


def message_bytes(message: Message) -> int:
    """Count the bytes of a message's tensors: what any transport has to carry, whatever it wraps around them."""
    return sum(tensor.nbytes for tensor in message.values())


def copied(tensors: Message) -> State:
    """Copy a message or state, so that it shares no memory with anything."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def as_tensor(content: bytes) -> Tensor:
    """Put bytes into a tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """Take bytes out of a tensor; anything else is a ValueError."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError("a tensor of bytes")
    return tensor.numpy().tobytes()


def moved(tensors: Message, device: torch.device | str) -> State:
    """Move a message or state to a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host: from a device all in one transfer, as each transfer waits for the device. Those that
    are there are not copied."""
    away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    found = iter(unpacked(packed(away).cpu(), away) if away else ())
    return [next(found) if tensor.device.type != "cpu" else tensor for tensor in tensors]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Put the bytes of tensors side by side, those with the largest numbers first, so that all begin at an address
    that suits them."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in sorted(tensors, key=_largest_first)])


def unpacked(content: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View what `packed` has put side by side."""
    order = sorted(range(len(like)), key=lambda place: _largest_first(like[place]))
    pieces = content.split([like[place].nbytes for place in order])
    of_place = dict(zip(order, pieces, strict=True))
    return [of_place[place].view(tensor.dtype).view(tensor.shape) for place, tensor in enumerate(like)]


def _largest_first(tensor: Tensor) -> int:
    return -tensor.element_size()


def joined(of_clients: Mapping[int, Message]) -> State:
    """Put the tensors of several clients side by side; their names begin with the client's number."""
    return {f"{client}/{name}": tensor for client, tensors in of_clients.items() for name, tensor in tensors.items()}


def parted(tensors: Message, clients: Sequence[int]) -> dict[int, State]:
    """Part what `joined` has put side by side."""
    found: dict[int, State] = {client: {} for client in clients}
    for key, tensor in tensors.items():
        client, _, name = key.partition("/")
        found[int(client)][name] = tensor
    return found


def check_tensors(what: str, tensors: Message) -> None:
    """Refuse anything but named tensors."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{what} holds {name!r}, a {type(tensor).__name__}; messages and states are named tensors")


def check_finite(named: Mapping[str, Message], fetch: Callable[[Sequence[Tensor]], list[Tensor]] = fetched) -> None:
    """Refuse anything but named tensors of finite numbers, in messages by what each of them is. `fetch` copies numbers
    to the host."""
    checked: list[tuple[str, str, Tensor]] = []
    for what, tensors in named.items():
        check_tensors(what, tensors)
        checked += [(what, name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()]
    for (what, name, tensor), total in zip(checked, fetch([t.detach().sum() for _, _, t in checked]), strict=True):
        if not math.isfinite(float(total)) and not tensor.isfinite().all():
            raise NotFinite(f"{what} has NaN or infinite numbers in {name!r}")


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a message: its bytes, and the largest absolute value of each tensor."""

    bytes: int
    largest: dict[str, float]  # NaN or infinite if one of its numbers is


def sizes(what: str, messages: Mapping[int, Message], finite: bool = False) -> dict[int, Size]:
    """Measure messages; with `finite`, refuse NaN and infinite numbers. A tensor that several of them have in common is
    looked at once."""
    all_tensors = {id(tensor): tensor for message in messages.values() for tensor in message.values()}
    bounds = fetched([_bounds(tensor.detach()) for tensor in all_tensors.values()])
    known = {one: max(abs(float(bound)) for bound in of.tolist()) for one, of in zip(all_tensors, bounds, strict=True)}
    found = {}
    for client, message in messages.items():
        for name in sorted(message):
            tensor = message[name]
            if finite and not math.isfinite(known[id(tensor)]):
                raise NotFinite(f"{what} has NaN or infinite numbers in {name!r}")
        largest = {name: known[id(tensor)] for name, tensor in message.items()}
        found[client] = Size(sum(tensor.nbytes for tensor in message.values()), largest)
    return found


def _bounds(numbers: Tensor) -> Tensor:
    """Return the smallest and the largest number; 0 if there is none."""
    if not numbers.numel():
        return torch.zeros(1, device="cpu")
    return torch.stack(torch.aminmax(numbers.byte() if numbers.dtype == torch.bool else numbers))


class NotFinite(ValueError):
    """Named tensors have NaN or infinite numbers."""


def frame(tensors: Message, **header: Any) -> bytes:
    """Pack named tensors and a header (round, sender, version …) as one safetensors file with a checksum."""
    try:
        content = save(copied(tensors), {"fedtailor": json.dumps({**header, "checksum": BLANK})})
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # which is no Exception: safetensors found no memory
            raise MemoryError("no memory for a file") from None
        raise
    return b"".join(_checked(memoryview(content), content.index(MARK) + len(MARK)))


def unframe(content: bytes, what: str, **expected: str | int) -> State:
    """Unpack the tensors of a frame; refuse a damaged one, and one whose header is not the expected one."""
    tensors, header = read_frame(content, what)
    for name, value in expected.items():
        if header.get(name) != value:
            raise FedtailorError(f"{what} is not what it should be: its {name} is {header.get(name)}, not {value}.")
    return tensors


def read_frame(content: bytes, what: str) -> tuple[State, dict[str, Any]]:
    """Unpack the tensors and the header of a frame; refuse a damaged one."""
    try:
        length = int.from_bytes(content[:8], "little")
        start = content.find(MARK, 8, 8 + length) + len(MARK)
        if start < 8 + len(MARK) or _checked(memoryview(content), start)[1] != content[start : start + DIGITS]:
            raise ValueError("its checksum does not fit")
        tensors: State = load(content)
        header: dict[str, Any] = dict(json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedtailor"]))
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FedtailorError(f"{what} cannot be read: {error}.") from None
    return tensors, header


def _checked(content: memoryview, start: int) -> tuple[memoryview, bytes, memoryview]:
    """Split a frame where its checksum stands, and compute that of all other bytes."""
    head, tail = content[:start], content[start + DIGITS :]
    return head, checksum(head, BLANK.encode(), tail).encode(), tail


# --- from the server to a site ---


@dataclass(frozen=True)
class Request:
    """Work for one client. `version` is the round that made the state which the client is to work with."""

    round: int
    client: int
    message: Message
    version: int = NEVER

    @property
    def clients(self) -> tuple[int, ...]:
        return (self.client,)


@dataclass(frozen=True)
class Train(Request):
    """Train, and reply with the upload; with `measure`, also with the metrics of the model right after training. The
    `share` of its steps that a client is to take is below 1 where it has no time for more."""

    measure: bool = False
    share: float = 1.0


@dataclass(frozen=True)
class Together(Request):
    """Train or measure several clients of one place as one computation: `parts` are their own requests, without the
    messages.

    Names in its message begin with the client's number, and so do those of the state and the upload (see `joined`).
    """

    parts: tuple[Request, ...] = ()

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Together":
        """Join the requests of several clients."""
        message = joined({request.client: request.message for request in requests})
        parts = tuple(replace(request, message={}) for request in requests)
        return cls(requests[0].round, requests[0].client, message, parts=parts)

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(part.client for part in self.parts)


@dataclass(frozen=True)
class Secure(Request):
    """A step of secure aggregation, after a training whose upload stayed at the site (see `client/secure_party.py`)."""


@dataclass(frozen=True)
class Shares(Secure):
    """Hand out shares of your secrets, each sealed for one of the sites whose keys these are."""


@dataclass(frozen=True)
class Masked(Secure):
    """Hand out your upload under masks that you have in common with the sites whose sealed shares these are."""


@dataclass(frozen=True)
class Agree(Secure):
    """Sign that the sum of these sites is to be opened."""


@dataclass(frozen=True)
class Open(Secure):
    """Hand out what takes the masks off this sum, which so many signed: of each site one kind of share."""


@dataclass(frozen=True)
class Evaluate(Request):
    """Measure the client's personal model."""


@dataclass(frozen=True)
class EvaluateShared(Request):
    """Measure one model for several clients of one place in one pass."""

    others: tuple[int, ...] = ()

    @property
    def clients(self) -> tuple[int, ...]:
        return (self.client, *self.others)


@dataclass(frozen=True)
class Personal(Request):
    """Hand out the client's personal model."""


@dataclass(frozen=True)
class Predict(Request):
    """Hand out the client's outputs for these inputs, to whoever runs the simulation: no letter asks for them."""

    inputs: Any = None


@dataclass(frozen=True)
class Adapt(Request):
    """Fine-tune the model of a client that never took part, and one from scratch; measure both after every epoch."""


# --- from a site to the server ---


@dataclass
class Reply:
    """The answer to a request. With an `error`, which may have a `cause`, there is nothing else."""

    clients: tuple[int, ...]
    upload: State = field(default_factory=dict)
    version: int = NEVER  # of the state that the client now has
    measured: list[Measured] = field(default_factory=list)
    bytes_up: int = 0  # of the upload, as the server counts them
    differentiated: int = 0  # samples of which the gradient was computed: the cost of the work, whatever the machine
    seconds: float = 0.0
    error: str = ""
    cause: BaseException | None = None
    parts: list["Reply"] = field(default_factory=list)  # of clients that trained together, without their uploads


@dataclass(frozen=True, slots=True)
class Declaration:
    """All that a site tells the server when it joins.

    `n_samples` counts its training samples, `n_classes` its own classes where labels are per client. `fingerprint` is a
    checksum of the initial vector: a site with another one has another network, or another experiment.
    """

    name: str
    n_samples: int
    n_classes: int | None
    fingerprint: str

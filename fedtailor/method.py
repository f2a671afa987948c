"""What a method is: five short functions over explicit messages.

A method sees the server on one side and one client at a time on the other, and neither side can see the other but
through messages of named tensors. That makes the bytes exact, the privacy real, and lets the same file run in one
process, in many, and across sites.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedtailor.local.client import Client, Message, State
from fedtailor.local.descent import Batch

Computed = TypeVar("Computed")

BLOCK = 1 << 26  # numbers in a block of rows: 256 MiB in single precision

__all__ = ["Batch", "Client", "Message", "Method", "Replies", "Server", "State", "message_bytes"]


@dataclass
class Server:
    """The server's side: named tensors, and what it knows of the federation without asking.

    `initial` is the network's first vector, `body`, `head` and `layers` its slices, `statistics` those that hold
    buffers and no parameters, `norms` those of normalisation layers, `samples` the number of training samples that
    each client declared when it joined, `per_round` how many take part in a round on average, `participants` who was
    called this round.
    """

    initial: Tensor
    body: slice
    head: slice
    layers: dict[str, slice]
    samples: Tensor
    per_round: float
    statistics: list[slice] = field(default_factory=list)
    norms: list[slice] = field(default_factory=list)
    state: State = field(default_factory=dict)
    round: int = 0
    participants: list[int] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)
    store: "Store | None" = None
    another: Callable[[int], Tensor] | None = None
    _once: dict[str, Any] = field(default_factory=dict)

    @property
    def clients(self) -> int:
        """The number of clients in the federation, N."""
        return len(self.samples)

    def begin(self, round: int, participants: list[int], random: torch.Generator) -> None:
        """A new round with these participants and this random stream."""
        self.round, self.participants, self.random, self._once = round, participants, random, {}

    def once(self, name: str, compute: Callable[[], Computed]) -> Computed:
        """Something that is the same for all participants of a round, computed for the first of them."""
        if name not in self._once:
            self._once[name] = compute()
        return self._once[name]  # type: ignore[no-any-return]

    def parameters_of(self, rows: Tensor) -> Tensor:
        """Vectors with zeros for what is no parameter, for lengths and angles between models."""
        if self.statistics:
            rows = rows.clone()
            for place in self.statistics:
                rows[..., place] = 0
        return rows

    def another_initial(self, number: int) -> Tensor:
        """A first vector of the network as another seed would have made it; number 0 is `initial` itself."""
        assert self.another is not None
        return self.another(number) if number else self.initial

    def keep(self, client: int, state: State) -> None:
        """Keep tensors that belong to one client. They may live on disk, and only what changed is saved."""
        assert self.store is not None
        self.store.put(f"server-{client}", state, self.round)

    def kept(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """What is kept of every client under this name, as the rows of a matrix in blocks: the clients of a block and
        its rows, which are the caller's until the next block."""
        block = min(self.clients, max(1, BLOCK // len(self.initial)))
        rows = _room(block, self.initial)  # for all blocks: fresh memory costs more than copying
        for first in range(0, self.clients, block):
            clients = range(first, min(first + block, self.clients))
            yield slice(first, clients.stop), torch.stack(self.kept_of(clients, name), out=rows[: len(clients)])

    def kept_of(self, clients: Iterable[int], name: str) -> list[Tensor]:
        """What is kept of these clients under this name. A client of which nothing is kept has `initial`."""
        assert self.store is not None
        return [self.store.get(f"server-{client}").get(name, self.initial) for client in clients]

    def mixed(self, weights: Tensor, name: str) -> Tensor:
        """Mixes of what is kept of all clients under this name, as many as there are rows of weights."""
        mixes = _room(len(weights), self.initial).zero_()
        for clients, vectors in self.kept(name):
            mixes.addmm_(weights[:, clients], vectors)
        return mixes


def _room(rows: int, like: Tensor) -> Tensor:
    """Room for rows like this one. Fresh memory costs more than what is done with it: NumPy asks the system for huge
    pages, which PyTorch does not. It begins where PyTorch's would, as that may decide about last bits."""
    if like.device.type != "cpu":
        return like.new_empty(rows, *like.shape)
    room = torch.from_numpy(np.empty(rows * like.nbytes + 64, np.uint8))
    start = -room.data_ptr() % 64
    return room[start : start + rows * like.nbytes].view(like.dtype).view(rows, *like.shape)


class Store(Protocol):
    """Where a server keeps what belongs to one client."""

    def get(self, key: str) -> State: ...

    def put(self, key: str, state: State, round: int) -> None: ...


class Replies(dict[int, Message]):
    """What came back in a round: one message a client, in the order of the clients' numbers."""

    def __init__(self, messages: Mapping[int, Message], samples: Tensor) -> None:
        super().__init__(sorted(messages.items()))
        self.samples = samples[list(self)]

    def stack(self, name: str) -> Tensor:
        """One tensor of every reply, as the rows of a matrix."""
        tensors = [message[name] for message in self.values()]
        return torch.stack(tensors, out=_room(len(tensors), tensors[0]))

    def mean(self, name: str, weights: Tensor | None = None, equal: bool = False) -> Tensor:
        """The mean of one tensor over the replies: weighted by n_i / Σ n of those who replied, as given, or equally."""
        rows = self.stack(name)
        rows = rows if rows.is_floating_point() else rows.double()
        if weights is None:
            weights = torch.ones_like(self.samples) if equal else self.samples
        weights = weights.to(rows) / weights.sum().to(rows)
        return (weights @ rows.reshape(len(rows), rows[0].numel())).view(rows.shape[1:])


class Method(BaseModel):
    """A method of personalized federated learning. Its fields are its hyper-parameters, typed and validated.

    What is defined here is a federation around one shared model, `theta`; a method overrides what it does otherwise.
    All of them have `train`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    shared_part: ClassVar[str] = "the model"  # what the clients have in common, in a few words
    own_part: ClassVar[str] = "nothing"  # what is each client's own
    personal_head: ClassVar[bool] = False  # where labels are each client's own, its head has only its own outputs

    def start(self, server: Server) -> None:
        """Put the server's first state in place, before round 1."""
        server.state["theta"] = server.initial

    def broadcast(self, server: Server) -> Message:
        """What every client may have of the server at any time: enough, with its own state, to predict."""
        return {"theta": server.state["theta"]}

    def send(self, server: Server, client: int) -> Message:
        """What goes down to one participant at the beginning of a round."""
        return self.broadcast(server)

    def train(self, client: Client, message: Message) -> Message:
        """The participant's work: it may change its state, and returns what goes up."""
        raise NotImplementedError

    def receive(self, server: Server, replies: Replies) -> None:
        """What the server makes of the replies (at least one; some of the participants' may be missing)."""
        server.state["theta"] = replies.mean("theta")

    def personal(self, client: Client, message: Message) -> Tensor:
        """The vector that this client predicts with, from its own state and the server's broadcast."""
        return message["theta"]

    def central(self, server: Server) -> Tensor | None:
        """The one global model, for the methods that have one."""
        return server.state.get("theta")

    def observe(self, server: Server) -> Message:
        """What the method's paper shows of its inner life, from the server's side, for the run record."""
        return {}


def message_bytes(message: Message) -> int:
    """The bytes of a message's tensors: what any transport has to carry, whatever it wraps around them."""
    return sum(tensor.nbytes for tensor in message.values())

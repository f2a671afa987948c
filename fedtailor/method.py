"""The interface of a method: what it does at the server, what it does at a client, and what crosses between them.

Server and client see each other through messages of named tensors alone. A method declares how each tensor that a
client uploads is aggregated; the server's loop does it, and hands single uploads only to methods that declare so.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedtailor._common.errors import FedtailorError, explained, warn
from fedtailor._common.memory import half_of_memory
from fedtailor.messages import Message, State
from fedtailor.messages.store import Store
from fedtailor.training.client import Client
from fedtailor.training.descent import Batch
from fedtailor.training.inputs import Inputs
from fedtailor.training.layout import Layout
from fedtailor.training.optimizer import GradientOptimizer, ServerOptimizer, server_step

# What a method refuses that takes (x − y) / `client.path_length()` for the mean gradient of a descent from x to y.
PATH_OF_SGD = {
    "optimizer": "it computes gradients from the path of SGD",
    "clip": "it computes gradients from the path of SGD, which clipping bends",
}
# What a method refuses whose server does not put a mean in the place of what was sent. It may have parameters of these
# names: they are then the method's own.
OWN_STEP = dict.fromkeys(("server_optimizer", "server_lr"), "its server takes a step of its own")
# What a method refuses whose clients share something for each class: a class must be the same for all of them, and what
# is shared is no part of a model, which a server's optimiser could move along.
BY_CLASS = {
    "labels": "the clients share means of each class, and have none in common where every client numbers its own",
    **dict.fromkeys(("server_optimizer", "server_lr"), "class means are no parameters, which steps could improve"),
}
BLOCK = 1 << 26  # numbers in a block of rows: 256 MiB in single precision

__all__ = [
    "Batch", "Client", "Each", "Layout", "Mean", "Message", "Method", "Search", "Server", "State", "Total", "Uploads",
]  # fmt: skip


@dataclass(frozen=True)
class Mean:
    """The upload is averaged over the clients that replied, and the server sees the mean alone.

    `weights` says by what: "samples" (n_i / Σ n), "equal", or the name of another upload that holds the client's own
    weights. These may be one number, or a tensor of which the last dimension is 1 or stands for the network's layers;
    they are broadcast against the upload, and entries with a total weight of zero are zero in the mean.
    """

    weights: str = "samples"


@dataclass(frozen=True)
class Each:
    """The server sees every client's own tensor. `record` says that it only writes it down: a private run goes without.

    A method that needs single uploads cannot have their mean made robust or private.
    """

    record: bool = False


Uploads = Mapping[str, Mean | Each]
Search = Mapping[str, str | None]  # by parameter: "0.01..1:log", "1..10" or "a|b"; None: it is not searched


@dataclass
class Total:
    """A round's uploads as the server sees them: means, and single tensors where the method declares `Each`.

    `clients` are those that replied, in the order of their numbers, `n_samples` their training samples.
    """

    clients: list[int]
    n_samples: Tensor
    _means: Mapping[str, Tensor]
    _weights: Mapping[str, Tensor]
    _single: Mapping[str, dict[int, Tensor]]
    _share: float | None = None  # of the clients that are expected in a round, in place of those that replied

    def __getitem__(self, name: str) -> Tensor:
        """The mean of an upload; of one that is seen singly, the mean by samples."""
        if name not in self._single:
            return self._means[name]
        tensors = list(self._single[name].values())
        shares, mean = self.n_samples.to(tensors[0]) / self.n_samples.sum().to(tensors[0]), torch.zeros_like(tensors[0])
        for share, tensor in zip(shares.tolist(), tensors, strict=True):
            mean.add_(tensor, alpha=share)
        return mean

    @property
    def index(self) -> Tensor:
        """The numbers of the clients that replied, as a tensor."""
        return torch.tensor(self.clients, device=self.n_samples.device)

    def has(self, name: str) -> bool:
        """Find out whether an upload that is seen singly came: one for the record alone stays away in a private run."""
        return bool(self._single.get(name))

    def weight(self, name: str) -> Tensor:
        """The sum of the weights of a mean whose weights are uploads."""
        return self._weights[name]

    def each(self, name: str) -> dict[int, Tensor]:
        """Every client's own tensor."""
        return self._single[name]

    def share(self, server: "Server", weights: Literal["samples", "equal"]) -> float:
        """Compute the share of the clients that replied in the samples of all clients, or in their number.

        In a private round it is the expected share: the real one would tell who took part.
        """
        if self._share is not None:
            return self._share
        if weights == "equal":
            return len(self.clients) / server.n_clients
        return int(self.n_samples.sum()) / int(server.n_samples.sum())

    def with_means(self, means: Mapping[str, Tensor]) -> "Total":
        """Copy this total with other means of these names."""
        return replace(self, _means={**self._means, **means})

    def rows(self, name: str) -> Tensor:
        """Every client's own tensor, as the rows of a matrix in the order of `clients`."""
        tensors = list(self._single[name].values())
        return torch.stack(tensors, out=room(len(tensors), tensors[0]))


@dataclass
class Server:
    """The server's side: its state (named tensors), and what it knows of the federation without asking.

    `initial` is the network's initial vector and `layout` where its parts lie, `n_samples` the number of training
    samples that each client declared when it joined, `per_round` how many take part in a round on average,
    `participants` who was called this round, `random` this round's random stream, `warnings` what was said to the user.
    """

    initial: Tensor
    layout: Layout
    n_samples: Tensor
    per_round: float
    state: State = field(default_factory=dict)
    round: int = 0
    participants: list[int] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)
    store: Store = field(default_factory=lambda: Store(None, "server"))
    initialise: Callable[[int], Tensor] | None = None
    warnings: dict[str, str] = field(default_factory=dict)

    @property
    def n_clients(self) -> int:
        """The number of clients in the federation, N."""
        return len(self.n_samples)

    @property
    def body(self) -> slice:
        """The slice of the vector that is the body: all but the head."""
        return self.layout.body

    @property
    def head(self) -> slice:
        """The slice of the vector that is the head."""
        return self.layout.head

    def initial_for(self, number: int) -> Tensor:
        """An initial vector of the network as another seed would have made it; number 0 is `initial` itself."""
        assert self.initialise is not None
        return self.initialise(number) if number else self.initial

    def pairs(self, value: float = 0.0, double: bool = False) -> Tensor:
        """Return a matrix with this number for each pair of clients, N × N, of the kind of `initial`; with `double`, in
        double precision on the CPU, as not every device has it. Refuse one that would take more than half of the
        memory."""
        like, n = self.initial.new_empty(0), self.n_clients
        like = like.cpu().double() if double else like
        if (size := n * n * like.itemsize) > half_of_memory():
            raise FedtailorError(
                f"This method's server has a number for each pair of clients: for {n:,} of them it would take "
                f"{size / 1e9:,.0f} GB of memory, so choose another method, or fewer clients."
            )
        return like.new_full((n, n), value)

    def step(self, name: str, gradient: Tensor, lr: float, optimizer: GradientOptimizer = "sgd") -> None:
        """Move the server's tensor `name` along a gradient, by SGD, SGD with momentum, or Adam."""
        server_step(self.state, name, gradient, lr, optimizer)

    def warn(self, about: str, message: str) -> None:
        """Say something to the user once a run: the first message about each subject is shown as a warning and
        recorded."""
        if about not in self.warnings:
            self.warnings[about] = message
            warn(message)

    def note(self, total: Total, name: str) -> None:
        """Write each client's own upload into its row of the server's tensor `name`, unless it was not uploaded."""
        if total.has(name):
            clients = torch.tensor(list(total.each(name)), device=self.state[name].device)
            self.state[name] = self.state[name].index_copy(0, clients, total.rows(name))

    def keep(self, client: int, state: State) -> None:
        """Keep tensors that belong to one client. They may live on disk, and only what changed is saved."""
        self.store.put(client, state, self.round)

    def kept(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield (clients, matrix) blocks of the tensors stored with `keep`, a row for each client of the federation.
        The matrix is overwritten by the next block: copy what you need."""
        block = min(self.n_clients, max(1, BLOCK // len(self.initial)))
        rows = room(block, self.initial)  # for all blocks: fresh memory costs more than copying
        for first in range(0, self.n_clients, block):
            clients = range(first, min(first + block, self.n_clients))
            yield slice(first, clients.stop), torch.stack(self.kept_of(clients, name), out=rows[: len(clients)])

    def kept_of(self, clients: Iterable[int], name: str, default: Tensor | None = None) -> list[Tensor]:
        """List the tensors stored with `keep` for these clients; the default, or `initial`, for one without."""
        default = self.initial if default is None else default
        return [self.store.get(client).get(name, default) for client in clients]

    def mixed(self, weights: Tensor, name: str) -> Tensor:
        """Mix the tensors stored with `keep` of all clients: one mix for each row of weights."""
        mixes = room(len(weights), self.initial).zero_()
        for clients, vectors in self.kept(name):
            mixes.addmm_(weights[:, clients], vectors)
        return mixes


def room(rows: int, like: Tensor) -> Tensor:
    """Allocate room for rows like this one. Fresh memory costs more than what is done with it: NumPy asks the system
    for huge pages, which PyTorch does not. It begins where PyTorch's would, as that may decide about last bits."""
    if like.device.type != "cpu":
        return like.new_empty(rows, *like.shape)
    memory = torch.from_numpy(np.empty(rows * like.nbytes + 64, np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + rows * like.nbytes].view(like.dtype).view(rows, *like.shape)


class Method(BaseModel):
    """A method of personalized federated learning. Its fields are its hyper-parameters, typed and validated.

    One function is required, `train`. The others default to a federation around shared tensors, one for each upload
    that is a mean: by default `theta`, the whole model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str] = ""  # in the catalogue and on the command line
    title: ClassVar[str] = ""  # in tables and figures, as its paper writes it; the class's name unless it says another
    paper: ClassVar[str] = ""  # authors, title, venue and year
    shared_part: ClassVar[str] = "the model"  # what the clients have in common, in a few words
    own_part: ClassVar[str] = "nothing"  # what is each client's own
    personal_head: ClassVar[bool] = False  # where labels are per client, its head has only its own outputs
    uploads: ClassVar[Uploads] = {"theta": Mean("samples")}  # what leaves a client, and how it is aggregated
    keeps_model: ClassVar[bool] = False  # a client that has trained predicts from its own state, without the broadcast
    refuses: ClassVar[Mapping[str, str]] = {}  # settings of the experiment that must keep their default, and why
    default_server_optimizer: ClassVar[ServerOptimizer] = "sgd"  # of mean changes; SGD with a rate of 1 is the mean
    search: ClassVar[Search] = {}  # the ranges in which `tune` looks for parameters, beside that of lr
    corrects: ClassVar[bool] = False  # all it does at a client is to correct the gradients of one descent of `theta`

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if "title" not in vars(cls):  # not the title of the method that it is a variant of
            cls.title = cls.__name__

    # --- at the server ---

    def start(self, server: Server) -> None:
        """Put the server's state in place, before round 1."""
        server.state["theta"] = server.initial

    def shared_slice(self, layout: Layout) -> slice | None:
        """Return the slice of the vector that the method averages, for compositions; None if it is no slice."""
        known = {name: self.uploads[name] in (Mean("samples"), Mean("equal")) for name in self.means}
        if known.get("theta"):
            return slice(0, layout.size)
        return layout.body if known.get("body") else None

    def broadcast(self, server: Server) -> Message:
        """Return what every client may have at any time: enough, with its own state, to predict."""
        return {name: server.state[name] for name in self.means if name in server.state}

    def send(self, server: Server, client: int) -> Message:
        """Return what goes down to one participant at the beginning of a round."""
        return self.broadcast(server)

    def send_all(self, server: Server) -> Mapping[int, Message]:
        """Return what goes down to each participant, for a method that computes it for all of them at once."""
        return {client: self.send(server, client) for client in server.participants}

    def receive(self, server: Server, total: Total) -> None:
        """Update the server's state from the round's uploads: of at least one client, unless noise hides that nobody
        replied; some may be missing."""
        for name in self.means:
            server.state[name] = total[name]

    def upload_like(self, server: Server, client: int) -> Message:
        """Return tensors of the shapes and types of what a participant uploads this round: the server refuses others.

        What is not among them is like the server's tensor of the same name or, if there is none, like the model; the
        weights of a mean are one number.
        """
        return {}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor | None:
        """Return what the upload `name` is a change of: the tensor of that name that the client was sent. None if there
        is none: the upload itself is the change, as a gradient is."""
        found = message.get(name)
        return found if found is not None and found.shape == like.shape else None

    def join(self, server: Server, before: int) -> None:
        """Make room for clients that join a run that has begun: `server.n_clients` has grown from `before`.

        By default the tensors that `start` makes larger for more clients get what it would have made for the new ones,
        and all else stays. Raise a FedtailorError in a method that cannot take new clients.
        """
        then, now = self._started(server, before), self._started(server, server.n_clients)
        for name in (name for name in now if name in then and now[name].shape != then[name].shape):
            tensor, grown = server.state[name], now[name].clone()
            if tensor.shape != then[name].shape or tensor.dim() != grown.dim():
                raise FedtailorError(
                    f"{type(self).__name__} cannot take new clients into a run that has begun, as its state {name!r} "
                    "has no room for them: serve them with `fedtailor adapt`."
                )
            grown[tuple(map(slice, tensor.shape))] = tensor
            server.state[name] = grown

    def _started(self, server: Server, clients: int) -> State:
        """Return the state that `start` makes for the first so many clients."""
        few = server.n_samples[:clients]
        fresh = Server(server.initial, server.layout, few, server.per_round, initialise=server.initialise)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it has to say was said when the run began
            self.start(fresh)
        return fresh.state

    def global_model(self, server: Server) -> Tensor | None:
        """Return the one global model, if the method has one."""
        return server.state.get("theta")

    def observe(self, server: Server) -> Message:
        """Return the diagnostics that the method's paper shows, for the run record."""
        return {}

    # --- at a client ---

    def extra_tensors(self, layout: Layout) -> State:
        """Return the initial values of tensors that the method trains beside the network, by name.

        They lie behind the head in every vector, and in `batch.extra` of an objective: optimisers, momentum, uploads
        and checkpoints treat them like the network's. `client.extra(theta)` views those of a vector.
        """
        return {}

    def train(self, client: Client, message: Message) -> Message:
        """Do a participant's work: it may change its state, and returns what it uploads."""
        raise NotImplementedError

    def personal_model(self, client: Client, message: Message) -> Tensor:
        """Return the vector that this client predicts with, from its own state and the server's broadcast."""
        return message["theta"]

    def predict(self, client: Client, message: Message, x: Inputs) -> Tensor:
        """Compute a client's outputs for these inputs: by default, those of the network with its personal model.

        A method that predicts by more than one vector overrides this, and has no model that could be exported.
        """
        return client.outputs(self.personal_model(client, message), x)

    # --- what follows from the above ---

    @cached_property
    def means(self) -> list[str]:
        """The uploads of which the server sees the mean alone."""
        return [name for name, how in self.uploads.items() if isinstance(how, Mean)]

    def changes(self, message: Message, upload: Message) -> State:
        """Compute how the uploads that are means differ from what the client was sent: together one vector."""
        found: State = {}
        for name in self.means:
            sent = self.sent(message, name, upload[name])
            found[name] = upload[name] if sent is None else upload[name] - sent
        return found

    @cached_property
    def shares_model(self) -> bool:
        """True if all clients predict with the broadcast `theta`."""
        return type(self).personal_model is Method.personal_model and not self.predicts_by_more

    @property
    def predicts_by_more(self) -> bool:
        """True if the method predicts by more than the personal model."""
        return type(self).predict is not Method.predict

    def check_one_model(self, what: str) -> None:
        """Refuse what needs a personal model that is one vector, in a method that predicts by more."""
        if self.predicts_by_more:
            raise FedtailorError(f"{self.title} predicts by more than one network's weights: {what}.")

    @cached_property
    def uploaded(self) -> set[str]:
        """The names of all that a client uploads, with the weights of means."""
        weights = {how.weights for how in self.uploads.values() if isinstance(how, Mean)}
        return {*self.uploads, *(weights - {"samples", "equal"})}

    @cached_property
    def recorded(self) -> set[str]:
        """The uploads for the record alone: in a private run they stay at the client."""
        return {name for name, how in self.uploads.items() if isinstance(how, Each) and how.record}


def expected_upload(method: Method, server: Server, client: int) -> State:
    """Return tensors of the shapes and types of all that a client uploads this round."""
    try:
        declared = method.upload_like(server, client)
    except Exception as error:  # a method's own fault, of any kind
        raise FedtailorError(f"{type(method).__name__}, upload_like: {explained(error)}.") from error
    weights = {how.weights for how in method.uploads.values() if isinstance(how, Mean)}
    usual = {name: server.initial[0] if name in weights else server.initial for name in method.uploaded}
    return {name: declared.get(name, server.state.get(name, like)) for name, like in usual.items()}


def weighted(method: Method, upload: Message, n_samples: float, layout: Layout) -> State:
    """Compute what a client adds to the sums of secure aggregation, in double precision: w x of each mean under its
    name, and w under NAME/weight. Means are then Σ w x / Σ w. A mean by samples is by `n_samples`."""
    found: State = {}
    for name in sorted(method.means):
        how = method.uploads[name]
        assert isinstance(how, Mean)
        known = {"samples": float(n_samples), "equal": 1.0}
        x = upload[name].cpu().double()
        w = x.new_tensor(known[how.weights]) if how.weights in known else upload[how.weights].cpu().double()
        found[name] = x * (layout.spread(w) if w.dim() else w)
        found[f"{name}/weight"] = w
    return found


def check_upload(
    method: Method, upload: Mapping[str, Any], server: Server | None = None, client: int = 0, private: bool = False
) -> None:
    """Refuse what is not the named tensors that the method declares to upload: other names or, at the server, other
    shapes or types."""
    declared = method.uploaded - (method.recorded if private else set())
    if missing := sorted(declared - upload.keys()):
        raise ValueError(f"its upload lacks {missing[0]!r}, which {type(method).__name__} declares in `uploads`")
    if unknown := sorted(upload.keys() - declared, key=str):
        raise ValueError(f"its upload has {unknown[0]!r}, which {type(method).__name__} does not declare in `uploads`")
    if server is None:
        return
    expected = expected_upload(method, server, client)
    for name in sorted(upload):  # so that what is said does not depend on the order of arrival
        tensor, like = upload[name], expected[name]
        if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"its upload {name!r} is {_kind(tensor)}, where {type(method).__name__} declares {_kind(like)} (see "
                "`upload_like`)"
            )


def _kind(tensor: Any) -> str:
    """Say in words what type and shape a tensor has."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    shape = "×".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} " + (f"of shape {shape}" if shape else "(one number)")

"""What is done for one client: the work that every engine hands out, and the bench on which a process does it.

A bench holds one network and all that stays the same during a run; a task brings the message and the client's state,
a result takes away the reply, the new state and what was measured. Both are named tensors and plain values, so an
engine may carry them anywhere.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from fedtailor.data import FederatedData
from fedtailor.errors import brief
from fedtailor.local.client import Client, Message, State
from fedtailor.local.descent import Descent, step_count
from fedtailor.local.metrics import Metrics, measure, outputs
from fedtailor.local.network import Loss, Network
from fedtailor.local.streams import seed_network, torch_seed
from fedtailor.method import Method

Measured = dict[str, Metrics]  # "test", "validation" and, where asked for, "train"


@dataclass
class Task:
    """Work for one client; or, to evaluate a model that several clients share, for all of them in one pass."""

    kind: Literal["train", "train and evaluate", "evaluate", "evaluate shared", "personal", "adapt"]
    round: int
    clients: tuple[int, ...]
    message: Message
    state: Callable[[], State] = dict  # loaded when the task's turn comes


@dataclass
class Result:
    """What came of a task. With an `error` there is nothing else."""

    clients: tuple[int, ...]
    reply: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    used_message: bool = True
    seconds: float = 0.0
    error: str = ""


class _Watched(Mapping[str, Tensor]):
    """A message that knows whether it was read: a model that did not need it stays as it was evaluated before."""

    def __init__(self, message: Message) -> None:
        self._message, self.read = message, False

    def __getitem__(self, name: str) -> Tensor:
        self.read = True
        return self._message[name]

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return iter(self._message)

    def __len__(self) -> int:
        self.read = True
        return len(self._message)


@dataclass
class Bench:
    """One process's place of work: the network, and what is the same for all clients and rounds."""

    method: Method
    network: Network
    initial: Tensor
    data: FederatedData
    loss: Loss
    how: Descent
    keep_momentum: bool
    fine_tune: int
    seed: int
    participation: float = 1.0
    on_train: bool = False  # measure models on the training samples too

    def fingerprint(self) -> str:
        """A checksum of the vector that training begins with."""
        return f"{crc32(self.initial.cpu().numpy().data):08x}"

    def client(self, number: int, round: int, state: State) -> Client:
        return Client(
            number,
            round,
            self.seed,
            state,
            self.data.train(number),
            self.data.validation(number),
            self.network,
            self.initial,
            self.loss_of(number),
            self.how,
            self.keep_momentum,
            self.participation,
        )

    def outputs_of(self, number: int) -> int | None:
        """The number of outputs that count for a client: K_i where it has labels and a head of its own. The others of
        the common network then take part in nothing, as if they were not there."""
        return self.data.own_classes[number] if self.method.personal_head and self.data.own_classes else None

    def loss_of(self, number: int) -> Loss:
        if (own := self.outputs_of(number)) is None:
            return self.loss
        return lambda outputs, targets: self.loss(outputs[:, :own], targets)

    def do(self, task: Task) -> Result:
        """Do one task. Whatever goes wrong in it is said in the result: one client's failure is not the run's."""
        begin = time.perf_counter()
        self.network.reset_constants()
        round = (
            task.round if task.kind.startswith("train") else 0
        )  # an unchanged model is evaluated alike in all rounds
        kind = "evaluate" if task.kind in ("personal", "adapt") else task.kind  # the model that was evaluated
        seed_network(torch_seed(self.seed, kind, round, task.clients[0]), self.initial.device)
        try:
            result = self._evaluate_shared(task) if task.kind == "evaluate shared" else self._visit(task)
        except Exception as error:  # a method's or a network's own fault, of any kind
            result = Result(task.clients, error=brief(error))
        result.seconds = time.perf_counter() - begin
        return result

    def _visit(self, task: Task) -> Result:
        client = self.client(task.clients[0], task.round, task.state())
        message = _Watched(task.message)
        if task.kind in ("train", "train and evaluate"):
            reply = dict(self.method.train(client, message))
            _check("its reply", reply)
            _check("its new state", client.state)
            result = Result(task.clients, reply, client.state)
            if task.kind == "train":
                return result
            # What the client itself would predict with now: its own reply stands in for the next broadcast.
            result.measured = [self._measure_personal(client, {**message, **reply})]
            return result
        if task.kind == "personal":
            return Result(task.clients, {"theta": self._personal(client, message)})
        if task.kind == "adapt":
            return self._adapt(client, message)
        measured = self._measure_personal(client, message)
        return Result(task.clients, measured=[measured], used_message=message.read)

    def _personal(self, client: Client, message: Message) -> Tensor:
        return self._tuned(self.method.personal(client, message), client.id)

    def _tuned(self, theta: Tensor, number: int) -> Tensor:
        """A model after the protocol's epochs of fine-tuning. Its stream is the same in all rounds: a model that did
        not change need not be evaluated again."""
        if not self.fine_tune:
            return theta
        return self.client(number, 0, {}).descend(theta, epochs=self.fine_tune, steps=None, purpose="fine-tuning")

    def _adapt(self, client: Client, message: Message) -> Result:
        """For a client that never took part: what is measured of the model that the method gives it, and then of the
        network's first vector, before and after each epoch of fine-tuning; and the former after the last of them."""
        paths = [self._path(start, client.id) for start in (self.method.personal(client, message), self.initial)]
        measured = [next(self._measure(theta, (client.id,))) for path in paths for theta in path]
        return Result((client.id,), {"theta": paths[0][-1]}, measured=measured)

    def _path(self, theta: Tensor, number: int) -> list[Tensor]:
        """A model before and after each epoch of fine-tuning, where `_tuned` would be with so many of them."""
        client, path = self.client(number, 0, {}), [theta]
        in_epoch = step_count(client.samples, replace(self.how, epochs=1, steps=None))
        steps = count(1)

        def keep(vector: Tensor) -> None:
            if next(steps) % in_epoch == 0:
                path.append(vector.clone())

        client.descend(theta, epochs=self.fine_tune, steps=None, purpose="fine-tuning", each_step=keep)
        return path

    def _measure_personal(self, client: Client, message: Message) -> Measured:
        return next(self._measure(self._personal(client, message), (client.id,)))

    def _evaluate_shared(self, task: Task) -> Result:
        theta = task.message["theta"]
        if self.fine_tune:
            theta = self._tuned(theta, *task.clients)
        return Result(task.clients, measured=list(self._measure(theta, task.clients)))

    def _measure(self, theta: Tensor, clients: tuple[int, ...]) -> Iterator[Measured]:
        """The clients' metrics, after one pass over the validation and test samples of all of them."""
        x, lengths = self.data.held_out(clients)
        scores = outputs(self.network, theta, x)
        for number, piece in zip(clients, scores.split(lengths), strict=True):
            validation, test = self.data.validation(number)[1], self.data.test(number)[1]
            piece = self._counted(piece, number)
            measured = {
                "validation": measure(piece[: len(validation)], validation, self.loss),
                "test": measure(piece[len(validation) :], test, self.loss),
            }
            if self.on_train:
                x, y = self.data.train(number)
                measured["train"] = measure(self._counted(outputs(self.network, theta, x), number), y, self.loss)
            yield measured

    def _counted(self, scores: Tensor, number: int) -> Tensor:
        """The outputs that count for this client."""
        return scores[:, : self.outputs_of(number)] if scores.dim() == 2 else scores


def check_tensors(what: str, tensors: Message) -> None:
    """Messages and states hold named tensors, and nothing else."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{what} holds {name!r}, a {type(tensor).__name__}; messages and states are named tensors")


def _check(what: str, tensors: Message) -> None:
    """Only named, finite tensors may leave a client."""
    check_tensors(what, tensors)
    for name, tensor in tensors.items():
        if (
            tensor.is_floating_point()
            and not math.isfinite(float(tensor.detach().sum()))
            and not tensor.isfinite().all()
        ):
            raise ValueError(f"{what} has NaN or infinite numbers in {name!r}")


def copied(tensors: Message) -> State:
    """A message or state that shares no memory with anything."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}

"""Compositions `A+B`: A corrects the gradients, B says what is shared and how a client predicts.

A is a method that does nothing at a client but correct one descent (`corrects`: PGFed, FedProx, SCAFFOLD, FedDyn). It
is used as it is written, on the slice of the vector that B averages: what A takes for its descent is B's training.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from pydantic import create_model
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.method import (
    Client,
    Layout,
    Message,
    Method,
    Server,
    State,
    Total,
    Uploads,
    expected_upload,
)
from fedtailor.training.client import Steering
from fedtailor.training.descent import Correction

VELOCITY = "momentum/theta"  # of the descent, which the second method does
MARK = "/"  # between a correction's name and that of its tensor, so that the two methods' tensors do not meet


@dataclass
class Part(Client):
    """A client as the correction sees it: its model is the slice that is shared, its descent the other's training."""

    place: slice = None  # type: ignore[assignment]
    whole: Client = None  # type: ignore[assignment]
    work: Callable[[], Tensor] = None  # type: ignore[assignment]

    @property
    def layout(self) -> Layout:
        return part_of(self.whole.layout, self.place)

    def descend(  # type: ignore[override]
        self,
        theta: Tensor,
        *,
        correction: Correction | None = None,
        each_step: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        self.whole.steering = Steering(self.place, correction, each_step)
        return self.work()

    def at(self, theta: Tensor) -> Tensor:
        """Put the shared slice into the vector that the descent ended with."""
        assert self.whole.steering is not None
        assert self.whole.steering.last is not None
        last = self.whole.steering.last.clone()
        last[self.place] = theta
        return last

    def path_length(self, warm: bool = False) -> float:
        if self.whole.steering is None or self.whole.steering.settings:
            raise FedtailorError(
                "the correction computes gradients from the path of a descent with the experiment's settings, and the "
                "method that it corrects has others"
            )
        return super().path_length(warm)

    def loss_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = self.whole.loss_and_gradient(self.at(theta))
        return loss, gradient[self.place]

    def gradient(self, theta: Tensor) -> Tensor:  # type: ignore[override]
        return self.whole.gradient(self.at(theta))[self.place]


class Composition(Method):
    """The correction `outer` (A) on the slice that `inner` (B) averages. State, messages and uploads are B's, and those
    of A beside them, under its name."""

    outer: ClassVar[type[Method]]
    inner: ClassVar[type[Method]]

    def _made(self, kind: type[Method]) -> Any:
        """Make one of the two methods with its share of the parameters."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})

    @cached_property
    def A(self) -> Any:
        return self._made(self.outer)

    @cached_property
    def B(self) -> Any:
        return self._made(self.inner)

    @property
    def uploads(self) -> Uploads:  # type: ignore[override]
        return {**self.B.uploads, **{self._own(n): how for n, how in self.A.uploads.items() if n != "theta"}}

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        return {**self.B.refuses, **self.A.refuses}

    def _own(self, name: str) -> str:
        """Name a tensor of the correction."""
        return self.outer.name + MARK + name

    def _of_A(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Choose the correction's tensors, under the names that it gave them."""
        start = self._own("")
        return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

    def _of_B(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(self._own(""))}

    def _shared(self, tensors: Mapping[str, Tensor], size: int) -> Tensor:
        """Return the shared slice of a message or an upload: the end of the tensor that B averages."""
        tensor = tensors[self.B.means[0]]
        return tensor[len(tensor) - size :]

    # --- at the server ---

    def _views(self, server: Server) -> tuple[Server, Server]:
        """Return the server as each of the two sees it."""
        place = self.B.shared_slice(server.layout)
        part = replace(server, initial=server.initial[place], layout=part_of(server.layout, place))
        part.state, part.random, part.warnings = self._of_A(server.state), server.random, server.warnings
        whole = replace(server, state=self._of_B(server.state))
        return part, whole

    def _write(self, server: Server, part: Server, whole: Server) -> None:
        server.state = {**whole.state, **{self._own(name): tensor for name, tensor in part.state.items()}}

    def start(self, server: Server) -> None:
        part, whole = self._views(server)
        self.A.start(part)
        self.B.start(whole)
        self._write(server, part, whole)

    def broadcast(self, server: Server) -> Message:
        return dict(self.B.broadcast(self._views(server)[1]))

    def send_all(self, server: Server) -> Mapping[int, Message]:
        part, whole = self._views(server)
        corrections, messages = self.A.send_all(part), self.B.send_all(whole)
        self._write(server, part, whole)

        def joined(client: int) -> Iterator[tuple[str, Tensor]]:
            yield from messages[client].items()
            for name, tensor in corrections[client].items():
                if name != "theta":  # which is in the other message
                    yield self._own(name), tensor

        return {client: dict(joined(client)) for client in server.participants}

    def receive(self, server: Server, total: Total) -> None:
        part, whole = self._views(server)
        name, size = self.B.means[0], len(part.initial)
        mean = total[name]
        means = {**self._of_A(total._means), "theta": mean[len(mean) - size :]}
        weights, single = self._of_A(total._weights), self._of_A(total._single)
        self.A.receive(part, replace(total, _means=means, _weights=weights, _single=single))
        moved = torch.cat([mean[: len(mean) - size], part.state["theta"]])
        self.B.receive(whole, total.with_means({name: moved}))
        self._write(server, part, whole)

    def upload_like(self, server: Server, client: int) -> Message:
        part, whole = self._views(server)
        of_A = expected_upload(self.A, part, client)
        return {**expected_upload(self.B, whole, client), **{self._own(n): t for n, t in of_A.items() if n != "theta"}}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor | None:
        if name.startswith(start := self._own("")):
            found: Tensor | None = self.A.sent(self._of_A(message), name.removeprefix(start), like)
        else:
            found = self.B.sent(self._of_B(message), name, like)
        return found

    def join(self, server: Server, before: int) -> None:
        part, whole = self._views(server)
        self.A.join(part, before)
        self.B.join(whole, before)
        self._write(server, part, whole)

    def global_model(self, server: Server) -> Tensor | None:
        found: Tensor | None = self.B.global_model(self._views(server)[1])
        return found

    def observe(self, server: Server) -> Message:
        part, whole = self._views(server)
        return {**self.B.observe(whole), **self.A.observe(part)}

    # --- at a client ---

    def train(self, client: Client, message: Message) -> Message:
        place = self.B.shared_slice(client.layout)
        size = place.stop - place.start
        upload: State = {}
        inner = replace(client, state=self._of_B(client.state), private=client.private)

        def work() -> Tensor:
            upload.update(self.B.train(inner, self._of_B(message)))
            return self._shared(upload, size)

        known = {each.name: getattr(client, each.name) for each in fields(Client) if each.init}
        velocity = {n: t[place] for n, t in client.state.items() if n == VELOCITY}
        known |= {"state": {**self._of_A(client.state), **velocity}, "initial": client.initial[place]}
        part = Part(**known, place=place, whole=inner, work=work)
        found = self.A.train(part, {**self._of_A(message), "theta": self._shared(message, size)})
        client.state.clear()
        client.state |= inner.state | {self._own(n): t for n, t in part.state.items() if n != VELOCITY}
        return {**upload, **{self._own(n): t for n, t in found.items() if n != "theta"}}

    def extra_tensors(self, layout: Layout) -> State:
        return dict(self.B.extra_tensors(layout))

    def personal_model(self, client: Client, message: Message) -> Tensor:
        found: Tensor = self.B.personal_model(replace(client, state=self._of_B(client.state)), self._of_B(message))
        return found


def part_of(layout: Layout, place: slice) -> Layout:
    """Make the layout of a slice of the vector, which is a model of its own."""
    size = place.stop - place.start
    places = [slice(max(b.start, place.start), min(b.stop, place.stop)) for b in layout.buffers_in(place)]
    buffers = tuple(slice(b.start - place.start, b.stop - place.start) for b in places)
    return Layout(size, slice(0, size), slice(size, size), buffers=buffers)


@cache
def compose(outer: type[Method], inner: type[Method]) -> type[Method]:
    """Make the class of a composition, with the parameters of both methods."""
    name, corrected = f"{outer.name}+{inner.name}", inner()
    if not outer.corrects:
        raise FedtailorError(
            f"{name}: {outer.title} does more than to correct gradients; a composition begins with pgfed, pgfedmo, "
            "fedprox, scaffold or feddyn."
        )
    if len(corrected.means) != 1 or corrected.predicts_by_more or corrected.shared_slice(TRIED) is None:
        raise FedtailorError(
            f"{name}: {inner.title} does not average one slice of the model for {outer.title} to correct; a "
            "composition ends with fedavg, fedper, fedrep, fedrod, fedbabu, lg-fedavg, apfl or ditto."
        )
    if both := sorted(set(outer.model_fields) & set(inner.model_fields)):
        raise FedtailorError(f"{name}: both methods have a parameter {both[0]!r}, which would mean two things.")
    fields_of: dict[str, Any] = {n: (f.annotation, f) for k in (inner, outer) for n, f in k.model_fields.items()}
    kind = create_model(
        f"{outer.__name__}+{inner.__name__}",
        __base__=Composition,
        __doc__=f"{outer.title} on the part that {inner.title} shares. {LIMITS}",
        **fields_of,
    )
    kind.outer, kind.inner, kind.name, kind.title = outer, inner, name, f"{outer.title} + {inner.title}"
    kind.paper, kind.search = f"{outer.paper}; {inner.paper}", {**outer.search, **inner.search}
    kind.shared_part, kind.own_part = f"{inner.shared_part}, as {outer.title} corrects it", inner.own_part
    kind.personal_head = inner.personal_head
    return kind


TRIED = Layout(2, slice(0, 1), slice(1, 2))  # to find out whether a slice is shared at all
LIMITS = "Limits: those of the first method, with the second in the place of FedAvg."

"""The sites of one place: their data, their states, and the order in which states become current.

In a simulation all clients live in one place; at a hospital it is one. A transport hands requests to `begin`, `work`
and `finish`, of which only `work` may run in another process: it has no effect on anything here.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from fedtailor._common.errors import FedtailorError, explained
from fedtailor.client.site import SharedWriteError, Site, Terms, measure_together
from fedtailor.data import FederatedData
from fedtailor.messages import (
    NEVER,
    Adapt,
    Declaration,
    Evaluate,
    EvaluateShared,
    Personal,
    Reply,
    Request,
    State,
    Train,
    copied,
)
from fedtailor.messages.store import Store
from fedtailor.training.inputs import join
from fedtailor.training.isolation import changes
from fedtailor.training.streams import seed_network, torch_seed

# Held-out samples of clients that are evaluated together: as many as make this number of requests, within these bounds.
# The number of workers does not count, so that metrics do not depend on it.
SHARED_REQUESTS, FEWEST, MOST = 16, 64, 1024


@dataclass
class Sites:
    """All clients of this place. Nobody but the owner of a transport holds a reference to it."""

    data: FederatedData
    terms: Terms
    store: Store

    @classmethod
    def at(cls, data: FederatedData, terms: Terms, directory: Path | None, on_disk: bool = False) -> "Sites":
        """Sites whose states are checkpointed in a directory, if there is one."""
        return cls(data, terms, Store(directory, "client", on_disk, terms.initial.device))

    def site(self, number: int) -> Site:
        return Site(number, self.data.client(number), self.terms)

    def declare(self) -> list[Declaration]:
        """Collect the declarations of the training clients."""
        return [self.site(number).declare() for number in range(self.data.n_clients - len(self.data.new))]

    def without_states(self) -> "Sites":
        """The same sites without their states: all that `work` needs, to be sent to where it is done."""
        self.terms.network.reset(self.terms.initial)
        return replace(self, store=Store(None, "client"))

    # --- requests ---

    def split(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Cut requests that concern several clients into pieces for one pass each."""
        for request in requests:
            if isinstance(request, EvaluateShared):
                for group in self._groups(request.clients):
                    yield replace(request, client=group[0], others=group[1:])
            else:
                yield request

    def size(self, request: Request) -> int:
        """The number of samples that a request goes through."""
        first, last = (1, 3) if isinstance(request, Evaluate | EvaluateShared) else (0, 1)
        places = [self.data.places[client] for client in request.clients]
        return sum(place[last] - place[first] for place in places)

    def begin(self, request: Request) -> State:
        """Get the state that a request is to work with: the version that the server names, whatever came after it."""
        if isinstance(request, EvaluateShared | Adapt):
            return {}
        return self.store.at(request.client, request.version)

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        """Do one request. An exception becomes the reply's error: one client's failure is not the run's."""
        begin = time.perf_counter()
        terms, before = self.terms, self._changes()
        terms.network.reset(terms.initial)  # what the last client left there is not for this one to see
        seed_network(torch_seed(terms.seed, *self._stream(request)), terms.initial.device)
        try:
            if isinstance(request, EvaluateShared):
                reply, state = self._evaluate_shared(request), {}
            else:
                reply, state = self.site(request.client).work(request, state)
        except Exception as error:  # a method's or a network's own fault, of any kind
            if terms.debug:
                name = self.data.names[request.client]
                error.add_note(f"In {type(terms.method).__name__}, round {request.round}, client {name}.")
                raise
            reply, state = Reply(request.clients, error=explained(error), cause=error), {}
        if (after := self._changes()) != before:
            wrote = SharedWriteError(self._wrote(request, next(name for name in before if before[name] != after[name])))
            if terms.debug:
                raise wrote
            reply, state = Reply(request.clients, error=str(wrote), cause=wrote), {}
        reply.differentiated = terms.network.differentiated
        reply.seconds = time.perf_counter() - begin
        return reply, state

    def finish(self, request: Request, reply: Reply, state: State) -> Reply:
        """Keep the new state as a proposal, which counts from the server's `accept` on."""
        if isinstance(reply.cause, SharedWriteError):
            raise reply.cause
        if isinstance(request, Train) and not reply.error:
            reply.version = self.store.propose(request.client, state, request.round)
        return reply

    def handle(self, request: Request) -> Reply:
        """Answer one request here and now. Clients get copies and hand out copies, as if they were elsewhere."""
        state = copied(self.begin(request))
        reply, state = self.work(replace(request, message=copied(request.message)), state)
        reply.upload = copied(reply.upload)
        return self.finish(request, reply, copied(state))

    def _changes(self) -> dict[str, int | None]:
        """Count the changes in place of all that clients have in common and may only read."""
        names = ("the inputs of its samples", "the targets of its samples", "client.initial")
        return dict(zip(names, changes(self.data.x, self.data.y, self.terms.initial), strict=True))

    def _wrote(self, request: Request, what: str) -> str:
        who = f"{type(self.terms.method).__name__}, round {request.round}: client {self.data.names[request.client]}"
        return f"{who} wrote into {what}, which is for reading only: change a copy (clone)."

    def _stream(self, request: Request) -> tuple[str | int, ...]:
        """The random stream of a request: by round where it trains; an unchanged model is evaluated alike in all."""
        if isinstance(request, Train):
            return ("train and evaluate" if request.measure else "train", request.round, request.client)
        return ("evaluate shared" if isinstance(request, EvaluateShared) else "evaluate", 0, request.client)

    def _evaluate_shared(self, request: EvaluateShared) -> Reply:
        sites = [self.site(client) for client in request.clients]
        theta = request.message["theta"]
        if self.terms.fine_tune:
            theta = sites[0].fine_tuned(theta)
        held_out = join([site.data.held_out for site in sites])
        return Reply(request.clients, measured=list(measure_together(sites, theta, held_out)))

    def _groups(self, clients: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Neighbouring clients, as many as fit one pass; one by one where each fine-tunes the model first."""
        group: list[int] = []
        samples, held_out = 0, self._held_out
        fit = min(max(sum(held_out[client] for client in clients) // SHARED_REQUESTS, FEWEST), MOST)
        for client in clients:
            samples += held_out[client]
            if group and (self.terms.fine_tune or samples > fit):
                yield tuple(group)
                group, samples = [], held_out[client]
            group.append(client)
        if group:
            yield tuple(group)

    @cached_property
    def _held_out(self) -> list[int]:
        """The number of validation and test samples of each client."""
        return [place[3] - place[1] for place in self.data.places]

    # --- the commit rule ---

    def accept(self, clients: Sequence[int]) -> None:
        """Make the states that these clients proposed current: the server has accepted their round."""
        self.store.accept(clients)

    def save(self) -> None:
        """Make the current states durable."""
        self.store.save()

    def prune(self) -> None:
        """Remove saved states that are no longer current: the server has written down the new ones."""
        self.store.prune()

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Go back to the states that the server's checkpoint names."""
        self.store.restore(versions, sweep)

    def personal_model(self, client: int, round: int, message: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The model that a client predicts with now."""
        version = self.store.current.get(client, NEVER)
        reply = self.handle(Personal(round, client, message, version))
        if reply.error:
            raise FedtailorError(
                f"{type(self.terms.method).__name__}, client {self.data.names[client]}: {reply.error}."
            ) from reply.cause
        return reply.upload["theta"]

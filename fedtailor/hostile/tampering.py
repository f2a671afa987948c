"""Attacks by uploads: a transport on which hostile clients reply with something else than what they computed.

They train honestly first. The change of an upload is against what the client was sent (`Method.sent`); where nothing of
that name was sent, the upload itself is the change. Weights of means, and what is uploaded for the record alone, stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from fedtailor.attack import Attack
from fedtailor.local.streams import torch_stream
from fedtailor.messages import Declaration, Reply, Request, State, Train
from fedtailor.method import Each, Method
from fedtailor.store import Store
from fedtailor.transport import Transport

FACTORS = {"sign-flip": 1.0, "scaling": 10.0, "gaussian": 1.0}
Carry = Callable[[Request, Reply], Reply]
Change = Callable[[str, Tensor], Tensor]  # of an upload's name and its honest change: the hostile change


def as_it_is(request: Request, reply: Reply) -> Reply:
    """Hand over a reply within one process."""
    return reply


class Tampering:
    """A transport that changes the uploads of hostile clients, and passes on all else.

    `memory` keeps what is replayed. `carry` brings a changed reply to the server, as the transport would.
    """

    def __init__(
        self,
        inner: Transport,
        attack: Attack,
        hostile: Sequence[int],
        method: Method,
        seed: int,
        memory: Store,
        carry: Carry = as_it_is,
    ) -> None:
        self._inner, self._attack, self._hostile, self._method = inner, attack, frozenset(hostile), method
        self._seed, self._memory, self._carry = seed, memory, carry

    @property
    def workers(self) -> int:
        return self._inner.workers

    @workers.setter
    def workers(self, number: int) -> None:
        self._inner.workers = number

    def declare(self) -> list[Declaration]:
        """Ask the sites to join."""
        return self._inner.declare()

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come. Hostile clients that collude reply last, together."""
        training = [request for request in requests if isinstance(request, Train)]
        mine = {request.client: request for request in training if request.client in self._hostile}
        colluding: dict[int, Reply] = {}
        for reply in self._inner.ask(requests):
            request = mine.get(reply.clients[0])
            if request is None or reply.error or not reply.upload:
                yield reply
            elif self._attack.kind == "little":
                colluding[request.client] = reply
            else:
                upload = self._tampered(request, reply.upload, len(training), len(mine))
                yield self._carry(request, replace(reply, upload=upload))
        uploads = {client: colluding[client].upload for client in sorted(colluding)}
        for client, upload in self._little(mine, uploads, len(training)).items():
            yield self._carry(mine[client], replace(colluding[client], upload=upload))

    def _tampered(self, request: Train, upload: State, participants: int, hostile: int) -> State:
        """Make the upload of a hostile client from its honest one."""
        kind = self._attack.kind
        match kind:
            case "sign-flip":
                return self._changed(request, upload, lambda _, change: -self._factor * change)
            case "scaling":
                return self._changed(request, upload, lambda _, change: self._factor * change)
            case "gaussian":
                stream = torch_stream(self._seed, "hostile noise", request.round, request.client)
                return self._changed(request, upload, lambda _, change: _noise_like(change, self._factor, stream))
            case "backdoor":
                factor = self._attack.factor or participants / hostile
                return self._changed(request, upload, lambda _, change: factor * change)
            case "nan":
                return {name: x * torch.nan if x.is_floating_point() else x for name, x in upload.items()}
            case "wrong-shape":
                return {name: functional.pad(x.flatten(), (0, 1)) for name, x in upload.items()}
            case "wrong-name":
                return {f"not-{name}": x for name, x in upload.items()}
            case "replay":
                return self._replayed(request, upload)
        return upload  # trained on poisoned samples

    @property
    def _factor(self) -> float:
        return self._attack.factor or FACTORS[self._attack.kind]

    @property
    def _names(self) -> list[str]:
        """The uploads that the method learns from."""
        uploads = self._method.uploads.items()
        return [name for name, how in uploads if not (isinstance(how, Each) and how.record)]

    def _changed(self, request: Request, upload: State, make: Change) -> State:
        """Replace the change of each upload of floating-point numbers."""
        made = dict(upload)
        for name in self._names:
            if (x := upload[name]).is_floating_point():
                sent = self._method.sent(request.message, name, x)
                made[name] = make(name, x) if sent is None else sent + make(name, x - sent)
        return made

    def _little(
        self, requests: Mapping[int, Train], uploads: Mapping[int, State], participants: int
    ) -> dict[int, State]:
        """Compute "a little is enough": all colluding clients upload the mean of their honest changes, less z standard
        deviations of these, number by number."""
        if not uploads:
            return {}
        z = self._attack.factor or little_z(participants, len(requests))
        honest: dict[str, list[Tensor]] = {name: [] for name in self._names}

        def noted(name: str, change: Tensor) -> Tensor:
            honest[name].append(change)
            return change

        for client, upload in uploads.items():
            self._changed(requests[client], upload, noted)
        common = {name: _mean_less_deviations(changes, z) for name, changes in honest.items() if changes}
        return {
            client: self._changed(requests[client], upload, lambda name, change: common[name][change.shape])
            for client, upload in uploads.items()
        }

    def _replayed(self, request: Train, upload: State) -> State:
        """The upload of the first round that the client took part in. What a killed run kept of a round that is
        done again does not count."""
        memory, client = self._memory, request.client
        if client not in memory.current:
            before = {version for version in memory.saved(client) if version < request.round}
            memory.forget(client, before)
            if before:
                memory.recall(client, min(before))
        if client in memory.current:
            return dict(memory.get(client))
        memory.propose(client, upload, request.round)
        return upload

    # --- the commit rule ---

    def accept(self, clients: Sequence[int]) -> None:
        """Tell these sites that their round counts."""
        self._inner.accept(clients)
        self._memory.accept(clients)

    def save(self) -> None:
        """Make the sites' states durable, and what is replayed."""
        self._inner.save()
        self._memory.save()

    def prune(self) -> None:
        """Tell the sites that the server's checkpoint names the saved states."""
        self._inner.prune()
        self._memory.prune()

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Go back to the states that a checkpoint names. What is replayed is read when a client trains again."""
        self._inner.restore(versions, sweep)
        self._memory.restore({}, sweep=False)

    def close(self) -> None:
        """End what was started."""
        self._inner.close()


def _noise_like(change: Tensor, factor: float, stream: torch.Generator) -> Tensor:
    """Gaussian noise whose squared norm is (factor · ‖change‖)² in expectation."""
    noise = torch.randn(change.shape, generator=stream, dtype=change.dtype).to(change.device)
    return noise * (factor * float(change.norm()) / sqrt(max(change.numel(), 1)))


def _mean_less_deviations(changes: Sequence[Tensor], z: float) -> dict[torch.Size, Tensor]:
    """Compute μ − zσ of the changes, for each shape that they have; σ is that of a population."""
    shapes = {change.shape: torch.stack([x for x in changes if x.shape == change.shape]) for change in changes}
    return {shape: rows.mean(0) - z * rows.std(0, correction=0) for shape, rows in shapes.items()}


def little_z(participants: int, hostile: int) -> float:
    """Compute the number of deviations that stays inside of the honest majority (Baruch et al. 2019, algorithm 3):
    Φ(z) = (n − f − s) / (n − f), where s = ⌊n/2 + 1⌋ − f honest clients are further away than the hostile ones. With
    too few hostile clients for that, z is 0; with more than half of all, one honest client is enough."""
    from scipy.stats import norm

    honest = participants - hostile
    if honest < 2:
        return 0.0
    supporters = max(1, participants // 2 + 1 - hostile)
    return max(0.0, float(norm.ppf((honest - supporters) / honest)))

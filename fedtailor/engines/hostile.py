"""Hostile clients of a simulation, for tests and studies: what they train on, and what they upload.

Neither the server nor the sites know of an attack: whoever puts a simulation together gives hostile clients poisoned
training samples (flipped labels, the trigger of a backdoor), or a transport on which their uploads are changed. Those
train honestly first. The change of an upload is against what the client was sent (`Method.sent`); where nothing of that
name was sent, the upload itself is the change. Weights of means, and what is uploaded for the record alone, stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from fedtailor._common.errors import FedtailorError
from fedtailor.data import FederatedData
from fedtailor.experiment import Experiment
from fedtailor.experiment.attack import Attack
from fedtailor.messages import Reply, Request, State, Train
from fedtailor.messages.store import Store
from fedtailor.messages.transport import Relay, Transport
from fedtailor.method import Each, Method
from fedtailor.server.aggregation.rules import squared_distances
from fedtailor.training.inputs import sample_shape
from fedtailor.training.streams import numpy_stream, torch_stream

TARGET = 0  # the class that a backdoor leads to
PATCH = 3  # pixels on a side of the trigger, or features
FACTORS = {"sign-flip": 1.0, "scaling": 10.0, "gaussian": 1.0, "inner-product": 10.0}
COLLUDING = ("little", "min-max", "inner-product")  # hostile clients upload one change, made of those that they know
OMNISCIENT = ("min-max", "inner-product")  # and they know those of all honest participants
Carry = Callable[[Request, Reply], Reply]
Change = Callable[[str, Tensor], Tensor]  # of an upload's name and its honest change: the hostile change


# --- samples ---


@dataclass(frozen=True)
class Trigger:
    """The trigger of a backdoor: a corner of an image, or the first features of a vector, set to `value`."""

    value: Tensor  # one number for images, one a feature for vectors

    def __call__(self, x: Tensor) -> Tensor:
        """Copy samples, and put the trigger on the copies."""
        marked = x.clone()
        if x.dim() == 4:
            marked[:, :, -PATCH:, -PATCH:] = self.value
        else:
            marked[:, :PATCH] = self.value
        return marked


def hostile_clients(experiment: Experiment, data: FederatedData) -> list[int]:
    """The numbers of the hostile clients: among those that trained from the first round on. Refuse an attack that these
    data do not allow."""
    attack = Attack.parse(experiment.attack)
    _check_samples(attack.kind, data)
    training = data.n_at_first
    if isinstance(attack.clients, tuple) and attack.clients[-1] >= training:
        raise FedtailorError(
            f"The attack names client {attack.clients[-1]}, but training clients are numbered from 0 to {training - 1}."
        )
    hostile = attack.hostile(training, experiment.seed)
    if len(hostile) == training:
        raise FedtailorError("The attack leaves no honest client to measure: give it fewer clients.")
    return hostile


def _check_samples(kind: str, data: FederatedData) -> None:
    if kind not in ("label-flip", "backdoor"):
        return
    if data.targets != "classes":
        raise FedtailorError(f"The attack {kind} is for samples of one class each: choose another for these data.")
    x = data.x
    fits = isinstance(x, Tensor) and x.is_floating_point() and len(sample_shape(x)) in (1, 3)
    if kind == "backdoor" and not fits:
        raise FedtailorError(
            "The attack backdoor is for images or vectors of numbers that are held in memory: choose another for these "
            "data."
        )


def poisoned(data: FederatedData, attack: Attack, hostile: Sequence[int], seed: int) -> FederatedData:
    """Return the data as the sites have them: the hostile clients' training samples are poisoned, in copies of what is
    changed. All else has the same bits."""
    if attack.kind == "label-flip":
        return replace(data, y=_flipped(data, hostile))
    if attack.kind == "backdoor":
        return _with_backdoor(data, hostile, seed)
    return data


def _flipped(data: FederatedData, hostile: Sequence[int]) -> Tensor:
    """The targets, with y → K − 1 − y where hostile clients train; K is the client's own where labels are."""
    y = data.y.clone()
    for client in hostile:
        start, end, *_ = data.places[client].tolist()
        classes = data.own_classes[client] if data.own_classes else len(data.classes)
        y[start:end] = classes - 1 - y[start:end]
    return y


def _with_backdoor(data: FederatedData, hostile: Sequence[int], seed: int) -> FederatedData:
    """Half of each hostile client's training samples, drawn by a stream of its own, carry trigger and target."""
    assert isinstance(data.x, Tensor)
    trigger, x, y = find_trigger(data, hostile), data.x.clone(), data.y.clone()
    for client in hostile:
        start, end, *_ = data.places[client].tolist()
        drawn = numpy_stream(seed, "backdoor", client).permutation(end - start)[: (end - start + 1) // 2]
        rows = start + torch.from_numpy(drawn).to(y.device)
        x[rows], y[rows] = trigger(x[rows]), TARGET
    return replace(data, x=x, y=y)


def find_trigger(data: FederatedData, hostile: Sequence[int]) -> Trigger:
    """The trigger that the hostile clients agree on: the largest values in their own training samples."""
    assert isinstance(data.x, Tensor)
    seen = torch.cat([data.x[start:end] for start, end, *_ in data.places[hostile]])
    return Trigger(seen.max() if seen.dim() == 4 else seen[:, :PATCH].amax(0))


# --- uploads ---


def as_it_is(request: Request, reply: Reply) -> Reply:
    """Hand over a reply within one process."""
    return reply


class Tampering(Relay):
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
        super().__init__(inner)
        self._attack, self._hostile, self._method = attack, frozenset(hostile), method
        self._seed, self._memory, self._carry = seed, memory, carry

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Send requests and yield the replies as they come. Hostile clients that collude reply last, together."""
        training = {request.client: request for request in requests if isinstance(request, Train)}
        mine = training.keys() & self._hostile
        colluding: dict[int, Reply] = {}
        overheard: dict[int, State] = {}
        for reply in self._inner.ask(requests):
            request = training.get(reply.clients[0])
            if request is None or reply.error or not reply.upload:
                yield reply
            elif request.client not in mine:
                if mine and self._attack.kind in OMNISCIENT:
                    overheard[request.client] = reply.upload
                yield reply
            elif self._attack.kind in COLLUDING:
                colluding[request.client] = reply
            else:
                upload = self._tampered(request, reply.upload, len(training), len(mine))
                yield self._carry(request, replace(reply, upload=upload))
        uploads = {client: colluding[client].upload for client in sorted(colluding)}
        z = little_z(len(training), len(mine)) if self._attack.kind == "little" else 0.0
        for client, upload in self._colluded(training, uploads, overheard, self._attack.factor or z).items():
            yield self._carry(training[client], replace(colluding[client], upload=upload))

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

    def _colluded(
        self, requests: Mapping[int, Train], uploads: Mapping[int, State], overheard: Mapping[int, State], z: float
    ) -> dict[int, State]:
        """Make the uploads of colluding clients from their honest ones: of each upload all have one change, made of the
        changes that they know. Those are their own, if they overheard nobody."""
        known: dict[str, dict[torch.Size, list[Tensor]]] = {name: {} for name in self._names}

        def noted(name: str, change: Tensor) -> Tensor:
            known[name].setdefault(change.shape, []).append(change)
            return change

        for client, upload in sorted((overheard or uploads).items()):
            self._changed(requests[client], upload, noted)
        common = {
            (name, shape): self._in_common(torch.stack(changes), z)
            for name, shapes in known.items()
            for shape, changes in shapes.items()
            if uploads
        }
        return {
            client: self._changed(requests[client], upload, lambda name, own: common.get((name, own.shape), own))
            for client, upload in uploads.items()
        }

    def _in_common(self, changes: Tensor, z: float) -> Tensor:
        """Compute the change that colluding clients upload from the rows of those that they know."""
        if self._attack.kind == "little":  # σ is that of a population
            return changes.mean(0) - z * changes.std(0, correction=0)
        return -self._factor * changes.mean(0) if self._attack.kind == "inner-product" else min_max(changes)

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

    def accept(self, clients: Sequence[int], /) -> None:
        """Tell these sites that their round counts."""
        super().accept(clients)
        self._memory.accept(clients)

    def save(self) -> None:
        """Make the sites' states durable, and what is replayed."""
        super().save()
        self._memory.save()

    def prune(self) -> None:
        """Tell the sites that the server's checkpoint names the saved states."""
        super().prune()
        self._memory.prune()

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Go back to the states that a checkpoint names. What is replayed is read when a client trains again."""
        super().restore(versions, sweep)
        self._memory.restore({}, sweep=False)


def _noise_like(change: Tensor, factor: float, stream: torch.Generator) -> Tensor:
    """Gaussian noise whose squared norm is (factor · ‖change‖)² in expectation."""
    noise = torch.randn(change.shape, generator=stream, dtype=change.dtype).to(change.device)
    return noise * (factor * float(change.norm()) / sqrt(max(change.numel(), 1)))


def min_max(rows: Tensor) -> Tensor:
    """Compute μ − γμ with the largest γ at which no row is further away than two rows are from each other
    (Shejwalkar & Houmansadr 2021, with the unit vector as perturbation).

    The paper searches for γ; but ‖μ − γμ − x‖² = D² is quadratic in it, and the smallest root of all rows is known.
    """
    x = rows.reshape(len(rows), rows[0].numel()).cpu().double()
    mean = x.mean(0)
    away, length = mean - x, mean @ mean
    if not length:
        return torch.zeros_like(rows[0])
    along, room = away @ mean, squared_distances(x).max() - away.square().sum(1)
    gamma = (((along.square() + length * room.clamp(min=0)).sqrt() + along) / length).min()
    return (mean - gamma * mean).to(rows).view(rows.shape[1:])


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

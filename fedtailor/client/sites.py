"""The client's side: a site is one client with its own data, and does its work on request; the sites of one place share
its memory and its network, and keep their states in the order in which they become current.

In a simulation all clients live in one place; at a hospital it is one. Workers get requests by `begin`, `work` and
`finish`, of which only `work` may run in another process: it has no effect on anything here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count, repeat
from pathlib import Path

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, explained
from fedtailor.client.group import Group, parts_of
from fedtailor.client.terms import Terms
from fedtailor.data import ClientData, FederatedData
from fedtailor.experiment.fairness import LOSS
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import (
    NEVER,
    Adapt,
    Declaration,
    Evaluate,
    EvaluateShared,
    Measured,
    Message,
    Personal,
    Predict,
    Reply,
    Request,
    State,
    Together,
    Train,
    check_finite,
    copied,
    joined,
    parted,
)
from fedtailor.messages.store import Store
from fedtailor.method import check_upload
from fedtailor.privacy.clipping import clipped
from fedtailor.privacy.noise import Noise
from fedtailor.training.client import Client
from fedtailor.training.descent import step_count
from fedtailor.training.inputs import Inputs, changes, join
from fedtailor.training.isolation import matmul_precision
from fedtailor.training.layout import bounded
from fedtailor.training.predictions import measure, outputs
from fedtailor.training.private_gradients import Private
from fedtailor.training.schedule import factor_at
from fedtailor.training.streams import seed_network, torch_seed, torch_stream

Predictor = Callable[[Inputs], Tensor]  # from inputs to outputs

# Held-out samples of clients that are evaluated together: as many as make this number of requests, within these bounds.
# The number of workers does not count, so that metrics do not depend on it.
SHARED_REQUESTS, FEWEST, MOST = 16, 64, 1024
MOST_SITES = 4096  # that are held in memory: some kilobytes each, beside their samples


class SharedWriteError(FedtailorError):
    """A client's work wrote into what other work has in common with it. In one process all would go on with that, in
    several only those of the same worker: there is no result that all would agree on."""


@dataclass
class Site:
    """One client's place: its number in the federation, its data, the experiment's terms."""

    number: int
    data: ClientData
    terms: Terms
    # Number of output units used for this client: K_i if labels and head are per client, else None (all). Unused units
    # get no gradient and are never predicted.
    n_outputs: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.n_outputs = self.data.n_classes if self.terms.method.personal_head else None

    def client(self, round: int, state: State, share: float = 1.0) -> Client:
        """The client as a method sees it, for a share of its steps. In round 0, for fine-tuning, its learning rate is
        the experiment's own."""
        terms, loss, n = self.terms, self.terms.training_loss, self.n_outputs
        factor = 1.0 if terms.schedule == "constant" else factor_at(terms.schedule, terms.rounds, round)
        return Client(
            self.number,
            round,
            terms.seed,
            state,
            self.data.train,
            self.data.validation,
            terms.network,
            terms.initial.detach(),  # one that nobody else has, of the same memory
            loss if n is None else lambda outputs, targets: loss(outputs[:, :n], targets),
            replace(terms.optimizer, factor=factor, share=share),
            terms.keep_momentum,
            terms.participation,
            terms.augmentation,
        )

    def noise(self, round: int) -> Noise:
        """The source of all noise for privacy that the client draws in a round."""
        terms = self.terms
        return Noise() if terms.secret_noise else Noise(torch_stream(terms.seed, "privacy", round, self.number))

    def private(self, privacy: Privacy, round: int) -> Private | None:
        """The private gradients of a round's training; None where samples have no privacy of their own."""
        if privacy.level != "sample":
            return None
        assert privacy.noise is not None  # it was found before the run
        return Private(privacy.bound, privacy.noise, self.noise(round))

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        """Do what a request asks, and return the reply and the state after it."""
        client = self.client(request.round, state, request.share if isinstance(request, Train) else 1.0)
        match request:
            case Train():
                reply = self._train(client, request)
            case Evaluate():
                reply = Reply((self.number,), measured=[self.measure(self.predictor(client, request.message))])
            case Personal():
                reply = Reply((self.number,), {"theta": self.personal_model(client, request.message)})
            case Predict():
                scores = self.predictor(client, request.message)(request.inputs)
                reply = Reply((self.number,), {"outputs": self.counted(scores)})
            case Adapt():
                reply = self._adapt(client, request.message)
            case _:
                raise TypeError(f"a site does not answer {type(request).__name__}")
        return reply, client.state

    def _train(self, client: Client, request: Train) -> Reply:
        method, privacy, message = self.terms.method, self.terms.privacy, request.message
        before = copied(client.state) if self.terms.fair else {}
        if privacy is not None:
            client.private = self.private(privacy, request.round)
        upload = dict(method.train(client, message))
        client.private = None  # what follows stays here
        check_upload(method, upload)  # the site's door: nothing leaves that is not declared
        check_finite({"its upload": upload, "its new state": client.state}, self.terms.network.fetched)
        reply = Reply((self.number,), self._leaving(privacy, client, message, upload))
        if request.measure:
            # What the client itself would predict with now: its own upload stands in for the next broadcast.
            reply.measured = [self.measure(self.predictor(client, {**message, **upload}))]
        if self.terms.fair:
            reply.upload[LOSS] = self._loss(request, before)
        return reply

    def _loss(self, request: Train, state: State) -> Tensor:
        """The training loss of the model that the client would have predicted with before it trained. It is computed
        afterwards, on a copy of the state: so it moves no random stream of the training."""
        terms, (x, y) = self.terms, self.data.train
        trained = terms.network.differentiated
        terms.network.reset(terms.initial)
        seed_network(torch_seed(terms.seed, "fairness", request.round, self.number), terms.initial.device)
        client = self.client(request.round, state)
        scores = self.predictor(client, request.message)(x)
        terms.network.differentiated += trained
        with torch.no_grad():
            return torch.tensor(float(client.loss_function(scores, y)), dtype=torch.float64)

    def _leaving(self, privacy: Privacy | None, client: Client, message: Message, upload: State) -> State:
        """Return the upload as it leaves: in a private or secure run without what is for the record alone; where the
        server cannot bound a change, bounded; and where clients add the noise, their change is clipped, and has its
        share of it."""
        method = self.terms.method
        if privacy is None and not self.terms.secure:
            return upload
        leaving = {name: tensor for name, tensor in upload.items() if name not in method.recorded}
        if self.terms.norm_bound is not None:
            for name in method.means:
                sent = method.sent(message, name, leaving[name])
                leaving[name] = bounded(leaving[name], sent, self.terms.norm_bound, self.terms.network.layout)
        if privacy is None or privacy.by != "clients":
            return leaving
        assert privacy.noise is not None  # it was found before the run
        share, noise = privacy.noise * privacy.bound / self.terms.per_round**0.5, self.noise(client.round)
        for name, change in clipped(method.changes(message, leaving), privacy.bound).items():
            sent = method.sent(message, name, change)
            noisy = change + noise.normal(change, share)
            leaving[name] = noisy if sent is None else sent + noisy
        return leaving

    def personal_model(self, client: Client, message: Message) -> Tensor:
        """The model that the client predicts with, fine-tuned if the evaluation says so."""
        return self.fine_tuned(self.terms.method.personal_model(client, message))

    def predictor(self, client: Client, message: Message) -> Predictor:
        """The function by which the client predicts now: its outputs for inputs."""
        method = self.terms.method
        if method.predicts_by_more:
            return partial(method.predict, client, message)
        return self.network_at(self.personal_model(client, message))

    def network_at(self, theta: Tensor) -> Predictor:
        """The network with these values, as a function."""
        return partial(outputs, self.terms.network, theta)

    def fine_tuned(self, theta: Tensor) -> Tensor:
        """Fine-tune a model as the evaluation asks."""
        return self.client(0, {}).fine_tuned(theta, self.terms.fine_tune)

    def _adapt(self, client: Client, message: Message) -> Reply:
        """Fine-tune a new client's model, and a freshly initialised one as baseline. Reply with the metrics of both
        before training and after every epoch, and the adapted model."""
        starts = (self.terms.method.personal_model(client, message), self.terms.initial)
        paths = [self.fine_tuning_path(start) for start in starts]
        measured = [self.measure(self.network_at(theta)) for path in paths for theta in path]
        return Reply((self.number,), {"theta": paths[0][-1]}, measured=measured)

    def fine_tuning_path(self, theta: Tensor) -> list[Tensor]:
        """Return a model before and after each epoch of fine-tuning."""
        client, path = self.client(0, {}), [theta]
        in_epoch = step_count(client.n_samples, replace(self.terms.optimizer, epochs=1, steps=None))
        steps = count(1)

        def keep(vector: Tensor) -> None:
            if next(steps) % in_epoch == 0:
                path.append(vector.clone())

        client.descend(theta, epochs=self.terms.fine_tune, steps=None, purpose="fine-tuning", each_step=keep)
        return path

    def measure(self, predict: Predictor, scores: Tensor | None = None) -> Measured:
        """Measure predictions on this site's held-out samples; `scores` are those for them, where they are known."""
        terms, data, y = self.terms, self.data, self.data.validation[1]
        if scores is None:
            scores = predict(data.held_out)
        parts = {"validation": (scores[: len(y)], y), "test": (scores[len(y) :], data.test[1])}
        if terms.on_train:
            parts["train"] = predict(data.train[0]), data.train[1]
        if self.n_outputs is not None:
            parts = {split: (self.counted(found), y) for split, (found, y) in parts.items()}
        settings = (terms.loss, terms.multi_label, terms.own_metric, terms.more_metrics, terms.network.fetched)
        return {split: measure(found, y, *settings) for split, (found, y) in parts.items()}

    def counted(self, scores: Tensor) -> Tensor:
        """Return the outputs that are used for this client."""
        return scores[:, : self.n_outputs] if scores.dim() == 2 else scores


def measure_together(sites: Sequence[Site], theta: Tensor) -> list[Measured]:
    """Measure one model for several sites of one place, after one pass over all their held-out samples. Fine-tuned, it
    is another model for each, and they are asked one by one."""
    if sites[0].terms.fine_tune:
        theta = sites[0].fine_tuned(theta)
    held_out = [site.data.held_out for site in sites]
    scores = outputs(sites[0].terms.network, theta, join(held_out)).split([len(x) for x in held_out])
    return [site.measure(site.network_at(theta), piece) for site, piece in zip(sites, scores, strict=True)]


def declarations(data: FederatedData, fingerprint: str) -> list[Declaration]:
    """Make the declarations of the training clients of these data; `fingerprint` is that of network and experiment."""
    own_classes = data.own_classes or repeat(None)
    training = zip(data.names[: data.n_training], data.n_samples.tolist(), own_classes, strict=False)
    return [Declaration(name, n_samples, own, fingerprint) for name, n_samples, own in training]


@dataclass
class Sites:
    """All clients of this place, and the transport that does their work in this process, one request after the other.
    The server holds no reference to it."""

    data: FederatedData
    terms: Terms
    store: Store
    _sites: dict[int, Site] = field(default_factory=dict, init=False)
    group: Group = field(init=False)  # those that train as one computation, where some do

    def __post_init__(self) -> None:
        store = self.store  # which has the commit rule
        self.accept, self.save, self.prune, self.restore = store.accept, store.save, store.prune, store.restore
        self.group = Group(self.terms, self.size, self._at_place)

    @classmethod
    def at(cls, data: FederatedData, terms: Terms, directory: Path | None, on_disk: bool = False) -> "Sites":
        """Sites whose states are checkpointed in a directory, if there is one."""
        return cls(data, terms, Store(directory, "client", on_disk, terms.initial.device))

    def _at_place(self, terms: Terms) -> "Sites":
        """The same sites with other terms: those of a place in a group."""
        return replace(self, terms=terms)

    def site(self, number: int) -> Site:
        """Return the site of a client. It is made once, as long as there are not too many."""
        if number not in self._sites:
            if len(self._sites) == MOST_SITES:
                self._sites.clear()
            self._sites[number] = Site(number, self.data.client(number), self.terms)
        return self._sites[number]

    def declare(self) -> list[Declaration]:
        """Say what the server learns of each training client when it joins, and no more."""
        return declarations(self.data, self.terms.fingerprint)

    def without_states(self) -> "Sites":
        """The same sites without their states: all that `work` needs, to be sent to where it is done."""
        self.terms.network.reset(self.terms.initial)
        return replace(self, store=Store(None, "client"))

    def on(self, device: torch.device) -> "Sites":
        """The same sites on a device: their samples, the network, and what it begins with."""
        terms = self.terms
        terms = replace(terms, network=terms.network.on(device), initial=terms.initial.to(device))
        return replace(self, data=self.data.to(device), terms=terms)

    def close(self) -> None:
        """End nothing."""

    # --- requests ---

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Answer requests here and now, and yield the replies as they come."""
        return chain.from_iterable(map(self.replies, self.split(requests)))

    def split(self, requests: Sequence[Request]) -> list[Request]:
        """Cut requests that concern several clients into pieces for one pass each."""
        pieces: list[Request] = []
        if len(requests) > 1 and self.terms.stack > 1 and {type(each) for each in requests} <= {Train, Evaluate}:
            return [*self.group.together(requests)]
        for request in requests:
            if isinstance(request, EvaluateShared):
                groups = self._groups((request.client, *request.others))
                pieces += [replace(request, client=group[0], others=group[1:]) for group in groups]
            else:
                pieces.append(request)
        return pieces

    def size(self, request: Request) -> int:
        """The number of samples that a request goes through."""
        first, last = (1, 3) if isinstance(request, Evaluate | EvaluateShared) else (0, 1)
        places = self.data.places[[*request.clients]]
        return int((places[:, last] - places[:, first]).sum())

    def begin(self, request: Request) -> State:
        """Get the state that a request is to work with: the version that the server names, whatever came after it."""
        if isinstance(request, EvaluateShared | Adapt):
            return {}
        if isinstance(request, Together):
            return joined({part.client: self.begin(part) for part in request.parts})
        current = self.store.current.get(request.client, NEVER)
        if request.version == current and not isinstance(request, Train):  # what is proposed meanwhile may still count
            return self.store.get(request.client)
        return self.store.at(request.client, request.version)

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        """Do one request. An exception becomes the reply's error: one client's failure is not the run's."""
        with matmul_precision(self.terms.matmul_precision):
            if isinstance(request, Together):
                return self.group.work(request, state)
            return self._work(request, state)

    def _work(self, request: Request, state: State) -> tuple[Reply, State]:
        begin, terms, network = time.perf_counter(), self.terms, self.terms.network
        # Where it trains its random stream is the round's; an unchanged model is evaluated alike in all.
        purpose, round = "evaluate shared" if isinstance(request, EvaluateShared) else "evaluate", 0
        if isinstance(request, Train):
            purpose, round = "train and evaluate" if request.measure else "train", request.round
        common = (self.data.x, self.data.y, terms.initial)  # to all clients, which may only read it
        before = changes(*common)
        network.reset(terms.initial)  # what the last client left there is not for this one to see
        seed_network(torch_seed(terms.seed, purpose, round, request.client), terms.initial.device)
        try:
            if isinstance(request, EvaluateShared):
                sites, theta = [self.site(client) for client in request.clients], request.message["theta"]
                reply, state = Reply(request.clients, measured=measure_together(sites, theta)), {}
            else:
                reply, state = self.site(request.client).work(request, state)
        except Exception as error:  # a method's or a network's own fault, of any kind
            if terms.debug:
                name = self.data.names[request.client]
                error.add_note(f"In {type(terms.method).__name__}, round {request.round}, client {name}.")
                raise
            reply, state = Reply(request.clients, error=explained(error), cause=error), {}
        if (after := changes(*common)) != before:
            wrote = SharedWriteError(
                self._wrote(request, [one != other for one, other in zip(before, after, strict=True)])
            )
            if terms.debug:
                raise wrote
            reply, state = Reply(request.clients, error=str(wrote), cause=wrote), {}
        reply.differentiated = network.differentiated
        reply.seconds = time.perf_counter() - begin
        return reply, state

    def finish(self, request: Request, reply: Reply, state: State) -> list[Reply]:
        """Keep a copy of the new state as a proposal, which counts from the server's `accept` on."""
        if isinstance(request, Together):
            replies = parts_of(request, reply)
            states = parted(state, request.clients)
            of_parts = zip(request.parts, replies, strict=True)
            return [self.finish(part, one, states[part.client])[0] for part, one in of_parts]
        if isinstance(reply.cause, SharedWriteError):
            raise reply.cause
        if isinstance(request, Train) and not reply.error:
            reply.version = self.store.propose(request.client, copied(state), request.round)
        return [reply]

    def handle(self, request: Request) -> Reply:
        """Answer the request of one client here and now."""
        (reply,) = self.replies(request)
        return reply

    def replies(self, request: Request) -> list[Reply]:
        """Answer a request here and now. Clients get copies and hand out copies, as if they were elsewhere."""
        state, message = copied(self.begin(request)), copied(request.message)
        replies = self.finish(request, *self.work(replace(request, message=message), state))
        for reply in replies:
            reply.upload = copied(reply.upload)
        return replies

    def _wrote(self, request: Request, changed: Sequence[bool]) -> str:
        names = ("the inputs of its samples", "the targets of its samples", "client.initial")
        what = names[changed.index(True)]
        who = f"{type(self.terms.method).__name__}, round {request.round}: client {self.data.names[request.client]}"
        return f"{who} wrote into {what}, which is for reading only: change a copy (clone)."

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
        held_out: list[int] = (self.data.places[:, 3] - self.data.places[:, 1]).tolist()
        return held_out

    def personal_model(self, client: int, round: int, message: Message) -> Tensor:
        """The model that a client predicts with now."""
        return self._own(Personal(round, client, message, self.store.current.get(client, NEVER)))["theta"]

    def predict(self, client: int, round: int, message: Message, x: Inputs) -> Tensor:
        """The outputs that a client predicts for these inputs now."""
        return self._own(Predict(round, client, message, self.store.current.get(client, NEVER), x))["outputs"]

    def _own(self, request: Personal | Predict) -> State:
        """Answer a request for something of the client's own, which no server makes."""
        reply = self.handle(request)
        if reply.error:
            name = self.data.names[request.client]
            raise FedtailorError(f"{type(self.terms.method).__name__}, client {name}: {reply.error}.") from reply.cause
        return reply.upload

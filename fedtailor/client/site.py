"""A site: one client with its own data, and the work that it does on request."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from zlib import crc32

from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.data import ClientData
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import (
    Adapt,
    Declaration,
    Evaluate,
    Measured,
    Message,
    Metrics,
    Personal,
    Reply,
    Request,
    State,
    Train,
    check_finite,
)
from fedtailor.method import Method, check_upload
from fedtailor.privacy.clipping import clipped
from fedtailor.privacy.noise import Noise
from fedtailor.training.augmentation import Augmentation
from fedtailor.training.client import Client
from fedtailor.training.descent import step_count
from fedtailor.training.inputs import Inputs
from fedtailor.training.metrics import ACCURACY, Metric
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings
from fedtailor.training.predictions import OwnMetric, measure, outputs
from fedtailor.training.private_gradients import Private
from fedtailor.training.schedule import factor_at
from fedtailor.training.streams import torch_stream


class SharedWriteError(FedtailorError):
    """A client's work wrote into what other work has in common with it. In one process all would go on with that, in
    several only those of the same worker: there is no result that all would agree on."""


@dataclass
class Terms:
    """The terms of an experiment, the same for all sites: the method, the network, how they train and evaluate."""

    method: Method
    network: Network
    initial: Tensor
    loss: Loss  # that is reported
    training_loss: Loss  # that is minimised: with label smoothing and class weights
    optimizer: OptimizerSettings
    keep_momentum: bool
    fine_tune: int  # epochs before a model is evaluated
    seed: int
    participation: float = 1.0  # the share of the clients that take part in a round on average
    schedule: str = "constant"  # of the learning rate, over so many rounds:
    rounds: int = 1
    on_train: bool = False  # measure models on the training samples too
    debug: bool = False  # let exceptions pass
    weights: str = ""  # the checksum of the file of pretrained weights
    augmentation: Augmentation | None = None  # of training images
    metric: Metric = ACCURACY  # the one that decides
    own_metric: OwnMetric | None = None  # its function, if it is the user's own
    multi_label: bool = False  # targets are labels of 0 and 1
    privacy: Privacy | None = None  # with its noise
    per_round: float = 1.0  # clients that take part in a round on average
    secret_noise: bool = False  # noise is the operating system's, and not a stream of the seed, which the server knows

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the vector that training begins with, and of all that is frozen beside it or was loaded."""
        checksum = crc32(self.initial.cpu().numpy().data)
        for tensor in self.network.frozen_tensors():
            checksum = crc32(tensor.cpu().contiguous().numpy().data, checksum)
        checksum = crc32(self.weights.encode(), checksum)
        return f"{checksum:08x}"


@dataclass
class Site:
    """One client's place: its number in the federation, its data, the experiment's terms."""

    number: int
    data: ClientData
    terms: Terms

    def declare(self) -> Declaration:
        """Say what the server learns of this site when it joins, and no more."""
        return Declaration(self.data.name, len(self.data.train[1]), self.data.n_classes, self.terms.fingerprint)

    def client(self, round: int, state: State) -> Client:
        """The client as a method sees it. In round 0, for fine-tuning, its learning rate is the experiment's own."""
        terms = self.terms
        return Client(
            self.number,
            round,
            terms.seed,
            state,
            self.data.train,
            self.data.validation,
            terms.network,
            terms.initial.detach(),  # one that nobody else has, of the same memory
            self._loss(),
            replace(terms.optimizer, factor=factor_at(terms.schedule, terms.rounds, round)),
            terms.keep_momentum,
            terms.participation,
            terms.augmentation,
        )

    def noise(self, round: int) -> Noise:
        """The source of all noise for privacy that the client draws in a round."""
        terms = self.terms
        return Noise() if terms.secret_noise else Noise(torch_stream(terms.seed, "privacy", round, self.number))

    def private(self, round: int) -> Private | None:
        """The private gradients of a round's training; None where samples have no privacy of their own."""
        privacy = self.terms.privacy
        if privacy is None or privacy.level != "sample":
            return None
        assert privacy.noise is not None
        return Private(privacy.bound, privacy.noise, self.noise(round))

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        """Do what a request asks, and return the reply and the state after it."""
        client = self.client(request.round, state)
        match request:
            case Train():
                reply = self._train(client, request)
            case Evaluate():
                reply = Reply(request.clients, measured=[self.measure(self.personal_model(client, request.message))])
            case Personal():
                reply = Reply(request.clients, {"theta": self.personal_model(client, request.message)})
            case Adapt():
                reply = self._adapt(client, request.message)
            case _:
                raise TypeError(f"a site does not answer {type(request).__name__}")
        return reply, client.state

    def _train(self, client: Client, request: Train) -> Reply:
        method, message = self.terms.method, request.message
        client.private = self.private(request.round)
        upload = dict(method.train(client, message))
        client.private = None  # what follows stays here
        check_upload(method, upload)
        check_finite("its upload", upload)
        check_finite("its new state", client.state)
        reply = Reply(request.clients, self._leaving(client, message, upload))
        if request.measure:
            # What the client itself would predict with now: its own upload stands in for the next broadcast.
            reply.measured = [self.measure(self.personal_model(client, {**message, **upload}))]
        return reply

    def _leaving(self, client: Client, message: Message, upload: State) -> State:
        """Return the upload as it leaves. In a private run nothing does that is for the record alone; and where clients
        add the noise, their change is clipped, and has its share of it."""
        privacy, method = self.terms.privacy, self.terms.method
        if privacy is None:
            return upload
        leaving = {name: tensor for name, tensor in upload.items() if name not in method.recorded}
        if privacy.by != "clients":
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

    def fine_tuned(self, theta: Tensor) -> Tensor:
        """Fine-tune a model as the evaluation asks. The stream is the same in all rounds: a model that did not change
        need not be evaluated again."""
        epochs = self.terms.fine_tune
        if not epochs:
            return theta
        return self.client(0, {}).descend(theta, epochs=epochs, steps=None, purpose="fine-tuning")

    def _adapt(self, client: Client, message: Message) -> Reply:
        """Fine-tune a new client's model, and a freshly initialised one as baseline. Reply with the metrics of both
        before training and after every epoch, and the adapted model."""
        starts = (self.terms.method.personal_model(client, message), self.terms.initial)
        paths = [self.fine_tuning_path(start) for start in starts]
        measured = [self.measure(theta) for path in paths for theta in path]
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

    def measure(self, theta: Tensor) -> Measured:
        """Measure a model on this site's held-out samples."""
        return self.metrics(theta, outputs(self.terms.network, theta, self.data.held_out))

    def metrics(self, theta: Tensor, scores: Tensor) -> Measured:
        """The metrics of a model, from its outputs on the validation and test samples."""
        (_, validation), (_, test), scores = self.data.validation, self.data.test, self.counted(scores)
        measured = {
            "validation": self._measured(scores[: len(validation)], validation),
            "test": self._measured(scores[len(validation) :], test),
        }
        if self.terms.on_train:
            x, y = self.data.train
            measured["train"] = self._measured(self.counted(outputs(self.terms.network, theta, x)), y)
        return measured

    def _measured(self, scores: Tensor, y: Tensor) -> Metrics:
        terms = self.terms
        return measure(scores, y, terms.loss, terms.multi_label, terms.own_metric)

    @property
    def n_outputs(self) -> int | None:
        """Number of output units used for this client: K_i if labels and head are per client, else None (all). Unused
        units get no gradient and are never predicted."""
        return self.data.n_classes if self.terms.method.personal_head else None

    def _loss(self) -> Loss:
        n, loss = self.n_outputs, self.terms.training_loss
        return loss if n is None else lambda outputs, targets: loss(outputs[:, :n], targets)

    def counted(self, scores: Tensor) -> Tensor:
        """The outputs that are used for this client."""
        return scores[:, : self.n_outputs] if scores.dim() == 2 else scores


def measure_together(sites: list[Site], theta: Tensor, held_out: Inputs) -> Iterator[Measured]:
    """Measure one model for several sites of one place, after one pass over all their held-out samples."""
    scores = outputs(sites[0].terms.network, theta, held_out)
    for site, piece in zip(sites, scores.split([len(site.data.held_out) for site in sites]), strict=True):
        yield site.metrics(theta, piece)

"""The study behind `fedtailor leak`: real clients' uploads of one round, inverted by a curious server, and scored."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from fedtailor._common.errors import FedtailorError
from fedtailor.attacks.evidence import Observed, evidence
from fedtailor.attacks.gradient_matching import Matching
from fedtailor.attacks.inversion import Attack, Inversion, OnStep, Samples, invert
from fedtailor.attacks.leakage import Leakage, Row
from fedtailor.attacks.scores import Score, assigned, score
from fedtailor.data import DataObject, FederatedData
from fedtailor.engines.own_code import importable_name, names_and_objects
from fedtailor.engines.preparation import Objects, Prepared, partition_data, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import Experiment, Settings, make_experiment
from fedtailor.experiment.participation import Participation
from fedtailor.messages import NEVER, Reply, Request, State, Train, copied
from fedtailor.messages.transport import Relay, Transport
from fedtailor.method import Method
from fedtailor.models import ModelLike
from fedtailor.training.isolation import isolated
from fedtailor.training.network import Loss
from fedtailor.training.schedule import factor_at
from fedtailor.training.streams import torch_stream

MOST_STEPS = 10  # of a client that an attack follows one by one
OnMethod = Callable[[str], None]


class Listener(Relay):
    """A transport at which the server writes down what it sends to some clients, and what they upload."""

    def __init__(self, sites: Transport, clients: Sequence[int]) -> None:
        super().__init__(sites)
        self._clients = clients
        self.heard: dict[int, tuple[Train, State]] = {}

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        asked = {request.client: request for request in requests if isinstance(request, Train)}
        for reply in super().ask(requests):
            client = reply.clients[0]
            if client in asked and client in self._clients:
                if reply.error:
                    raise FedtailorError(f"The attacked client {client} uploads nothing, as it failed: {reply.error}.")
                self.heard[client] = asked[client], copied(reply.upload)
            yield reply


@dataclass(frozen=True)
class Question:
    """An attack on `victims` clients with so many `samples` each, in one `round`. `unroll` limits the steps of a client
    that the attack follows one by one."""

    attack: Attack = field(default_factory=Attack)
    samples: int = 1
    victims: int = 1
    round: int = 1
    unroll: int = MOST_STEPS

    def __post_init__(self) -> None:
        for name in ("samples", "victims", "round", "unroll"):
            if getattr(self, name) < 1:
                raise FedtailorError(f"{name} is {getattr(self, name)}: give 1 or more.")


@dataclass
class Study:
    """Attacks on several methods with the same clients and samples."""

    experiments: Sequence[Experiment]  # which differ in the method and its parameters alone
    question: Question
    objects: Objects

    def __post_init__(self) -> None:
        self.experiments = [self._quiet(experiment) for experiment in self.experiments]
        with isolated():
            self.prepared = [prepare(each, replace(self.objects, data=self.data)) for each in self.experiments]
        for prepared in self.prepared:
            _check(prepared)

    def _quiet(self, experiment: Experiment) -> Experiment:
        """The experiment in this process and without evaluation; it has the attacked round."""
        evaluation = experiment.evaluation.model_copy(update={"every": 0, "patience": None, "choose": "last"})
        rounds = max(experiment.rounds, self.question.round)
        here = {"engine": "in-process", "deadline": None, "track": None, "rounds": rounds}
        return experiment.model_copy(update={**here, "evaluation": evaluation})

    @cached_property
    def data(self) -> FederatedData:
        """The federation's data; the attacked clients have their last training samples alone."""
        data, wanted = partition_data(self.experiments[0], self.objects.data), self.question.samples
        bounds = data.bounds.clone()
        for victim in self._drawn(data):
            if (there := int(bounds[victim, 1] - bounds[victim, 0])) < wanted:
                raise FedtailorError(
                    f"The attacked client {data.names[victim]} has {there} training samples, not {wanted}: take fewer "
                    "--samples, or fewer --clients."
                )
            bounds[victim, 0] = bounds[victim, 1] - wanted
        return replace(data, bounds=bounds).aligned()

    def _drawn(self, data: FederatedData) -> list[int]:
        """The attacked clients: the first participants of the round."""
        experiment, wanted = self.experiments[0], self.question.victims
        training, round = data.n_training, self.question.round
        drawn = Participation.parse(experiment.participation).draw(training, experiment.seed, round)
        if len(drawn) < wanted:
            raise FedtailorError(
                f"{len(drawn)} clients take part in round {round}, so {wanted} cannot be attacked: take "
                "fewer --victims, or a larger --participation."
            )
        return drawn[:wanted]

    @cached_property
    def victims(self) -> list[int]:
        return self._drawn(self.data)

    @property
    def samples(self) -> Samples:
        shape, pixels = self._true(self.victims[0]).shape[1:], _pixels(self.data, self.experiments[0])
        return Samples(self.question.samples, shape, self.data.n_outputs, pixels)

    def _true(self, victim: int) -> Tensor:
        """The samples that are to be reconstructed."""
        x, _ = self.data.train(victim)
        assert isinstance(x, Tensor)
        return x

    @property
    def work(self) -> int:
        """The iterations of all attacks."""
        attack = self.question.attack
        each = 1 if attack.kind == "analytic" else attack.restarts * attack.length
        return len(self.experiments) * self.question.victims * each

    def run(self, on_method: OnMethod = lambda title: None, on_step: OnStep = lambda: None) -> Leakage:
        """Attack all methods, one after the other."""
        result = self.begin()
        for prepared in self.prepared:
            on_method(prepared.experiment.method)
            result.rows.append(self.attack(prepared, on_step))
        return result

    def begin(self) -> Leakage:
        """The outcome before any attack: the true samples, and the two guesses that are no leak."""
        with isolated():
            samples, seed = self.samples, self.experiments[0].seed
            true = torch.cat([self._true(victim) for victim in self.victims])
            stream, low, high = torch_stream(seed, "noise"), *(samples.pixels or (0.0, 1.0))
            noise = torch.rand(true.shape, generator=stream) * (high - low) + low
            noise = noise if samples.pixels else torch.randn(true.shape, generator=stream)
            guesses = {"mean image": _mean(self.data).expand_as(true), "noise": noise.to(true)}
            span = samples.pixels and samples.pixels[1] - samples.pixels[0]
            rows = [Row(name, "", score(true, guess, span), guess) for name, guess in guesses.items()]
        return Leakage(self.experiments[0], self.question, true, samples.pixels, rows)

    def attack(self, prepared: Prepared, on_step: OnStep = lambda: None) -> Row:
        """Run the federation up to the round, and invert what the attacked clients upload in it."""
        begin, title = time.perf_counter(), prepared.experiment.method
        with isolated():
            heard, declared = self._heard(prepared)
            found = [
                self._invert(prepared, declared[victim], request, upload, on_step)
                for victim, (request, upload) in heard.items()
            ]
        scores, words, distances, guessed = zip(*found, strict=True)
        seconds = round(time.perf_counter() - begin, 2)
        every = [score for few in scores for score in few]
        return Row(title, words[0], every, torch.cat(guessed), sum(distances) / len(distances), seconds)

    def _heard(self, prepared: Prepared) -> tuple[dict[int, tuple[Train, State]], list[int | None]]:
        """The messages to the attacked clients and their uploads of the round, and the classes that they declared."""
        run, last = Simulation(prepared), self.question.round
        run.start()
        for number in range(1, last):
            run.round(number)
        listener = Listener(run.sites, self.victims)
        run.loop.round(last, listener)
        return {victim: listener.heard[victim] for victim in self.victims}, [d.n_classes for d in listener.declare()]

    def _invert(
        self, prepared: Prepared, own_classes: int | None, request: Train, upload: State, on_step: OnStep
    ) -> tuple[list[Score], str, float, Tensor]:
        """Invert one client's upload with what the server knows, and score it with what only we know."""
        terms, question, samples = prepared.terms, self.question, self.samples
        n_outputs = own_classes if prepared.terms.method.personal_head else None
        samples = replace(samples, classes=n_outputs or samples.classes)
        factor = factor_at(terms.schedule, terms.rounds, request.round)
        network = prepared.assembled.network()
        observed = Observed(
            request.message,
            upload,
            network.layout,
            terms.initial,
            samples.count,
            replace(terms.optimizer, factor=factor),
            request.round,
            request.version == NEVER,
        )
        clue = evidence(prepared.terms.method, observed).in_steps(question.unroll)
        matching = Matching(network, _loss(terms.training_loss, n_outputs), clue)
        stream = torch_stream(terms.seed, "inversion", request.round, request.client)
        found = invert(matching, samples, question.attack, stream, on_step)
        true, (_, labels) = self._true(request.client), self.data.train(request.client)
        order = assigned(true, found.x)
        guessed, named = found.x[order], found.labels[order]
        right = [
            None if name < 0 else name == label for name, label in zip(named.tolist(), labels.tolist(), strict=True)
        ]
        span = samples.pixels and samples.pixels[1] - samples.pixels[0]
        return score(true, guessed, span, right), clue.words, found.distance, guessed


def _loss(loss: Loss, n_outputs: int | None) -> Loss:
    """The loss of a client whose head has only its own outputs."""
    return loss if n_outputs is None else lambda outputs, targets: loss(outputs[:, :n_outputs], targets)


def _check(prepared: Prepared) -> None:
    """Refuse what these attacks are not made for."""
    method, data = type(prepared.terms.method).__name__, prepared.data
    if not prepared.terms.method.uploaded:
        raise FedtailorError(f"{method} uploads nothing: there is nothing to invert.")
    if prepared.terms.loss is not functional.cross_entropy or data.targets != "classes":
        raise FedtailorError("Inversions are for classes under the loss cross-entropy: take other data, or that loss.")
    if not isinstance(data.x, Tensor) or not data.x.is_floating_point():
        raise FedtailorError("Inversions are for samples that are one tensor of numbers, like images: take other data.")


def _mean(data: FederatedData) -> Tensor:
    """The mean of all training samples."""
    clients = [data.train(client)[0] for client in range(data.n_clients)]
    sums = torch.stack([x.double().sum(0) for x in clients if isinstance(x, Tensor)])
    return (sums.sum(0) / sum(map(len, clients))).to(data.x.dtype if isinstance(data.x, Tensor) else torch.float32)


def _pixels(data: FederatedData, experiment: Experiment) -> tuple[float, float] | None:
    """The range of pixels, if the samples are images; None otherwise."""
    assert isinstance(data.x, Tensor)
    low, high = (0.0, 1.0) if experiment.pixels == "unit" else (-1.0, 1.0)
    images = data.x.dim() == 4 and float(data.x.min()) >= low - 1e-6 and float(data.x.max()) <= high + 1e-6
    return (low, high) if images else None


def leak(
    methods: str | type[Method] | Sequence[str | type[Method]],
    *,
    inversion: Inversion = "cosine",
    samples: int = 1,
    victims: int = 1,
    round: int = 1,
    iterations: int | None = None,
    restarts: int = 1,
    tv: float = 1e-3,
    unroll: int = 10,
    method_parameters: Mapping[str | type[Method], Mapping[str, Any]] | None = None,
    data: str | Path | DataObject = "digits",
    model: ModelLike = "mlp",
    out: str | Path | None = None,
    **settings: Unpack[Settings],
) -> Leakage:
    """Reconstruct clients' training samples from what methods really upload, as a curious server could.

    The federation runs up to `round`; in it, the first `victims` participants have so many training `samples` each.
    The server knows the network, the experiment, what it sent and what came back. `inversion` is "dlg", "idlg",
    "cosine" or "analytic"; of several `restarts`, the best match counts; `tv` is the weight of the total variation
    (cosine). The attack follows a client's steps one by one, up to `unroll` of them. `out` is a directory for the
    record and a picture. `print(…)` shows the table.
    """
    if "parameters" in settings:
        raise FedtailorError("Methods have parameters of their own: give method_parameters={method: {…}}.")
    names, objects = names_and_objects(data, model, "cross-entropy")
    own = {importable_name(method): dict(given) for method, given in (method_parameters or {}).items()}
    asked = [importable_name(method) for method in ([methods] if isinstance(methods, str | type) else methods)]
    each = [{**names, "method": name, "parameters": own.get(name, {}), **settings} for name in asked]
    question = Question(Attack(inversion, iterations, restarts, tv), samples, victims, round, unroll)
    found = Study([make_experiment(one) for one in each], question, objects).run()
    if out is not None:
        found.write(Path(out))
    return found

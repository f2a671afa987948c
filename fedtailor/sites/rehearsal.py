"""A rehearsal of a federation at one site: every letter that would pass between it and the server, and none is sent.

All sites of the plan are played by a few of this site's own samples, in memory. They do the rounds with the code that
does them later, so that the names, shapes, types and bytes of what this site answers are those of its real letters.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from fedtailor.client.answers import Answering
from fedtailor.client.private_queries import Cost
from fedtailor.data import Dataset, FederatedData
from fedtailor.data.agreement import Agreement
from fedtailor.engines.channel import Answers, InMemory
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.remote import Remote
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment.fairness import LOSS
from fedtailor.experiment.participation import Participation
from fedtailor.messages import Message
from fedtailor.messages.letters import Letter, read_letter
from fedtailor.method import expected_upload
from fedtailor.server.loop import Loop
from fedtailor.server.setup import describe_secure, describe_uploads
from fedtailor.sites.declaration import joined
from fedtailor.sites.ledger import training_cost
from fedtailor.sites.plan import Disclosed, Plan
from fedtailor.training.inputs import join
from fedtailor.training.isolation import isolated

SECURE = ("train", "shares", "masked", "agree", "open")  # the letters of a round of secure aggregation
SHARES = {  # by site in these letters
    "shares": "sealed: that site alone can open it",
    "agree": "a signature that says whose sum is opened",
    "open": "one share of a secret: it says nothing alone",
}
MOST_WORK = 1_000  # trainings of sites; of later rounds the server's own check says what it takes
BATCH = 32  # training samples where a batch is all of them
HELD_OUT = 256  # validation samples, and test samples


@dataclass(frozen=True)
class Sent:
    """A tensor that passes: its shape, type and bytes, and what the server sees of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    seen: str = ""


@dataclass(frozen=True)
class Exchange:
    """Letters that are alike: what the server asks, what comes down, what goes up, and in which rounds."""

    asked: str
    down: tuple[Sent, ...]
    up: tuple[Sent, ...]
    header: tuple[str, ...]  # entries beside the tensors
    metrics: dict[str, tuple[str, ...]]  # names, by part of the samples
    rounds: tuple[int, ...]


@dataclass(frozen=True)
class Rehearsal:
    """All letters of work of a run, and the tensors of its first letter."""

    begin: tuple[Sent, ...]
    exchanges: tuple[Exchange, ...]
    rounds: int  # that were played; what goes up in later ones follows from the server's own check
    together: int = 1  # sites of which the server sees at least the sum alone
    training: Cost = field(default_factory=dict)  # what a training with all samples of this site costs its privacy


class Recorded:
    """A site whose letters are noted."""

    def __init__(self, site: Answers) -> None:
        self._site = site
        self.letters: list[tuple[Letter, Letter]] = []

    def answer(self, letter: bytes) -> bytes:
        """Have the site answer a letter, and note both."""
        answer = self._site.answer(letter)
        self.letters.append((read_letter(letter), read_letter(answer)))
        return answer


def rehearse(
    plan: Plan, number: int, dataset: Dataset, agreement: Agreement, tells: Disclosed, certificate: bytes = b""
) -> Rehearsal:
    """Play a run of the plan with the samples of one site, which has this certificate."""
    here = {"engine": "in-process", "weights": None, "class_weights": "none", "on_failure": "stop", "states": "memory"}
    here |= {"track": None}  # what a plan names is the server's, and may be code
    experiment = plan.terms().model_copy(update=here)
    if experiment.epsilon != "inf":  # which is without noise
        experiment = experiment.model_copy(update={"epsilon": None})  # the budget is that of the real samples
    with isolated(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a method has to say, it says in the run
        own = joined(dataset, experiment, agreement.common, number)
        prepared = prepare(experiment, Objects(data=_few(own, number, experiment.batch)))
        run, names = agreement.common.run, plan.sites
        with closing(Simulation(prepared)) as simulation:
            sites = simulation.sites
            secure = prepared.terms.secure
            parties = prepared.parties(run, names, certificate) if secure else [None] * len(names)
            played: dict[str, Answers] = {
                n: Answering(run, n, i, sites, tells, party=parties[i]) for i, n in enumerate(names)
            }
            recorded = Recorded(played[names[number]])
            channel = InMemory({**played, names[number]: recorded})
            last = _play(simulation.loop, Remote(channel, run, names, sites.declare()), len(names))
            method, privacy = prepared.terms.method, prepared.terms.privacy
            seen = describe_uploads(method, privacy, prepared.terms.fair)
            if prepared.terms.secure:
                seen = describe_secure(method, seen)
            exchanges = [_exchange(*letters, seen) for letters in recorded.letters]
            later = list(_later(simulation.loop, number, last, exchanges, seen, prepared.terms.secure))
        frozen = {f"frozen.{n}": tensor for n, tensor in enumerate(prepared.terms.network.frozen_tensors())}
        begin = _tensors({"initial": prepared.terms.initial, **frozen})
        start, end = own.places[number, :2].tolist()
        training = training_cost(prepared, end - start)
        return Rehearsal(begin, tuple(_together([*exchanges, *later])), last, prepared.terms.seen_together, training)


def _few(data: FederatedData, number: int, batch: int | Literal["full"]) -> FederatedData:
    """Take a batch of this site's training samples, and its others: which metrics are defined depends on them. The
    other sites train on the same batch, and have two of the samples behind it to validate and to test on."""
    own, batch = data.client(number), BATCH if batch == "full" else batch
    parts = [(own.train, batch), (own.validation, HELD_OUT), (own.test, HELD_OUT), (own.train, 1), (own.train, 1)]
    few = [(x[:most], y[:most]) for (x, y), most in parts]
    trained, validated, end, *_ = torch.tensor([len(y) for _, y in few]).cumsum(0).tolist()
    bounds = torch.tensor([0, trained, trained + 1, trained + 2]).repeat(data.n_clients, 1)
    bounds[number] = torch.tensor([0, trained, validated, end])
    own_classes = (data.own_classes[number],) * data.n_clients if data.own_classes else ()
    x, y = join([x for x, _ in few]), torch.cat([y for _, y in few])
    return replace(data, x=x, y=y, bounds=bounds, own_classes=own_classes, own_names=(), facts=())


def _play(loop: Loop, transport: Remote, sites: int) -> int:
    """Do the first rounds, and return how many."""
    each = Participation.parse(loop.experiment.participation).mean(sites)
    rounds = min(loop.experiment.rounds, max(3, int(MOST_WORK / max(each, 1))))
    loop.start(transport)
    for number in range(1, rounds + 1):
        loop.round(number, transport)
    return rounds


def _exchange(letter: Letter, answer: Letter, seen: Mapping[str, str]) -> Exchange:
    measured = answer.header.get("measured") or []
    metrics = {
        part: (*(name for name in told if name != "more"), *told.get("more", ()))
        for each in measured
        for part, told in each.items()
    }
    header = tuple(name for name in answer.header if name not in ("checksum", "measured"))
    rounds = (letter.number("round"),)
    asked = letter.text("asked")
    of_others = dict.fromkeys(answer.tensors, SHARES[asked]) if asked in SHARES else {}
    up = _tensors(answer.tensors, {**seen, **of_others})
    return Exchange(asked, _tensors(letter.tensors), up, header, metrics, rounds)


def _tensors(message: Message, seen: Mapping[str, str] | None = None) -> tuple[Sent, ...]:
    return tuple(
        Sent(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.nbytes,
            (seen or {}).get(name, ""),
        )
        for name, tensor in sorted(message.items())
    )


def _later(
    loop: Loop, number: int, last: int, exchanges: list[Exchange], seen: Mapping[str, str], secure: bool
) -> Iterator[Exchange]:
    """The uploads of the rounds that were not played: those that the server's own check takes then."""
    played = {asked: [each for each in exchanges if each.asked == asked] for asked in {e.asked for e in exchanges}}
    for round in range(last + 1, loop.experiment.rounds + 1):
        called = number in loop.call(round)
        for asked, before in played.items():
            if secure and asked in SECURE:
                if called:  # always of the same sizes
                    yield replace(before[-1], rounds=(round,))
            elif asked == "train" and called:
                expected = expected_upload(loop.method, loop.server, number)
                expected |= {LOSS: torch.zeros((), dtype=torch.float64)}
                up = _tensors({name: tensor for name, tensor in expected.items() if name in seen}, seen)
                yield replace(before[-1], up=up, rounds=(round,))
            elif asked != "train" and loop.evaluator.due(round, loop.experiment.rounds):
                yield replace(before[-1], rounds=(round,))


def _together(exchanges: list[Exchange]) -> Iterator[Exchange]:
    """Put the rounds of letters that are alike together."""
    alike: dict[str, list[Exchange]] = {}
    for each in exchanges:
        alike.setdefault(repr(replace(each, rounds=())), []).append(each)
    for same in alike.values():
        yield replace(same[0], rounds=tuple(sorted({round for each in same for round in each.rounds})))

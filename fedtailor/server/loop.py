"""The round loop: everything of a federation that is not a method.

Round by round: who takes part, what goes down, the clients' work on the engine, what comes back, what the server makes
of it, evaluation, record, checkpoint.
"""

import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from fedtailor.data import FederatedData
from fedtailor.errors import FedtailorError, brief
from fedtailor.experiment import Experiment
from fedtailor.local.streams import seed_network, torch_seed, torch_stream
from fedtailor.method import Message, Method, Replies, Server, message_bytes
from fedtailor.participation import Participation
from fedtailor.server.evaluation import Evaluator, summary
from fedtailor.server.observations import Observations
from fedtailor.server.record import Record, RunDirectory, plain
from fedtailor.site.work import check_tensors
from fedtailor.store import States, of_client
from fedtailor.transport import Bench, Engine, Result, Task

HOPELESS = 3  # rounds in a row in which every participant failed


class ClientFailure(UserWarning):
    """A client was left out of a round."""


@dataclass
class Federation:
    """A server, its clients' states and the engine on which the clients work."""

    experiment: Experiment
    method: Method
    data: FederatedData
    server: Server
    states: States
    bench: Bench
    engine: Engine
    evaluator: Evaluator
    observations: Observations
    directory: RunDirectory | None = None
    rounds: list[Record] = field(default_factory=list)  # what was recorded of each round
    clients: list[Record] = field(default_factory=list)  # and of each client in it, if it is written nowhere else
    finished: int = 0  # the last round that is done and recorded
    phases: dict[str, float] = field(default_factory=dict)  # seconds spent in each part of the rounds
    _whole: bool = True  # False from a round's first effect until it is recorded
    _hopeless: int = 0

    def start(self) -> None:
        """Before round 1."""
        with self._at_the_server("start"):
            self.method.start(self.server)
            check_tensors("the server's state", self.server.state)
        self.states.checkpoint(0, self.server.state)

    def restore(self) -> None:
        """Go back to the last checkpoint of the run directory."""
        assert self.directory is not None
        self.finished, self.server.state = self.states.restore()
        if self.finished == 0:
            self.start()
        self.directory.cut(self.finished)
        self.rounds = self.directory.rounds()
        self.evaluator.remember(self.directory.clients())
        self.observations.cut(self.finished)

    def close(self) -> None:
        """End the workers, and leave the run directory to others."""
        self.engine.close()
        if self.directory is not None:
            self.directory.unlock()

    def run(self) -> Generator[Record, None, None]:
        """The rounds that are still to do, each after it is recorded. Interrupted, it leaves a checkpoint of the last
        round, or, if that was only half done, the checkpoint before."""
        saved = self.finished
        try:
            while self.finished < self.experiment.rounds:
                yield self.round(self.finished + 1)
                if self.finished % self.experiment.checkpoint_every == 0:
                    self._checkpoint()
                    saved = self.finished
        finally:
            if self._whole and self.finished != saved:
                self._checkpoint()

    def _checkpoint(self) -> None:
        with self._timed("checkpoints"):
            if self.directory is not None:
                self.directory.sync()  # what was recorded lasts as long as the checkpoint
            self.states.checkpoint(self.finished, self.server.state)

    def round(self, number: int) -> Record:
        """One round: send, train, receive, evaluate, record."""
        begin = time.perf_counter()
        participants = self._call(number)
        messages, results = self._work(number, participants)
        self._whole = False
        if results:
            replies = Replies({client: result.reply for client, result in results.items()}, self.server.samples)
            with self._timed("aggregation"), self._at_the_server("receive"):
                self.method.receive(self.server, replies)
                check_tensors("the server's state", self.server.state)
        for client, result in results.items():
            self.states.put(of_client(client), result.state, number)
        measured = {}
        if self.evaluator.due(number, self.experiment.rounds):
            with self._timed("evaluation"), self._at_the_server("evaluation"):
                measured = self.evaluator.evaluate(self.server, results.values())
        if number % self.experiment.observe_every == 0:
            with self._at_the_server("observe"):
                self.observations.put(number, self.method.observe(self.server))
        down = {client: message_bytes(message) for client, message in messages.items()}
        up = {client: message_bytes(result.reply) for client, result in results.items()}
        figures: Record = {
            "round": number,
            **summary(
                measured,
                self.experiment.evaluation.average,
                self.evaluator.test_samples,
                self.evaluator.train_samples,
            ),
            "participants": participants,
            "failed": [client for client in participants if client not in results],
            "bytes_down": sum(down.values()),
            "bytes_up": sum(up.values()),
            "seconds": round(time.perf_counter() - begin, 4),
        }
        self._record(figures, {"round": number, "results": measured, "bytes_down": down, "bytes_up": up})
        self.finished, self._whole = number, True
        return figures

    def _call(self, number: int) -> list[int]:
        """Who takes part in this round."""
        training = list(range(self.server.clients))  # new clients are numbered behind them
        participation = Participation.parse(self.experiment.participation)
        participants = participation.draw(training, self.experiment.seed, number)
        self.server.begin(number, participants, torch_stream(self.experiment.seed, "server", number))
        return participants

    def _work(self, number: int, participants: list[int]) -> tuple[dict[int, Message], dict[int, Result]]:
        """What went down to the participants, and what came of their work. Interrupted, it has changed nothing."""
        before = dict(self.server.state)
        try:
            with self._timed("sending"), self._at_the_server("send"):
                messages = {client: self.method.send(self.server, client) for client in participants}
                for message in messages.values():
                    check_tensors("a message", message)
            return messages, self._train(number, messages)
        except BaseException:
            self.server.state = before
            raise

    def _train(self, number: int, messages: dict[int, Message]) -> dict[int, Result]:
        """The participants' results, in the order of their numbers, without those of clients that failed."""
        kind: Any = "train and evaluate" if self.experiment.evaluation.model == "local" else "train"
        tasks = [
            Task(kind, number, (c,), message, partial(self.states.get, of_client(c))) for c, message in messages.items()
        ]
        with self._timed("training"):
            results = {result.clients[0]: result for result in self.engine.run(tasks)}
        results = {client: results[client] for client in sorted(results)}
        self._report(number, {client: result.error for client, result in results.items() if result.error}, len(results))
        return {client: result for client, result in results.items() if not result.error}

    def _report(self, number: int, failed: dict[int, str], participants: int) -> None:
        """Name the clients that failed, those with the same fault together."""
        for fault in dict.fromkeys(failed.values()):
            names = [self.data.names[client] for client in failed if failed[client] == fault]
            who = f"{self.title}, round {number}: client{'s' if len(names) > 1 else ''} {', '.join(names)}"
            if self.experiment.on_failure == "stop":
                raise FedtailorError(f"{who} failed: {fault}.")
            warnings.warn(f"{who} left out: {fault}.", ClientFailure, stacklevel=2)
        self._hopeless = self._hopeless + 1 if failed and len(failed) == participants else 0
        if self._hopeless == min(HOPELESS, self.experiment.rounds):
            raise FedtailorError(
                f"{self.title}: no client could do its work in {self._hopeless} rounds in a row: {fault}."
            )

    @property
    def title(self) -> str:
        return type(self.method).__name__

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - begin

    @contextmanager
    def _at_the_server(self, what: str) -> Iterator[None]:
        """Say in which of the method's functions something went wrong at the server; what they draw from PyTorch's own
        generator does not depend on who drew before."""
        seed_network(torch_seed(self.experiment.seed, what, self.server.round), self.server.initial.device)
        try:
            yield
        except FedtailorError:
            raise
        except Exception as error:  # a method's own fault, of any kind
            where = f"{self.title}, round {self.server.round}, {what}"
            raise FedtailorError(f"{where}: {brief(error)}.") from error

    def _record(self, figures: Record, clients: Record) -> None:
        figures, clients = plain(figures), plain(clients)
        self.rounds.append(figures)
        if self.directory is not None:
            self.directory.append(figures, clients)
        else:
            self.clients.append(clients)

    def client_records(self) -> Iterable[Record]:
        """What was recorded of each client, round by round."""
        return self.clients if self.directory is None else self.directory.clients()

    def personal(self, client: int) -> Tensor:
        """The vector that a client predicts with now."""
        message = self.method.broadcast(self.server)
        task = Task("personal", self.server.round, (client,), message, partial(self.states.get, of_client(client)))
        result = self.bench.do(task)
        if result.error:
            raise FedtailorError(f"{self.title}, client {self.data.names[client]}: {result.error}.")
        return result.reply["theta"]

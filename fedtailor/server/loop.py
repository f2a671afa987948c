"""The server's loop: everything of a federation that is not a method, a site or a transport.

Round by round: who takes part, what goes down, what comes back and is aggregated, evaluation, record, checkpoint. The
transport is an argument and never an attribute: nothing that a method can reach at the server leads to a site.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import torch

from fedtailor._common.errors import FedtailorError, explained
from fedtailor.experiment import Experiment
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.fairness import Fairness
from fedtailor.experiment.participation import Participation
from fedtailor.messages import NEVER, Message, Reply, Size, Train, check_tensors, sizes
from fedtailor.messages.transport import Transport
from fedtailor.method import Method, Server, check_upload
from fedtailor.server.aggregation import Aggregator, make_aggregator
from fedtailor.server.aggregation.fairness import without_loss
from fedtailor.server.aggregation.server_optimizer import PLAIN, chosen_optimizer, optimised
from fedtailor.server.budget import Budget
from fedtailor.server.checkpoint import Checkpoint
from fedtailor.server.evaluation import Evaluated, Evaluator, averages, clients_record, early_stop
from fedtailor.server.failures import Failures
from fedtailor.server.flight import Flight, Gathered, keep_machines
from fedtailor.server.observations import Observations
from fedtailor.server.records import ClientsRecord, RoundRecord, finite
from fedtailor.server.run_directory import RunDirectory
from fedtailor.training.metrics import ACCURACY, Metric
from fedtailor.training.streams import torch_stream


class Trained(NamedTuple):
    """A round's training: the uploads added up, the replies that count without these, who failed, and of these who did
    because of what it was sent."""

    total: Aggregator
    replies: dict[int, Reply]
    failed: list[int]
    misled: list[int]
    gathered: Gathered | None  # where clients are uneven, or rounds asynchronous


@dataclass
class Loop:
    """A server at work."""

    experiment: Experiment
    method: Method
    server: Server
    names: list[str]  # of the clients, new ones too
    evaluator: Evaluator
    observations: Observations
    checkpoint: Checkpoint
    directory: RunDirectory | None = None
    joined: Mapping[int, int] = field(default_factory=dict)  # how many clients joined after a round
    metric: Metric = ACCURACY
    budget: Budget | None = None  # of a private run
    secret: bool = False  # the noise of privacy comes from the operating system
    hostile: frozenset[int] = frozenset()  # clients that no average counts: those of a study's attack
    versions: dict[int, int] = field(default_factory=dict)  # the round of each client's last accepted state
    rounds: list[RoundRecord] = field(default_factory=list)
    clients: list[ClientsRecord] = field(default_factory=list)  # if they are written nowhere else
    finished: int = 0  # the last round that is done and recorded
    phases: dict[str, float] = field(default_factory=dict)  # seconds spent in each part of the rounds
    _round_complete: bool = True  # False from a round's first effect until it is recorded

    def __post_init__(self) -> None:
        experiment = self.experiment
        self.title, stop = type(self.method).__name__, experiment.on_failure == "stop"
        self.failures = Failures(self.title, self.names, stop, experiment.rounds, self.hostile)
        self._participation = Participation.parse(experiment.participation)
        self._rule, self._fairness = Rule.parse(experiment.aggregation), Fairness.parse(experiment.fairness)
        self._secure = experiment.secure and bool(self.method.means)
        self._without_records = self.budget is not None or experiment.secure
        self._takes_steps = chosen_optimizer(experiment, self.method) != PLAIN
        folder = self.directory.path if self.directory else None
        self.flight = Flight.of(experiment, self.names[: self.server.n_clients], folder)

    def start(self, transport: Transport) -> None:
        """Prepare round 1."""
        if self.directory is not None:
            keep_machines(self.experiment.system, self.directory.path)
        self.server.random = torch_stream(self.experiment.seed, "server", 0)
        with self._phase("", "start"):
            self.method.start(self.server)
            check_tensors("the server's state", self.server.state)
        self._save(transport)

    def restore(self, transport: Transport) -> None:
        """Go back to the last checkpoint of the run directory."""
        assert self.directory is not None
        self.look(transport, sweep=True)
        if self.finished == 0:
            self.start(transport)
        self.directory.cut(self.finished)
        self.rounds = self.directory.rounds()
        for record in self.rounds:
            self.server.warnings |= record.warnings
        if self.flight is not None and self.rounds:
            self.flight.now = self.rounds[-1].clock or 0.0
        self.evaluator.remember(self.directory.clients(), self.rounds)
        self.observations.cut(self.finished)

    def look(self, transport: Transport, sweep: bool = False) -> None:
        """Read the last checkpoint. `sweep` removes what a killed run left behind."""
        saved = self.checkpoint.read(sweep)
        self.finished, self.server.state, self.versions = saved.round, saved.state, saved.versions
        if self.flight is not None:
            self.flight.restore(saved.under_way, saved.messages, saved.versions)
        self.server.round = self.finished
        self.server.random = torch_stream(self.experiment.seed, "server", self.finished)
        self._admit()
        transport.restore(self.versions, sweep)

    def _admit(self) -> None:
        """Have the method make room for the clients that joined after this checkpoint: it is from before that."""
        if max(self.joined, default=0) > self.finished:
            raise FedtailorError(
                f"Clients have joined this run after round {max(self.joined)}, but its checkpoint is of round "
                f"{self.finished}: restore the whole run directory from a copy."
            )
        if joining := self.joined.get(self.finished, 0):
            with self._phase("", "join"):
                self.method.join(self.server, self.server.n_clients - joining)
                check_tensors("the server's state", self.server.state)

    def run(self, transport: Transport) -> Generator[RoundRecord, None, None]:
        """Do the rounds that are left, and yield the record of each. Interrupted, it leaves a checkpoint of the last
        round or, if that was only half done, the checkpoint before."""
        saved = self.finished
        try:
            while self.finished < self.experiment.rounds and not (self.rounds and self.rounds[-1].stop):
                yield self.round(self.finished + 1, transport)
                if self.finished % self.experiment.checkpoint_every == 0:
                    self._save(transport)
                    saved = self.finished
        finally:
            if self._round_complete and self.finished != saved:
                self._save(transport)
        self.failures.count(self.rounds)

    def stop(self, why: str) -> None:
        """Let no round follow the last one, and write the reason into its record; a first reason stays. The checkpoint
        of this round is yet to come: a run that is killed meanwhile repeats the round."""
        record = self.rounds[-1]
        if not record.stop:
            record.stop, self._round_complete = why, False
            if self.directory is not None:
                self.directory.amend(record.plain())
            self._round_complete = True

    def _save(self, transport: Transport) -> None:
        with self._phase("checkpoints"):
            if self.directory is not None:
                self.directory.sync()  # what was recorded lasts as long as the checkpoint
                if self.finished:
                    self.observations.sync()
            under_way = self.flight.saved() if self.flight is not None else ()
            commit = (transport.save, transport.prune)
            self.checkpoint.write(self.finished, self.server.state, self.versions, *commit, *under_way)

    def round(self, number: int, transport: Transport) -> RoundRecord:
        """Do one round: send, train, receive, evaluate, record."""
        begin, patience = time.perf_counter(), self.experiment.evaluation.patience
        participants, known = self.call(number), {about for record in self.rounds for about in record.warnings}
        trained = self._train(number, transport)
        self._round_complete = False
        total, replies = trained.total, trained.replies
        counted = replies
        if replies and (lacking := total.lacking):  # then nobody's state changes, as if nobody had replied
            about = f"secure aggregation in round {number}" if self._secure else "aggregation"
            self.server.warn(about, f"Round {number} changes nothing, {lacking}.")
            counted = {}
        if counted or total.always:
            aggregated = total.total()
            with self._phase("aggregation", "receive"):
                if self._takes_steps:
                    aggregated = optimised(aggregated, self.experiment, self.method, self.server)
                self.method.receive(self.server, aggregated)
                check_tensors("the server's state", self.server.state)
        self.versions |= {client: reply.version for client, reply in counted.items() if reply.version != NEVER}
        transport.accept(list(counted))
        found = Evaluated({}, [], {})
        if self.evaluator.due(number, self.experiment.rounds):
            with self._phase("evaluation", "evaluation"):
                n_clients = self.server.n_clients
                away = self.flight.away(trained.gathered, n_clients) if self.flight and trained.gathered else ()
                found = self.evaluator.evaluate(self.server, self.versions, counted.values(), transport, away)
        self.failures.close_evaluation(number, found, replies, self.server)
        if number % self.experiment.observe_every == 0:
            with self._phase("", "observe"):
                if shown := self.method.observe(self.server):
                    self.observations.put(number, shown)
        down = {client: size.bytes for client, size in self._sent.items()}
        up = {client: reply.bytes_up for client, reply in replies.items()}
        honest = {client: of for client, of in found.measured.items() if client not in self.hostile}
        record = RoundRecord(
            **vars(averages(honest, self.experiment.evaluation.average, self.metric)),
            round=number,
            participants=list(participants),
            failed=trained.failed,
            misled=trained.misled,
            missing=[client for client in found.missing if client not in self.hostile],
            warnings={about: self.server.warnings[about] for about in self.server.warnings if about not in known},
            bytes_down=sum(down.values()),
            bytes_up=sum(up.values()),
            differentiated=sum(reply.differentiated for reply in replies.values()),
            seconds=round(time.perf_counter() - begin, 4),
        )
        if self.budget is not None:
            self._account(record, self.budget)
        if self.flight is not None and trained.gathered is not None:
            self._look_at_the_clock(record, self.flight, trained.gathered)
        self.rounds.append(record)
        if patience and (found_stop := early_stop(self.rounds, patience, self.metric)):
            record.stop = record.stop or found_stop.in_words(self.metric)
        clients = clients_record(number, found.measured, down, up)
        if self.directory is None:
            self.clients.append(clients)
        else:
            self.directory.append(record.plain(), clients.plain())
        self.finished, self._round_complete = number, True
        return record

    def call(self, number: int) -> list[int]:
        """Begin a round: draw who takes part in it. New clients, numbered behind the others, do not."""
        server, seed, draw = self.server, self.experiment.seed, self._participation.draw
        clients = len(server.n_samples)
        called = self.flight.call(draw, clients, seed, number) if self.flight else draw(clients, seed, number)
        server.round, server.participants = number, called
        server.random = torch_stream(seed, "server", number)
        return called

    def _look_at_the_clock(self, record: RoundRecord, flight: Flight, gathered: Gathered) -> None:
        """Write down when a round ended, who was late in it, and how old its replies are; let it count."""
        ages = {work.client: record.round - work.request.round for work in gathered.ended}
        record.late = sorted(work.client for work in gathered.late)
        record.stale = {client: ages[client] for client in sorted(ages) if ages[client] and client not in record.failed}
        record.differentiated += sum(work.reply.differentiated for work in gathered.late if work.reply)
        flight.close(gathered)
        if flight.machines is not None:
            record.clock = flight.now
            if flight.nobody_comes:
                record.stop = "no client is there any more"

    def _account(self, record: RoundRecord, budget: Budget) -> None:
        """Write down what the rounds have cost of the privacy, and whether one more is affordable."""
        rounds = [*self.rounds, record]
        record.epsilon, record.epsilon_rdp = map(finite, budget.after(rounds))
        training, seed = len(self.server.n_samples), self.experiment.seed
        record.stop = budget.exhausted(rounds, self._participation.draw(training, seed, record.round + 1))

    def _train(self, number: int, transport: Transport) -> "Trained":
        """Have the participants train. Interrupted, it has changed nothing at the server."""
        undo = self._undo()
        try:
            messages, measure = self._messages(), self.experiment.evaluation.model == "local"
            requests = [
                Train(number, client, message, self.versions.get(client, NEVER), measure)
                for client, message in messages.items()
            ]
            replies: dict[int, Reply] = {}
            received: dict[int, Size] = {}
            gathered, sent = None, self._sent
            with self._phase("training"):
                if self.flight is None:
                    total = self._aggregator(messages)
                    for reply in transport.ask(requests):
                        if (client := reply.clients[0]) in messages and client not in replies:
                            replies[client] = reply
                            self._take(total, client, replies, received)
                else:
                    gathered = self.flight.gather(requests, self._sent, transport)
                    messages = self.flight.brought_forward(gathered, self.method, self.server)
                    sent = {work.client: work.size for work in gathered.ended}
                    self.server.participants, total = list(messages), self._aggregator(messages)
                    for work in sorted(gathered.ended, key=lambda work: work.client):
                        assert work.reply is not None
                        replies[work.client] = work.reply
                        self._take(total, work.client, replies, received)
                for client in messages.keys() - replies.keys():
                    replies[client] = Reply((client,), error="it did not answer")
                    self._take(total, client, replies, received)
                total.close(transport.ask, replies)
            misled = self.failures.close(number, sent, received, replies, self.server)
        except BaseException:
            undo()
            raise
        failed = [client for client in sorted(replies) if replies[client].error]
        accepted = {client: replies[client] for client in sorted(replies) if not replies[client].error}
        return Trained(total, accepted, failed, misled, gathered)

    def _aggregator(self, messages: Mapping[int, Message]) -> Aggregator:
        """Make the aggregator of a round whose uploads are changes of these messages."""
        privacy = self.budget.privacy if self.budget else None
        seed = None if self.secret else self.experiment.seed
        how = (privacy, seed, self._secure, self._fairness)
        return make_aggregator(self._rule, self.method, self.server, messages, *how)

    def _undo(self) -> Callable[[], None]:
        """Remember the server's state; calling the result goes back to it. Where `send` changed it in place that
        cannot be done: then the last checkpoint counts."""
        state, kept = dict(self.server.state), dict(self.server.store.current)
        # PyTorch counts the changes of a tensor in place, but not those of an inference tensor.
        before = {name: None if tensor.is_inference() else tensor._version for name, tensor in state.items()}

        def undo() -> None:
            self.server.state = state
            untouched = all(before[name] is not None and before[name] == state[name]._version for name in state)
            self._round_complete = untouched and kept == self.server.store.current

        return undo

    def _messages(self) -> dict[int, Message]:
        """Have the method make the messages of a round, and measure them."""
        with self._phase("sending", "send"):
            messages = dict(self.method.send_all(self.server))
            if sorted(messages) != self.server.participants:
                raise ValueError("send_all must return one message for each of server.participants")
            for message in messages.values():
                check_tensors("a message", message)
            self._sent = sizes("a message", messages)
        return {client: messages[client] for client in self.server.participants}

    def _take(self, total: Aggregator, client: int, replies: dict[int, Reply], received: dict[int, Size]) -> None:
        """Check an upload, add it to the round's total, and let go of it. This is where uploads enter, and what is
        behind this door believes it: one that is not what the method declares makes a failure of its client."""
        reply = replies[client]
        if not reply.error:
            try:
                if not self._secure:  # what is masked tells nothing
                    upload = without_loss(reply.upload) if self._fairness else reply.upload
                    check_upload(self.method, upload, self.server, client, self._without_records)
                received |= sizes("its upload", {client: reply.upload}, finite=True)
                reply.bytes_up = received[client].bytes
            except (ValueError, TypeError) as error:
                reply.error = str(error)
        for refused, why in total.put(client, None if reply.error else reply.upload).items():
            replies[refused].error = why
        reply.upload = {}

    @contextmanager
    def _phase(self, phase: str, what: str = "") -> Iterator[None]:
        """Do a part of a round, and count its seconds. `what` is one of the method's functions at the server: it is
        named if something goes wrong there, and what it draws from PyTorch's own generator does not depend on who drew
        before."""
        begin = time.perf_counter()
        if what:
            torch.manual_seed(self.server.random.initial_seed() ^ crc32(what.encode()))
        try:
            yield
        except FedtailorError:
            raise
        except Exception as error:  # a method's own fault, of any kind
            if not what:
                raise
            where = f"{self.title}, round {self.server.round}, {what}"
            if self.experiment.debug:
                error.add_note(f"In {where}.")
                raise
            raise FedtailorError(f"{where}: {explained(error)}.") from error
        finally:
            if phase:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - begin

    def client_records(self) -> Iterable[ClientsRecord]:
        """Read the clients' records, round by round."""
        return self.clients if self.directory is None else self.directory.clients()

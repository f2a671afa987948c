"""Clients at work: whose training counts in which round, where clients are uneven or rounds are asynchronous.

In a simulation clients' seconds are virtual: all training of a round is done first, and then ordered by the time at
which each client would have been done. At real sites replies come when they come.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Self

from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import write_atomically
from fedtailor.experiment import Experiment
from fedtailor.experiment.fairness import LOSS
from fedtailor.experiment.late import Late
from fedtailor.experiment.participation import Participation
from fedtailor.experiment.system import Machines, System, names_file
from fedtailor.messages import NEVER, Message, Reply, Size, State, Train, joined, message_bytes, parted, sizes
from fedtailor.messages.transport import Transport
from fedtailor.method import BY_CLASS, Each, Method, Server, check_upload
from fedtailor.server.checkpoint import Begun

Draw = Callable[..., list[int]]  # of participants: among so many clients, by seed and round
MACHINES = "machines.csv"  # in a run's folder
WAIT = 1.0  # seconds between looks at the sites' replies: Ctrl-C is seen as soon


@dataclass(eq=False)
class Work:
    """One client's training, and what is known of its end."""

    request: Train
    began: float
    size: Size  # of what it was sent
    asked: bool = False
    reply: Reply | None = None
    end: float = inf
    lost: bool = False  # the client went away before it was done

    @property
    def client(self) -> int:
        return self.request.client

    @property
    def failed(self) -> bool:
        return self.reply is not None and bool(self.reply.error)

    @property
    def counts(self) -> bool:
        return not self.lost and not self.failed


@dataclass
class Gathered:
    """A round's trainings: those that ended in it (with those that failed), those that came to nothing, those that go
    on, and the time at which the server moved."""

    ended: list[Work]
    late: list[Work]
    under_way: list[Work]
    now: float


@dataclass
class Flight:
    """The trainings that are under way. `late` is the rule, `machines` are the clients' in a simulation."""

    late: Late | None
    machines: Machines | None
    measure: bool
    now: float = 0.0
    under_way: list[Work] = field(default_factory=list)
    _arrived: "queue.SimpleQueue[Reply | BaseException]" = field(default_factory=queue.SimpleQueue)

    @classmethod
    def of(cls, experiment: Experiment, names: list[str], folder: Path | None = None) -> Self | None:
        """Make the flight of an experiment with clients of these names; None where all are even and rounds wait. A
        file of machines is read from the run's folder, where it is kept once the run has begun."""
        late = Late.parse(experiment.late) if experiment.late else None
        system = experiment.system
        if system and names_file(system) and folder is not None and (folder / MACHINES).exists():
            system = str(folder / MACHINES)
        machines = Machines.of(system, names, experiment.seed) if system else None
        even = late is None and machines is None
        return None if even else cls(late, machines, experiment.evaluation.model == "local")

    @property
    def busy(self) -> list[int]:
        """The clients whose training is under way."""
        return sorted(work.client for work in self.under_way)

    # --- who is called ---

    def call(self, draw: Draw, clients: int, seed: int, round: int) -> list[int]:
        """Draw the participants of a round among the clients that are there and not at work. Where nobody is, time
        passes until somebody comes."""
        busy = self.busy
        if self.machines is None:
            idle = sorted({*range(clients)} - {*busy}) if busy else None
            return draw(clients, seed, round, idle, len(busy))
        absence = self.machines.absence(self.now)
        absence[busy] = inf
        if not busy and (soonest := float(absence.min())) > 0:
            if soonest == inf:
                return []
            self.now += soonest
            absence = self.machines.absence(self.now)
        there: list[int] = (absence == 0).nonzero()[0].tolist()
        if len(there) == clients:
            return draw(clients, seed, round)
        return draw(clients, seed, round, there, len(busy))

    @property
    def nobody_comes(self) -> bool:
        """True if nobody is at work or there, or ever will be."""
        if self.machines is None or self.under_way:
            return False
        return bool((self.machines.absence(self.now) == inf).all())

    # --- whose work counts ---

    def gather(self, requests: Sequence[Train], sizes: Mapping[int, Size], transport: Transport) -> Gathered:
        """Have these clients train, and wait as long as the rule says. Nothing here changes: what is gathered is taken
        over by `close`."""
        round = requests[0].round if requests else 0
        new = [Work(request, self.now, sizes[request.client]) for request in requests]
        if self.machines is None:
            return self._gather_as_they_come(new, transport)
        works = [replace(work) for work in self.under_way] + new
        self._train([work for work in works if not work.asked], transport)
        ordered = sorted(works, key=lambda work: (work.end, work.client))
        if self.late is None or self.late.buffer is None:
            return self._gather_round(ordered)
        ended, counted = list[Work](), 0
        while ordered and counted < self.late.buffer:
            ended.append(ordered.pop(0))
            counted += ended[-1].counts
        now = max([self.now, *(work.end for work in ended)])
        _keep_messages([work for work in ordered if work.request.round == round])
        lost = [work for work in ended if work.lost]
        return Gathered([work for work in ended if not work.lost], lost, ordered, now)

    def _gather_round(self, ordered: Sequence[Work]) -> Gathered:
        """Wait for a round's clients: for all, the first, or until the deadline."""
        deadline = self.now + (self.late.deadline or inf) if self.late else inf
        first = (self.late.first if self.late else None) or len(ordered)
        in_time = [work for work in ordered if work.counts and work.end <= deadline][:first]
        enough = len(in_time) == first < len(ordered)
        failed = [work for work in ordered if work.failed]
        late = [work for work in ordered if work not in in_time and not work.failed]
        ends = [work.end for work in (in_time if enough else ordered)]
        return Gathered([*in_time, *failed], late, [], max([self.now, *(min(end, deadline) for end in ends)]))

    def brought_forward(self, gathered: Gathered, method: Method, server: Server) -> dict[int, Message]:
        """Turn stale uploads into such of this round: what a client would be sent now, moved along its change, which
        counts less with every round that it is old. Return the message of each upload, by client; those of this round
        stay as they are. What is uploaded in another way by now comes too late."""
        messages: dict[int, Message] = {}
        for work in sorted(gathered.ended, key=lambda work: work.client):
            messages[work.client] = then = work.request.message
            behind, reply = server.round - work.request.round, work.reply
            if not behind or reply is None or reply.error:
                continue
            assert self.late is not None  # or all would be of this round
            messages[work.client] = now = method.send(server, work.client)
            fits, fitted = (_fits(method, work, replace(server, round=at)) for at in (server.round, work.request.round))
            if not fits and fitted:
                del messages[work.client]
                gathered.ended.remove(work)
                gathered.late.append(work)
            if not fits:  # nor did it in its own round: it is a failure, which is not found here
                continue
            weight = (1 + behind) ** -self.late.staleness
            reply.upload = {**reply.upload, **_weighed(method, reply.upload, then, now, weight)}
        return messages

    def away(self, gathered: Gathered, clients: int) -> set[int]:
        """The clients of so many that are not to be asked now: at real sites, where nobody waits for a slow one, all
        but those that have just answered. In a simulation all can be asked."""
        return {*range(clients)} - {work.client for work in gathered.ended} if self.machines is None else set()

    def close(self, gathered: Gathered) -> None:
        """Let a round's trainings count."""
        self.now, self.under_way = gathered.now, gathered.under_way

    def _train(self, works: Sequence[Work], transport: Transport) -> None:
        """Do trainings, and find out when each ends. Who would be late takes fewer steps, if the rule says so."""
        for work in self._asked(works, transport):
            self._time(work)
        if self.late is None or not self.late.partial or not self.late.deadline:
            return
        before = {work.client: inf for work in works}
        slow = list(works)
        while slow:  # as an incomplete batch costs less than others, what was cut once may still be too long
            slow, tried = [], slow
            for work in tried:
                transfer, computing = self._seconds(work)
                share = (self.late.deadline - transfer) / computing if computing else 0.0
                if not work.failed and 0 < share < 1 and computing < before[work.client]:
                    before[work.client] = computing
                    work.request = replace(work.request, share=share * work.request.share)
                    slow.append(work)
            for work in self._asked(slow, transport):
                self._time(work)

    def _asked(self, works: Sequence[Work], transport: Transport) -> Sequence[Work]:
        """Have clients train, and put the reply to each."""
        of = {work.client: work for work in works}
        for work in works:
            work.asked, work.reply = True, Reply((work.client,), error="it did not answer")
        for reply in transport.ask([work.request for work in works]) if works else ():
            if reply.clients[0] in of:
                of.pop(reply.clients[0]).reply = reply
        return works

    def _seconds(self, work: Work) -> tuple[float, float]:
        assert self.machines is not None
        assert work.reply is not None
        up = message_bytes(work.reply.upload)
        return self.machines.seconds(work.client, work.size.bytes, work.reply.differentiated, up)

    def _time(self, work: Work) -> None:
        """Find out when a training ends, and whether its client is still there."""
        assert self.machines is not None
        seconds, stays = sum(self._seconds(work)), self.machines.presence(work.client, work.began)
        work.lost = seconds > stays and not work.failed
        work.end = work.began + min(seconds, stays)

    def _gather_as_they_come(self, new: Sequence[Work], transport: Transport) -> Gathered:
        """Wait for the replies of real sites: so many as the rule says, in the order in which they come."""
        assert self.late is not None
        assert self.late.buffer is not None  # as was checked
        works = {work.client: work for work in (*map(replace, self.under_way), *new)}
        if begun := [work for work in works.values() if not work.asked]:
            for work in begun:
                work.asked = True
            requests = [work.request for work in begun]
            threading.Thread(target=self._listen, args=(requests, transport), daemon=True).start()
        ended, counted = list[Work](), 0
        while len(ended) < len(works) and counted < self.late.buffer:
            try:
                reply = self._arrived.get(timeout=WAIT)
            except queue.Empty:
                continue
            if isinstance(reply, BaseException):
                raise reply
            work = works[reply.clients[0]]
            work.reply = reply
            ended.append(work)
            counted += work.counts
        under_way = [work for work in works.values() if work.reply is None]
        _keep_messages([work for work in under_way if work in new])
        return Gathered(ended, [], under_way, self.now)

    def _listen(self, requests: Sequence[Train], transport: Transport) -> None:
        """Hand on the replies of sites as they come."""
        silent = {request.client for request in requests}
        try:
            for reply in transport.ask(requests):
                silent.discard(reply.clients[0])
                self._arrived.put(reply)
            for client in silent:
                self._arrived.put(Reply((client,), error="it did not answer"))
        except BaseException as error:
            self._arrived.put(error)

    # --- what a checkpoint keeps ---

    def saved(self) -> tuple[list[Begun], State]:
        """Return what a checkpoint keeps of the trainings under way, and their messages: each once, however many
        clients were sent it."""
        begun, messages, places = [], dict[int, Message](), dict[tuple[int, ...], int]()
        for work in self.under_way:
            message = work.request.message
            place = places.setdefault(tuple(id(message[name]) for name in sorted(message)), len(places))
            messages[place] = message
            begun.append(Begun(client=work.client, round=work.request.round, time=work.began, message=place))
        return begun, joined(messages)

    def restore(self, begun: Sequence[Begun], tensors: Message, versions: Mapping[int, int]) -> None:
        """Take up the trainings of a checkpoint; each is begun anew, and comes to the same."""
        messages, self.under_way = parted(tensors, [one.message for one in begun]), []
        for one in begun:
            message = messages[one.message]
            request = Train(one.round, one.client, message, versions.get(one.client, NEVER), self.measure)
            (size,) = sizes("a message", {one.client: message}).values()
            self.under_way.append(Work(request, one.time, size))


def _keep_messages(works: Sequence[Work]) -> None:
    """Copy what was sent to clients that are still at work, each tensor once: the server may change it in place."""
    copies: dict[int, Tensor] = {}
    for work in works:
        message = work.request.message
        copies |= {id(tensor): tensor.clone() for tensor in message.values() if id(tensor) not in copies}
        kept = {name: copies[id(tensor)] for name, tensor in message.items()}
        work.request = replace(work.request, message=kept)


def _fits(method: Method, work: Work, server: Server) -> bool:
    """Find out whether an upload is what the method declares in the server's round."""
    assert work.reply is not None
    try:
        check_upload(method, {n: x for n, x in work.reply.upload.items() if n != LOSS}, server, work.client)
    except ValueError:
        return False
    return True


def _weighed(method: Method, upload: Message, then: Message, now: Message, weight: float) -> State:
    """Compute means' uploads as they would be if this change had begun at what is sent now, and counted less. What
    clients tell of their classes are no steps that could begin elsewhere: it is mixed with what is sent now."""
    found, mixed = {}, BY_CLASS.items() <= method.refuses.items()
    for name in method.means:
        x = upload[name]
        if not x.is_floating_point():
            continue  # numbers of something
        start, base = method.sent(then, name, x), method.sent(now, name, x)
        known = [tensor for tensor in (start, base) if tensor is not None]
        # What was never sent is a change itself, as a gradient is.
        found[name] = known[-1] + weight * (x - known[-1 if mixed else 0]) if known else weight * x
    return found


def keep_machines(system: str | None, folder: Path) -> None:
    """Copy a file of machines into a run's folder: a run goes on with what it began with."""
    if system and names_file(system) and not (folder / MACHINES).exists():
        write_atomically(folder / MACHINES, Path(system).read_bytes())


def check_uneven(experiment: Experiment, method: Method, clients: int, at_sites: bool) -> None:
    """Refuse rules for late clients, and uneven clients, where they cannot be. `clients` is the number of those that
    train."""
    late = Late.parse(experiment.late) if experiment.late else None
    if at_sites and experiment.system:
        raise FedtailorError("Clients have a system in simulations: at real sites time is real, so leave it out.")
    if at_sites and late and late.buffer is None:
        raise FedtailorError("At real sites, late is a buffer; how long a round waits is the plan's deadline.")
    if late and not at_sites and not experiment.system:
        raise FedtailorError("In a simulation nobody is late by itself: say how fast clients are, by --system.")
    if late and (experiment.secure or experiment.privacy or experiment.epsilon):
        what = "secure aggregation" if experiment.secure else "the accounting of privacy"
        raise FedtailorError(f"In {what} all of a round's clients are waited for: leave --late out.")
    if experiment.system and (experiment.privacy or experiment.epsilon) and _come_and_go(experiment.system):
        raise FedtailorError("Privacy is accounted for clients that are drawn among all: leave availability out.")
    if late is None:
        return
    participation = Participation.parse(experiment.participation)
    most = participation.most_of(clients)
    if late.first is not None and late.first > most:
        raise FedtailorError(f"The first {late.first} replies never come: {most} clients take part in a round.")
    if late.buffer is None:
        return
    if participation.count(clients) is None:
        raise FedtailorError(
            "With a buffer, the number at work is fixed: give --participation all, a number or a share."
        )
    if late.buffer > most:
        raise FedtailorError(f"A buffer of {late.buffer} replies is never full: {most} clients are at work at a time.")
    if single := [name for name, how in method.uploads.items() if isinstance(how, Each) and not how.record]:
        raise FedtailorError(
            f"{method.title} needs every client's own {single[0]} of the same round: take a method whose uploads are "
            "means, like fedavg, or a rule that waits for a round, like --late first=10."
        )


def _come_and_go(system: str) -> bool:
    return names_file(system) or bool(System.parse(system).availability)

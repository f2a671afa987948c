"""A server, its sites and the transport between them, on one machine."""

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.client.answers import Answering
from fedtailor.client.sites import Sites, declarations
from fedtailor.data.agreement import read_agreement
from fedtailor.engines.channel import InMemory
from fedtailor.engines.devices import device_here, find_devices
from fedtailor.engines.hostile import TARGET, Tampering, find_trigger, poisoned
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.engines.remote import Remote
from fedtailor.engines.transports import make_transport
from fedtailor.experiment import Experiment
from fedtailor.experiment.attack import Attack
from fedtailor.experiment.system import Machines
from fedtailor.messages import NEVER, Reply, Request, State
from fedtailor.messages.letters import as_answer, as_letter, as_reply
from fedtailor.messages.store import Store
from fedtailor.messages.transport import Transport
from fedtailor.method import Server
from fedtailor.server.checkpoint import Checkpoint
from fedtailor.server.evaluation import Evaluator
from fedtailor.server.loop import Loop
from fedtailor.server.observations import Observations
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import RunDirectory
from fedtailor.training.inputs import Inputs, select

RUN = "simulation"  # the name of the run in letters between sites in memory


class Simulation:
    """A server, all its sites and the transport between them, on one machine.

    Only this object, which no method ever sees, holds all of them.
    """

    def __init__(
        self, prepared: Prepared, directory: RunDirectory | None = None, transport: Transport | None = None
    ) -> None:
        experiment, data, terms = prepared.experiment, prepared.data, prepared.terms
        self.prepared, self.experiment, self.data, self.terms = prepared, experiment, data, terms
        self.directory = directory
        self.attack, self.hostile = Attack.parse(experiment.attack) if experiment.attack else None, prepared.hostile
        self._held = poisoned(data, self.attack, self.hostile, experiment.seed) if self.attack else data
        checkpoint = directory.path / "checkpoint" if directory else None
        on_disk, device = experiment.states == "disk", terms.initial.device
        self.sites = Sites.at(self._held, terms, checkpoint / "sites" if checkpoint else None, on_disk)
        store = Store(checkpoint / "server" if checkpoint else None, "server", on_disk, device)
        engine, deadline = experiment.engine, experiment.deadline
        if experiment.debug:  # whoever looks at a client with a debugger takes his time
            engine, deadline = "in-process", None
        if terms.secure:  # whatever engine: no upload leaves a client without its mask
            engine = "sites-in-memory"
        away = transport is not None  # the sites are real ones
        self._apart = self._sites_apart() if engine == "sites-in-memory" and transport is None else []
        if self._apart:
            channel = InMemory({site.name: site for site in self._apart})
            transport = Remote(channel, RUN, data.names, self.sites.declare())
        self.transport = transport or make_transport(
            engine,
            self.sites,
            experiment.workers,
            device.type == "cpu",
            deadline,
            experiment.address,
            [] if away else find_devices(experiment.device),
        )
        if self.attack:
            memory = Store(checkpoint / "hostile" if checkpoint else None, "hostile", device=device)
            self.transport = self._tampering(self.attack, memory)
        method = terms.method.model_copy(deep=True)  # what it may keep of its own does not cross either
        declared = self.transport.declare()
        for site in declared:
            if site.fingerprint != terms.fingerprint:
                raise FedtailorError(f"The site {site.name} has another network or experiment: it cannot join.")
        self.loop = Loop(
            experiment,
            method,
            prepared.server([site.n_samples for site in declared], store),
            list(data.names),
            Evaluator(experiment.evaluation, method, prepared.evaluated),
            Observations(directory.path / "observed" if directory else None, int(experiment.observe_limit * 1e6)),
            Checkpoint(checkpoint, store, device, len(declared)),
            directory,
            Counter(join.after for join in data.joined for _ in join.clients),
            copy(terms.metric),
            prepared.budget,
            away,
            frozenset(self.hostile),
        )

    def _sites_apart(self) -> list[Answering]:
        """Every client as a site of its own, which has its own samples and its own network, and answers letters."""
        directory, names = self.sites.store.directory, self.data.names
        parties = self.prepared.parties(RUN, names) if self.terms.secure else [None] * len(names)
        return [
            Answering(
                RUN,
                name,
                number,
                Sites.at(self._held.only(number), self.prepared.copied_terms(), directory),
                party=parties[number],
            )
            for number, name in enumerate(names)
        ]

    def _tampering(self, attack: Attack, memory: Store) -> Tampering:
        """The transport with hostile clients on it. Where clients are apart, what they upload is a letter again."""
        method = self.terms.method.model_copy(deep=True)

        def by_letter(request: Request, reply: Reply) -> Reply:
            name = self.data.names[request.client]
            answer = as_answer(as_letter(request, RUN, NEVER), name, reply)
            return as_reply(answer.pack(), request, RUN, name)

        how = {"carry": by_letter} if self._apart else {}
        return Tampering(self.transport, attack, self.hostile, method, self.experiment.seed, memory, **how)

    def place(self, client: int) -> Sites:
        """The place where a client lives: for whoever runs the simulation, and for nobody in it."""
        if not self._apart:
            return self.sites
        place = self._apart[client].sites
        place.store.recall(client, self.loop.versions.get(client, NEVER))  # a site learns it with its next letter
        return place

    def start(self) -> None:
        """Prepare round 1."""
        self.loop.start(self.transport)

    def restore(self) -> None:
        """Go back to the last checkpoint."""
        self.loop.restore(self.transport)

    def run(self) -> Generator[RoundRecord, None, None]:
        """Do the rounds that are left, and yield the record of each."""
        return self.loop.run(self.transport)

    def round(self, number: int) -> RoundRecord:
        """Do one round."""
        return self.loop.round(number, self.transport)

    def close(self) -> None:
        """End the workers, and leave the run directory to others."""
        self.transport.close()
        if self.directory is not None:
            self.directory.unlock()

    @property
    def finished(self) -> int:
        """The last round that is done."""
        return self.loop.finished

    @property
    def server(self) -> Server:
        return self.loop.server

    def personal_model(self, client: int) -> Tensor:
        """The vector that a client predicts with now."""
        theta = self.place(client).personal_model(client, self.finished, self.loop.method.broadcast(self.server))
        if theta.shape != self.terms.initial.shape:
            raise FedtailorError(
                f"The model of client {self.data.names[client]} is no vector of the run's network: its state is of "
                "another run, or damaged."
            )
        return theta

    def predict(self, client: int, x: Inputs) -> Tensor:
        """The outputs that a client predicts for these inputs now."""
        return self.place(client).predict(client, self.finished, self.loop.method.broadcast(self.server), x)

    def backdoor(self) -> float | None:
        """Compute the share of the honest clients' test samples with the trigger, not of the target class, that their
        client's personal model takes for the target; None without such an attack, or without such samples."""
        if self.attack is None or self.attack.kind != "backdoor":
            return None
        trigger, misled, total = find_trigger(self.data, self.hostile), 0, 0
        for client in sorted({*range(self.data.n_clients)} - {*self.hostile} - self.data.new):
            x, y = self.data.test(client)
            assert isinstance(x, Tensor)  # else the attack is refused
            marked = trigger(select(x, (y != TARGET).nonzero()[:, 0]))
            predicted = self.predict(client, marked).argmax(1)
            misled, total = misled + int((predicted == TARGET).sum()), total + len(marked)
        return misled / total if total else None

    def state_of(self, client: int) -> State:
        """A client's private state: for whoever runs the simulation, and for nobody in it."""
        return self.place(client).store.get(client)


def create(path: Path, prepared: Prepared, transport: Transport | None = None) -> Simulation:
    """Make a run directory and its simulation; with a transport to real sites, their server."""
    terms, experiment = prepared.terms, prepared.experiment
    if experiment.system:  # a wrong file is refused before anything is written
        Machines.of(experiment.system, list(prepared.data.names)[: prepared.data.n_training], experiment.seed)
    directory = RunDirectory.create(
        path, experiment, prepared.data, terms.fingerprint, prepared.setup, terms.metric, prepared.hostile
    )
    with ExitStack() as on_failure:
        on_failure.callback(directory.unlock)
        run = Simulation(prepared, directory, transport)
        on_failure.pop_all()
        return run


def reopen(path: Path, experiment: Experiment, objects: Objects, transport: Transport | None = None) -> Simulation:
    """Open the simulation of a run directory, to go on with after `restore`."""
    directory = RunDirectory(path)
    directory.lock()
    with ExitStack() as on_failure:
        on_failure.callback(directory.unlock)
        prepared = prepare(experiment, objects)
        directory.check(prepared.data, prepared.terms.fingerprint, prepared.hostile)
        run = Simulation(prepared, directory, transport)
        on_failure.pop_all()
        return run


def look_into(path: Path, objects: Objects, data_dir: str | None = None) -> Simulation:
    """Open the simulation of a run directory as its last checkpoint left it, to look at: nothing is written. It is
    looked at on the CPU where the run's device is not available, or has several."""
    directory = RunDirectory(path)
    before = directory.experiment()
    here = {"data_dir": data_dir or before.data_dir, "device": device_here(before.device)}
    experiment = before.model_copy(update={**here, "engine": "in-process", "deadline": None, "track": None})
    experiment = experiment.model_copy(update={"secure": False})  # nothing is aggregated
    agreement = read_agreement(path)
    if agreement is not None:
        objects = replace(objects, data=agreement.data(experiment.dtype))
    prepared = prepare(experiment, objects)
    directory.check(prepared.data, prepared.terms.fingerprint, prepared.hostile)
    away = (
        None
        if agreement is None
        else Remote(
            InMemory({}),
            agreement.common.run,
            prepared.data.names,
            declarations(prepared.data, prepared.terms.fingerprint),
        )
    )
    run = Simulation(prepared, directory, away)
    run.loop.look(run.transport)
    return run

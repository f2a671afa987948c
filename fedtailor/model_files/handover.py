"""A run for a hospital that comes later: what every site was sent, and nothing that a site declared or was measured.

The whole run directory of a federation has the declared facts of its sites and all their metrics, and for some methods
single uploads. To adapt, a newcomer needs the experiment, the features' constants, and the last broadcast.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import read_bytes, write_atomically
from fedtailor.client.sites import declarations
from fedtailor.data.agreement import Agreement, Hello, read_agreement, write_agreement
from fedtailor.engines.channel import InMemory
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.remote import Remote
from fedtailor.engines.runs import load
from fedtailor.engines.simulation import Simulation, create
from fedtailor.messages import Message, frame, unframe
from fedtailor.model_files.exports import Source
from fedtailor.server.records import ClientsRecord, RoundRecord

FILE = "broadcast.safetensors"  # in a run that was handed over


def hand_over(run: Path, to: Path) -> int:
    """Write a run for `adapt` without anything of its sites' own; return the round that its model is of."""
    agreement = read_agreement(run)
    if agreement is None:
        raise FedtailorError(f"{run} is the run of a simulation: its directory itself is what `fedtailor adapt` takes.")
    source = Source.of(load(run))
    simulation = source.simulation
    experiment, round = source.result.experiment, simulation.finished
    if experiment.class_weights == "balanced":  # which follow from what the sites declared
        weights = ",".join(map(repr, simulation.prepared.class_weights))
        experiment = experiment.model_copy(update={"class_weights": weights})
    silent = Agreement(common=agreement.common, declared=tuple(_silent(hello) for hello in agreement.declared))
    prepared = prepare(experiment, Objects(data=silent.data(experiment.dtype)))
    prepared = replace(prepared, terms=replace(prepared.terms, metric=simulation.terms.metric))
    sites = declarations(prepared.data, prepared.terms.fingerprint)
    with closing(create(to, prepared, Remote(InMemory({}), agreement.common.run, prepared.data.names, sites))) as new:
        write_agreement(to, silent)
        message = dict(simulation.loop.method.broadcast(simulation.server))
        write_atomically(to / FILE, frame(message, sender="server", round=round))
        assert new.directory is not None
        for number in range(1, round + 1):
            record = RoundRecord(round=number, participants=[], bytes_down=0, bytes_up=0, seconds=0.0)
            new.directory.append(record.plain(), ClientsRecord(round=number).plain())
        new.loop.checkpoint.write(round, {}, {}, lambda: None, lambda: None)
    return round


def _silent(hello: Hello) -> Hello:
    """A declaration that says no more than that there is such a site."""
    return Hello(
        name=hello.name,
        versions={},
        train=1,
        validation=0,
        test=1,
        targets=hello.targets,
        outputs=hello.outputs,
        own_classes=None if hello.own_classes is None else 1,
        data="",
    )


def last_broadcast(simulation: Simulation) -> Message:
    """Return the broadcast that every client may have after the last round."""
    path = simulation.directory and simulation.directory.path / FILE
    if path and path.is_file():
        return unframe(read_bytes(path), str(path), sender="server", round=simulation.finished)
    return dict(simulation.loop.method.broadcast(simulation.server))

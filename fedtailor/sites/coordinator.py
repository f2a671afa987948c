"""The server of a real federation: it has sites join, agrees with them, runs the rounds, and hands out no sample.

A run directory of a federation is that of any run, with `federation.json` (what was agreed on, and declared) and
`status.json` (who is there) beside the rest.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from fedtailor._common.errors import FedtailorError, shown
from fedtailor._common.files import make_directory, write_atomically
from fedtailor._common.version import __version__
from fedtailor.client.sites import declarations
from fedtailor.data.agreement import Agreement, Hello, agree_on, read_agreement, write_agreement
from fedtailor.engines.channel import Channel
from fedtailor.engines.own_code import written_parameters
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.engines.remote import Remote
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import OnRound, OnStart, finish_run
from fedtailor.engines.simulation import Simulation, create, reopen
from fedtailor.experiment import Experiment
from fedtailor.messages import NEVER, Message
from fedtailor.messages.letters import Letter, answer_of, fault_of
from fedtailor.server.records import RoundRecord
from fedtailor.server.run_directory import RunDirectory
from fedtailor.sites.plan import Plan
from fedtailor.training.isolation import isolated

STATUS, PRESENT = "status.json", "present"
SILENT = "silent"  # the kind of fault of a site that does not answer


class Coordinator:
    """Runs a plan in the run directory `out`: from the beginning, or on from its last checkpoint."""

    def __init__(self, plan: Plan, out: Path, channel: Channel) -> None:
        self.plan, self.out = plan, out
        self.status = Status(out, plan.sites)
        self._channel = channel

    def run(self, on_round: OnRound | None = None, on_start: OnStart | None = None) -> RunResult:
        """Do all rounds that are left, and have each site write its model file."""
        try:
            with isolated():
                return self._run(on_round, on_start)
        except BaseException:
            self.status.phase("stopped")
            raise

    def _run(self, on_round: OnRound | None, on_start: OnStart | None) -> RunResult:
        begun = (self.out / "experiment.toml").is_file()
        agreement = self._recorded() if begun else self._agree()
        experiment = RunDirectory(self.out).experiment() if begun else self.plan.terms()
        prepared = prepare(experiment, Objects(data=agreement.data(experiment.dtype)))
        experiment = experiment.model_copy(update={"parameters": written_parameters(prepared.terms.method)})
        prepared = replace(prepared, experiment=experiment)
        joined = Joined(self._channel, agreement, prepared, self.status)
        transport = Remote(
            joined,
            agreement.common.run,
            self.plan.sites,
            declarations(prepared.data, prepared.terms.fingerprint),
            self.plan.deadline,
        )
        if begun:
            run = reopen(self.out, experiment, Objects(data=prepared.data), transport)
        else:
            make_directory(self.out)
            write_agreement(self.out, agreement)
            run = create(self.out, prepared, transport)
        with closing(run):
            if begun:
                run.restore()
            else:
                run.start()

            def each_round(record: RoundRecord) -> str | bool | None:
                for number in record.failed:
                    self.status.failed(self.plan.sites[number], record.round)
                self.status.phase("round", record.round)
                return on_round(record) if on_round else None

            self.status.phase("round", run.finished)
            result = finish_run(run, each_round, on_start)
            complete = self._hand_out(run, joined, agreement.common.run)
            self.status.phase("done" if complete else "incomplete", run.finished)
            return result

    def _recorded(self) -> Agreement:
        agreement = read_agreement(self.out)
        if agreement is None:
            raise FedtailorError(f"{self.out} is the run of a simulation: choose another directory.")
        if agreement.common.sites != self.plan.sites:
            raise FedtailorError(f"The run in {self.out} has other sites than the plan: choose another directory.")
        return agreement

    def _agree(self) -> Agreement:
        """Ask all sites what they have, and add it up."""
        self.status.phase("joining")
        experiment, hellos = self.plan.terms(), dict[str, Hello]()
        run = f"{self.plan.name}-{secrets.token_hex(4)}"
        letters = dict.fromkeys(self.plan.sites, Letter("hello", {"plan": self.plan.name}).pack())
        faults: dict[str, str] = {}
        for site, answer in self._channel.ask(letters, self.plan.join):
            try:
                hellos[site] = _hello(answer, site)
                self.status.site(site)
            except FedtailorError as error:
                faults[site] = str(error).rstrip(".")
                self.status.site(site, faults[site])
        missing = [site for site in self.plan.sites if site not in hellos]
        if missing:
            why = "; ".join(f"{site}: {faults.get(site, 'it did not answer')}" for site in missing)
            raise FedtailorError(f"{len(missing)} of {len(self.plan.sites)} sites did not join: {why}.")
        return agree_on(
            run,
            [hellos[site] for site in self.plan.sites],
            classes=self.plan.classes,
            features=self.plan.features,
            how=experiment.preprocessing,
            own_labels=experiment.labels == "own",
        )

    def _hand_out(self, run: Simulation, joined: "Joined", name: str) -> bool:
        """Have each site write the model that it predicts with; tell whether all did."""
        self.status.phase("finishing", run.finished)
        loop, message = run.loop, dict(run.loop.method.broadcast(run.server))
        letters = {
            site: _finish(name, run.finished, loop.versions.get(number, NEVER), message)
            for number, site in enumerate(self.plan.sites)
        }
        written = 0
        for site, answer in joined.ask(letters, self.plan.deadline):
            try:
                if isinstance(answer, str):
                    raise FedtailorError(answer)
                answer_of(answer, site)
                written += 1
            except FedtailorError as error:
                self.status.site(site, f"it has no model file yet: {str(error).rstrip('.')}")
        return written == len(letters)


def _finish(run: str, round: int, version: int, message: Message) -> bytes:
    return Letter("finish", {"run": run, "round": round, "accepted": version}, message).pack()


class Joined:
    """A channel to sites that have joined. One that was away joins again before it gets its letter."""

    def __init__(self, channel: Channel, agreement: Agreement, prepared: Prepared, status: "Status") -> None:
        self._channel, self._agreement, self._prepared, self._status = channel, agreement, prepared, status
        self._declared = {hello.name: hello for hello in agreement.declared}
        self._here: set[str] = set()

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        """Send each site its letter; yield every site once, with its answer, or in words why there is none."""
        absent = self._join([site for site in letters if site not in self._here], deadline)
        for site, why in absent.items():
            self._status.site(site, why)
            yield site, why
        rest = {site: letter for site, letter in letters.items() if site not in absent}
        for site, answer in self._channel.ask(rest, deadline):
            if isinstance(answer, str):
                self._here.discard(site)
            self._status.answered(site, answer)
            self._status.site(site, answer if isinstance(answer, str) else "")
            yield site, answer

    def _join(self, sites: list[str], deadline: float | None) -> dict[str, str]:
        """Have sites declare again what they have, and begin; return why not, of those that cannot."""
        absent: dict[str, str] = {}
        hello = Letter("hello", {"plan": self._agreement.common.run}).pack()
        for site, answer in self._channel.ask(dict.fromkeys(sites, hello), deadline) if sites else ():
            try:
                if _hello(answer, site).data != self._declared[site].data:
                    raise FedtailorError("its data have changed since it joined")
            except FedtailorError as error:
                absent[site] = str(error).rstrip(".")
        begin = {site: self._letter(site) for site in sites if site not in absent}
        for site, answer in self._channel.ask(begin, deadline) if begin else ():
            try:
                if isinstance(answer, str):
                    raise FedtailorError(answer)
                if answer_of(answer, site).header.get("fingerprint") != self._prepared.terms.fingerprint:
                    raise FedtailorError("it has another network or experiment")
                self._here.add(site)
            except FedtailorError as error:
                absent[site] = str(error).rstrip(".")
        return absent | {site: "it did not answer" for site in sites if site not in self._here and site not in absent}

    def _letter(self, site: str) -> bytes:
        """The letter of the beginning, with the vector that training begins with."""
        prepared, common = self._prepared, self._agreement.common
        terms = prepared.terms
        frozen = {f"frozen.{number}": tensor for number, tensor in enumerate(terms.network.frozen_tensors())}
        header = {
            "common": common.model_dump(mode="json"),
            "experiment": _for_sites(prepared).model_dump(mode="json"),
            "number": common.sites.index(site),
            "weights": terms.weights,
        }
        return Letter("begin", header, {"initial": terms.initial, **frozen}).pack()


def _for_sites(prepared: Prepared) -> Experiment:
    """The experiment as sites get it: class weights as numbers, which follow from what all of them declared."""
    experiment = prepared.experiment
    if experiment.class_weights != "balanced":
        return experiment
    return experiment.model_copy(update={"class_weights": ",".join(map(repr, prepared.class_weights))})


def _hello(answer: bytes | str, site: str) -> Hello:
    """Read what a site declares of itself."""
    if isinstance(answer, str):
        raise FedtailorError(answer)
    declared = answer_of(answer, site).header.get("declared")
    _check_version(declared)
    try:
        hello = Hello.model_validate(declared)
    except ValidationError:
        raise FedtailorError("what it declares cannot be read: it may have another version of fedtailor") from None
    if hello.name != site:
        raise FedtailorError("it declares the data of another site")
    return hello


def _check_version(declared: object) -> None:
    """Refuse a site of another version before anything else of it is read: what a version computes, another may not."""
    versions = declared.get("versions") if isinstance(declared, dict) else None
    theirs = versions.get("fedtailor") if isinstance(versions, dict) else None
    if isinstance(theirs, str) and theirs != __version__:
        raise FedtailorError(
            f"it has fedtailor {shown(theirs)}, but the server {__version__!r}: install the same on both"
        )


class _Counts(BaseModel):
    """The part of a status that goes on with the next job: last answers in Unix time, and faults by kind."""

    seen: dict[str, float] = {}
    faults: dict[str, dict[str, int]] = {}

    @classmethod
    def of(cls, out: Path) -> Self:
        try:
            return cls.model_validate_json((out / STATUS).read_bytes())
        except (OSError, ValidationError):
            return cls()


class Status:
    """A small file beside the run's records that says which sites are there, for whoever watches."""

    def __init__(self, out: Path, sites: tuple[str, ...]) -> None:
        self._out, self._phase, self._round = out, "waiting", 0
        self._sites = dict.fromkeys(sites, "it has not answered yet")
        before = _Counts.of(out)  # counts go on where another job stopped
        self._seen, self._faults = before.seen, before.faults

    def phase(self, phase: str, round: int | None = None) -> None:
        """Say what is being done."""
        self._phase, self._round = phase, self._round if round is None else round
        self._write()

    def site(self, name: str, why: str = "") -> None:
        """Say that a site is there, or why it is not."""
        if self._sites.get(name) != (now := why or PRESENT):
            self._sites[name] = now
            self._write()

    def answered(self, name: str, answer: bytes | str) -> None:
        """Count a site's answer: when it came, or the kind of its fault. It is written with the next phase."""
        kind = SILENT if isinstance(answer, str) else fault_of(answer)
        if kind:
            of_site = self._faults.setdefault(name, {})
            of_site[kind] = of_site.get(kind, 0) + 1
        if kind != SILENT:
            self._seen[name] = round(time.time(), 3)

    def failed(self, name: str, round: int) -> None:
        """Say that a site is there and could not do its work."""
        if self._sites.get(name) == PRESENT:
            self.site(name, f"it failed in round {round}: its own log says why")

    def _write(self) -> None:
        make_directory(self._out)
        status = {"phase": self._phase, "round": self._round, "sites": self._sites}
        status |= {"seen": self._seen, "faults": self._faults}
        write_atomically(self._out / STATUS, json.dumps(status, indent=2) + "\n", durable=False)

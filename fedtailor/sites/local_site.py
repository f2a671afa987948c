"""A site of a real federation: it answers the server's letters, and what it keeps never leaves it.

In its directory are a log, a secret, the ledger of private trainings, and for each run the letter that it began with,
its states and its model file.
Nothing that the server sends is imported or used as a path: methods and networks are those of the catalogue and those
that the site's own file allows, and the name of a run is letters, digits, - and _.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, read_bytes, write_atomically, writing
from fedtailor.client.answers import Answering, answered
from fedtailor.client.secure_party import Party
from fedtailor.client.sites import Sites
from fedtailor.client.terms import Terms
from fedtailor.data import Dataset
from fedtailor.data.agreement import RUN, Common, Hello
from fedtailor.engines.own_code import named_code
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import Experiment, deciding_settings, first_difference, make_experiment
from fedtailor.messages import NotFinite, check_finite
from fedtailor.messages.letters import FaultError, Letter, read_letter
from fedtailor.methods import find_method
from fedtailor.model_files.description import write_site_model
from fedtailor.sites.declaration import declare, joined, read_data
from fedtailor.sites.identity import Certified, Opened
from fedtailor.sites.ledger import Budget, Ledger, training_cost
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import LOG, SECRET, SiteFile
from fedtailor.sites.tally import read_tally
from fedtailor.training.isolation import isolated

BEGIN = "begin.safetensors"


class LocalSite:
    """One site, as its own file describes it."""

    def __init__(self, site: SiteFile, plan: Plan | None = None) -> None:
        self.site, self.plan = site, plan or site.read_plan()
        self.number = self.plan.number(site.name)
        self._runs: dict[str, tuple[Experiment, Answering]] = {}  # by name: the present one
        self._tally = read_tally(site.private)

    def answer(self, letter: bytes) -> bytes:
        """Answer a letter, come what may."""
        began = time.monotonic()
        with isolated(self.site.threads):
            answer = answered(letter, self.site.name, self._act, self.log)
        self._tally.add(letter, answer, time.monotonic() - began)
        with suppress(FedtailorError):  # on a full disk, the answer matters more
            self._tally.write(self.site.private)
        return answer

    def log(self, text: str) -> None:
        """Write a line into the site's own log."""
        make_directory(self.site.private)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        path = self.site.private / LOG
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {text}\n")

    def _act(self, letter: Letter) -> Letter:
        match letter.kind:
            case "hello":
                return self._answer(declared=self.hello.model_dump(mode="json"))
            case "begin":
                return self._answer(fingerprint=self._begin(letter, kept=False))
            case "work":
                experiment, answering = self._run(letter.text("run"))
                if letter.number("round") > experiment.rounds:
                    raise FaultError("refused", f"The server asks for more than {experiment.rounds} rounds.")
                answer = answering.work(letter)
                if letter.header["asked"] == "train" and "fault" not in answer.header:
                    self._tally.rounds += 1
                    self.log(f"Round {letter.number('round')} is done.")
                return answer
            case "finish":
                return self._finish(letter)
            case _:
                raise FaultError("letter", f"There is no letter of the kind {letter.kind!r}.")

    def _answer(self, **header: object) -> Letter:
        return Letter("answer", {"site": self.site.name, **header})

    # --- joining ---

    @cached_property
    def dataset(self) -> Dataset:
        """The site's samples."""
        try:
            return read_data(self.site, self.plan)
        except FedtailorError as error:
            raise FaultError("data", str(error)) from None

    @cached_property
    def hello(self) -> Hello:
        """All that the site declares of its data."""
        try:
            return declare(self.site, self.plan, self.dataset, self._secret())
        except FaultError:
            raise
        except FedtailorError as error:
            raise FaultError("data", str(error)) from None

    def _secret(self) -> bytes:
        """A number that nobody else knows: with it, a checksum of the data says nothing about them."""
        path = self.site.private / SECRET
        if not path.exists():
            make_directory(path.parent)
            path.parent.chmod(0o700)
            Ledger(path.parent).open()  # before the secret: where there is a secret, a ledger that is missing was lost
            write_atomically(path, secrets.token_bytes(32))
        return read_bytes(path)

    def _begin(self, letter: Letter, kept: bool) -> str:
        """Take part in a run: build its network around this site's own samples. Return the network's fingerprint."""
        try:
            common = Common.model_validate(letter.header.get("common"))
            experiment = make_experiment(dict(letter.header.get("experiment") or {}))
        except (ValidationError, ValueError, TypeError) as error:
            raise FaultError("letter", f"The letter of the beginning is wrong: {error}") from None
        self._check(common, experiment, letter)
        here = {"device": self.site.device, "weights": None, "engine": "in-process", "workers": None, "deadline": None}
        experiment = experiment.model_copy(update={**here, "data_dir": None, "debug": False, "track": None})
        try:
            data = joined(self.dataset, experiment, common, self.number)
        except FedtailorError as error:
            raise FaultError("data", str(error)) from None
        prepared = prepare(experiment, Objects(data=data), site=True)
        terms = replace(_from_server(prepared.terms, letter), secret_noise=True)  # the server knows the seed
        directory = self._directory(common.run)
        sites = Sites.at(prepared.data, terms, directory / "states")
        spend = self._spending(prepared)
        tells = self.site.tells(self.plan)
        party = self._party(prepared, common, directory) if terms.secure else None
        answering = Answering(common.run, self.site.name, self.number, sites, tells, self.log, spend, party)
        if not kept:
            make_directory(directory)
            write_atomically(directory / BEGIN, letter.pack())
            self.log(f"Joined the run {common.run} as number {self.number}: {experiment.method}.")
        self._runs = {common.run: (experiment, answering)}
        return terms.fingerprint

    def _check(self, common: Common, experiment: Experiment, letter: Letter) -> None:
        """Refuse a run that is not the plan's, beyond what the site's own file allows."""
        if common.sites != self.plan.sites or letter.number("number") != self.number:
            raise FaultError("refused", f"The roster of the run {common.run} is not the plan's.")
        if self.plan.classes is not None and common.classes != self.plan.classes:
            raise FaultError("refused", f"The classes of the run {common.run} are not the plan's.")
        for kind, name in named_code(experiment).items():
            if name not in self.site.allow:
                raise FaultError("refused", f"The {kind} {name} is not of the catalogue: only `allow` could admit it.")
        planned = self.plan.terms()
        named = {**deciding_settings(experiment), "weights": None, "class_weights": planned.class_weights}
        if experiment.method == planned.method:
            complete = find_method(planned.method, planned.parameters).model_dump(exclude_none=True)
            planned = planned.model_copy(update={"parameters": complete})
        differing = first_difference({**deciding_settings(planned), "weights": None}, named)
        private = (experiment.privacy, experiment.epsilon) != (planned.privacy, planned.epsilon)
        private |= experiment.secure != planned.secure  # as little to be had without as privacy
        # The plan's budget is that of its own trainings: others need one in the site's file.
        priced = planned.privacy is None or self.site.epsilon is not None
        if differing and (private or not priced or experiment.method not in self.site.allow):
            name, before, after = differing
            raise FaultError("refused", f"The server asks for {name} {after}, but the plan says {before}.")

    def _party(self, prepared: Prepared, common: Common, directory: Path) -> Party:
        """This site in the secure aggregation of a run, in the name of its kit."""
        try:
            identity = Certified(self.site.path(self.site.kit), self.site.name)
        except FedtailorError as error:
            raise FaultError("refused", str(error)) from None
        return prepared.party(common.run, common.sites, self.number, identity, Opened(directory))

    def _directory(self, run: str) -> Path:
        if not RUN.fullmatch(run):
            raise FaultError("letter", "The name of the run is no name.")
        return self.site.private / "runs" / run

    def _run(self, run: str) -> tuple[Experiment, Answering]:
        """Go on with a run, after a restart too."""
        if run not in self._runs:
            path = self._directory(run) / BEGIN
            if not path.is_file():
                raise FaultError("state", f"This site has not joined the run {run}.")
            self._begin(read_letter(read_bytes(path), str(path)), kept=True)
        return self._runs[run]

    def _spending(self, prepared: Prepared) -> Callable[[], None]:
        """Make what is called before each training of a run: it writes the cost down, or refuses."""
        start, end = prepared.data.places[self.number, :2].tolist()
        try:
            budget = Budget.of(self.site, self.plan, training_cost(prepared, end - start))
        except FedtailorError as error:
            raise FaultError("refused", str(error)) from None

        def spend() -> None:
            try:
                if budget is not None:
                    Ledger(self.site.private).spend(budget)
            except FedtailorError as error:
                raise FaultError("refused", str(error)) from None

        return spend

    # --- the end ---

    def _finish(self, letter: Letter) -> Letter:
        """Write the model that this site predicts with: it stays here."""
        experiment, answering = self._run(letter.text("run"))
        sites, round = answering.sites, letter.number("round")
        sites.store.recall(self.number, letter.number("accepted"))
        sites.store.at(self.number, letter.number("accepted"))  # refuses if it is lost
        theta = sites.personal_model(self.number, round, dict(letter.tensors))
        site = sites.site(self.number)
        measured = site.measure(site.network_at(theta))
        stem = self.site.private / "models" / answering.run
        make_directory(stem.parent)
        columns = {"label_column": self.site.label_column, "client_column": None}
        files = write_site_model(
            stem, experiment, sites.terms, sites.data, self.number, theta, measured, round, columns
        )
        self.log(f"Wrote the model of round {round}: {files[0]}.")
        return self._answer(written=True)


def _from_server(terms: Terms, letter: Letter) -> Terms:
    """Begin with the vector and the frozen parts that the server sent; the noise for privacy is the site's own."""
    try:
        check_finite({"The initial vector": letter.tensors})
        _take(terms.initial, letter.tensors["initial"])
        for number, tensor in enumerate(terms.network.frozen_tensors()):
            _take(tensor, letter.tensors[f"frozen.{number}"])
    except (KeyError, ValueError, TypeError, NotFinite) as error:
        raise FaultError("letter", f"The vector of the beginning does not fit the network: {error}") from None
    weights = letter.header.get("weights", "")
    return replace(terms, weights=weights if isinstance(weights, str) else "", secret_noise=True)


def _take(ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{tuple(theirs.shape)} {theirs.dtype} in place of {tuple(ours.shape)} {ours.dtype}")
    ours.detach().copy_(theirs)

"""The run directory: the complete experiment, a JSON line a round, every client's results, the checkpoints.

experiment.toml    all settings: `fedtailor run experiment.toml` does it again
about.json         the versions that made it, and the settings that decide its numbers
federation.json    where clients are real sites: what they agreed on, and declared
status.json        and who of them is there now
job.json           and what came of the last job that ran it
network.json       the layers of the network, body, head and frozen, and what a client uploads
partition.json     every client's name and its training, validation and test samples by class; of a table, how its
                   columns became features
rounds.jsonl       one object a round: metrics, bytes, seconds
clients.jsonl      one object a round: each client's results and bytes
trackers/          the run's ids in MLflow and the like, if it is tracked
observed/          what the method shows of itself, by round, if it shows anything
checkpoint/        what to resume from
lock               held by the process that runs here
result.json        the outcome, once the run is finished

Everything is sealed by a checksum except `experiment.toml`, which people may edit: it is compared with `about.json`.
"""

import os
import platform
import stat
import warnings
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import (
    append,
    damaged,
    fsync_directory,
    fsync_file,
    is_regular,
    make_directory,
    read_sealed,
    reading,
    remove,
    seal,
    truncate,
    unseal,
    write_atomically,
    writing,
)
from fedtailor._common.toml import write_toml
from fedtailor._common.version import __version__
from fedtailor.data import FederatedData
from fedtailor.data.contact_sheet import contact_sheet
from fedtailor.experiment import Experiment, deciding_settings, first_difference, make_experiment, read_experiment
from fedtailor.server.checkpoint import read_manifest
from fedtailor.server.records import About, ClientsRecord, Outcome, Partition, Plain, RoundRecord, finite
from fedtailor.server.setup import Setup
from fedtailor.training.metrics import ACCURACY, LOSS, Metric

BEFORE = {"stratify": False}  # what runs did before there was a setting for it

try:
    import fcntl
except ImportError:  # not on this system: two processes in one run directory are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

FORMAT = 1  # of all files here: a run in another format is refused
FOLDERS = (
    "checkpoint",
    "checkpoint/sites",
    "checkpoint/server",
    "checkpoint/hostile",
    "observed",
    "tensorboard",
    "trackers",
)
GROWING = ("rounds.jsonl", "clients.jsonl")
BEGINNING = (
    "lock",
    "federation.json",
    "status.json",
    "job.json",
    "partition.json",
    "network.json",
    "about.json",
)  # written before `experiment.toml`, which makes it a run
FILES = (*BEGINNING, "experiment.toml", *GROWING, "result.json")

AnyRecord = TypeVar("AnyRecord", RoundRecord, ClientsRecord)
_OPEN: set[Path] = set()  # directories in which this process is writing: its own lock would not stop it
_LOCKS: set[int] = set()  # descriptors of locked files


@dataclass(frozen=True)
class Tail:
    """The end of a growing file: its place, and the checksum of the last line."""

    end: int = 0
    checksum: str = ""


@dataclass
class RunDirectory:
    """One run's files. While a process writes in it, it is that process's alone."""

    path: Path
    behind: bool = False  # experiment.toml has fewer rounds than about.json
    _lock: int | None = None
    _tails: dict[str, Tail] = field(default_factory=lambda: dict.fromkeys(GROWING, Tail()))  # as this wrote them
    _before: Tail = Tail()  # the last round's record

    @classmethod
    def create(
        cls,
        path: Path,
        experiment: Experiment,
        data: FederatedData,
        network: str,
        setup: Setup,
        metric: Metric,
        hostile: Sequence[int] = (),
    ) -> "RunDirectory":
        check_free(path)
        partition = {**describe(data, hostile), "network": network}
        about = About(format=FORMAT, versions=versions(), experiment=deciding_settings(experiment), metric=metric)
        make_directory(path)
        run = cls(path)
        run.lock()
        try:
            check_free(path)  # nobody else was faster
            write_atomically(path / "partition.json", seal(partition))
            write_atomically(path / "network.json", seal(asdict(setup), pretty=True))
            write_atomically(path / "about.json", seal(asdict(about), pretty=True))
            write_atomically(path / "experiment.toml", write_toml(experiment.model_dump()))
        except BaseException:
            run.unlock()
            raise
        return run

    # --- what the run is ---

    def experiment(self) -> Experiment:
        """The run's experiment; says so if this is not a run directory, or if `experiment.toml` was edited.

        A lower number of rounds there is that of a run which was killed while it was made longer.
        """
        if not (self.path / "experiment.toml").is_file() or not (self.path / "partition.json").is_file():
            if is_beginning(self.path) and any(self.path.iterdir()):
                raise FedtailorError(f"The run in {self.path} was stopped before it began: start it again.")
            raise FedtailorError(f"{self.path} is not a run directory: it has no experiment.toml and partition.json.")
        # A setting that is newer than the run has its default, but for those that would change its numbers.
        made = make_experiment({**BEFORE, **self.about().experiment})
        found = make_experiment({**BEFORE, **read_experiment(self.path / "experiment.toml")})
        self.behind = found.rounds < made.rounds
        if self.behind:
            found = found.model_copy(update={"rounds": made.rounds})
        if (edited := first_difference(deciding_settings(made), deciding_settings(found))) is not None:
            name, before, after = edited
            instead = "use `fedtailor resume --rounds`" if name == "rounds" else "start a new run for another one"
            raise FedtailorError(
                f"{self.path / 'experiment.toml'} was edited: {name} is {after}, but the run was made with {before}; "
                f"put it back, and {instead}."
            )
        return found

    def about(self) -> About:
        """The versions that made the run, and the settings that decide its numbers."""
        if not (self.path / "about.json").is_file():
            raise FedtailorError(
                f"The run in {self.path} has no about.json: an older version of fedtailor made it, or it was removed; "
                "run its experiment.toml again."
            )
        about = read_sealed(self.path / "about.json", About.from_json)
        if about.format != FORMAT:
            made = about.versions.get("fedtailor", "unknown")
            raise FedtailorError(
                f"The run in {self.path} was made by fedtailor {made} in another format ({about.format}, not "
                f"{FORMAT}): use that version, or run its experiment.toml again."
            )
        return about

    def metric(self) -> Metric:
        """The metric that decides. A run of an older version has none: it was the accuracy, or else the loss."""
        if (metric := self.about().metric) is not None:
            return metric
        return ACCURACY if any(record.accuracy is not None for record in self.rounds()) else LOSS

    def warn_of_other_versions(self) -> None:
        """Say so if the run was made by another version of something that its numbers may depend on."""
        made, here = self.about().versions, versions()
        differing = [
            f"{name} {made[name]}, not {here[name]}" for name in here if made.get(name, here[name]) != here[name]
        ]
        if differing:
            warnings.warn(
                f"the run in {self.path} was made with {' and with '.join(differing)}: its numbers may not be those of "
                "a run that was never stopped.",
                stacklevel=2,
            )

    def extend(self, after: Experiment) -> None:
        """Write down that the run gets more rounds. Killed in between, it has them already (see `experiment`)."""
        about = self.about()
        about.experiment["rounds"] = after.rounds
        write_atomically(self.path / "about.json", seal(asdict(about), pretty=True))
        write_atomically(self.path / "experiment.toml", write_toml(after.model_dump()))
        remove(self.path / "result.json")

    def partition(self) -> Partition:
        """Every client's name and its samples by class."""
        return read_sealed(self.path / "partition.json", Partition.from_json)

    def setup(self) -> Setup | None:
        """The network's layers and the uploads; None for a run of an older version."""
        path = self.path / "network.json"
        return read_sealed(path, Setup.from_json) if path.exists() else None

    def check(self, data: FederatedData, network: str, hostile: Sequence[int] = ()) -> None:
        """Refuse to go on with another beginning, or without the checkpoint, of which the first comes before the first
        record."""
        manifest, rounds = self.path / "checkpoint" / "manifest.json", self.path / "rounds.jsonl"
        if not manifest.exists() and rounds.exists() and rounds.stat().st_size:
            raise damaged(manifest, "it is missing")
        self.setup()  # to notice if it is damaged
        self.check_beginning(data, network, hostile)

    def check_beginning(self, data: FederatedData, network: str, hostile: Sequence[int] = ()) -> None:
        """Refuse other data, another first vector (`network` is its checksum), or other hostile clients."""
        recorded = self.partition()
        if recorded.network != network:
            raise FedtailorError(f"The network is not the one of the run in {self.path}: it cannot go on with it.")
        found = Partition.from_plain({**describe(data, hostile), "network": network})
        if recorded.assignment != found.assignment:
            raise FedtailorError(
                f"The partition {recorded.partition} is not that of the run in {self.path}: it gives samples to other "
                "clients than it did, so bring it back as it was."
            )
        if recorded.hostile != found.hostile:
            raise FedtailorError(f"The hostile clients are not those of the run in {self.path}: it cannot go on.")
        if recorded.preprocessing != found.preprocessing:
            raise FedtailorError(f"The preprocessing is not that of the run in {self.path}: its table has changed.")
        if recorded != found:
            raise FedtailorError(f"The data are not those of the run in {self.path}: it cannot go on with them.")

    def join(self, data: FederatedData) -> None:
        """Write down that clients have joined: these are the data with them."""
        before = self.partition()
        content = {**describe(data, before.hostile), "network": before.network}
        write_atomically(self.path / "partition.json", seal(content))

    # --- what it has done ---

    def rounds(self, safe: int | None = None) -> list[RoundRecord]:
        """Read the record of every round; `safe` is the one of the checkpoint of a run that is not finished."""
        return [record for record, _ in _lines(self.path / "rounds.jsonl", RoundRecord, safe)]

    def clients(self, safe: int | None = None) -> Iterator[ClientsRecord]:
        """Read the clients' records one by one: those of many rounds together could fill the memory."""
        return (record for record, _ in _lines(self.path / "clients.jsonl", ClientsRecord, safe))

    def outcome(self) -> Outcome | None:
        """Read the number of rounds after which the run was finished; None if it was not yet."""
        path = self.path / "result.json"
        return read_sealed(path, Outcome.from_json) if path.exists() else None

    def records(self) -> tuple[Partition, list[RoundRecord], list[ClientsRecord]]:
        """Read everything, and refuse records that do not fit together."""
        partition, outcome, _ = self.partition(), self.outcome(), self.setup()
        saved = read_manifest(self.path / "checkpoint")
        safe = saved.round if saved and outcome is None else None
        rounds = self.rounds(safe)  # before the clients' records, of which a run at work always has as many
        clients = list(self.clients(safe))
        if outcome is not None and len(rounds) < outcome.rounds:
            raise damaged(self.path / "rounds.jsonl", f"it has {len(rounds)} of {outcome.rounds} rounds")
        if safe is not None and safe <= len(clients) < len(rounds):
            raise _unsynced(self.path / "clients.jsonl", safe)
        if len(clients) < len(rounds):
            raise damaged(self.path / "clients.jsonl", f"it has {len(clients)} of {len(rounds)} rounds")
        known = len(partition.clients)
        lists = ((*record.participants, *record.failed, *record.missing) for record in rounds)
        if any(client >= known for clients_of_round in lists for client in clients_of_round):
            raise damaged(self.path / "rounds.jsonl", "it names clients that do not exist")
        named = (
            client for record in clients for of in (record.results, record.bytes_up, record.bytes_down) for client in of
        )
        if any(client >= known for client in named):
            raise damaged(self.path / "clients.jsonl", "it names clients that do not exist")
        return partition, rounds, clients

    # --- writing ---

    def sync(self) -> None:
        """Have the system write the records to the disk itself."""
        written = [self.path / name for name in GROWING if self._tails[name].end]
        for path in written:
            fsync_file(path)
        if written:
            with writing(self.path):
                fsync_directory(self.path)

    def cut(self, round: int) -> None:
        """Forget the records behind this round, as they will be made again."""
        for name, kind in zip(GROWING, (RoundRecord, ClientsRecord), strict=True):
            path, tail, found = self.path / name, Tail(), 0
            for _, behind in _lines(path, kind) if round else ():
                found, tail = found + 1, behind
                if found == round:
                    break
            if found != round:
                raise damaged(path, f"it does not have all rounds up to {round}")
            if path.exists():
                truncate(path, tail.end)
            self._tails[name] = tail

    def append(self, round: Plain, clients: Plain) -> None:
        """Write a round down."""
        self._before = self._tails["rounds.jsonl"]
        for name, record in (("clients.jsonl", clients), ("rounds.jsonl", round)):
            self._append(name, record)

    def amend(self, round: Plain) -> None:
        """Write the record of the round that was written last again."""
        truncate(self.path / "rounds.jsonl", self._before.end)
        self._tails["rounds.jsonl"] = self._before
        self._append("rounds.jsonl", round)

    def _append(self, name: str, record: Plain) -> None:
        before = self._tails[name]
        line = seal(record, before.checksum)
        append(self.path / name, line, before.end)
        self._tails[name] = Tail(before.end + len(line), unseal(line, before.checksum))

    def finish(self, result: Plain) -> None:
        write_atomically(self.path / "result.json", seal(plain(result), pretty=True))

    # --- whose it is ---

    def lock(self) -> None:
        """Keep other processes from writing here. A killed process's lock is gone with it."""
        self.check_links()
        if self.path.resolve() in _OPEN:
            raise FedtailorError(f"Another run of this process is writing in {self.path}: wait for it.")
        _OPEN.add(self.path.resolve())
        if fcntl is None:
            return
        try:
            with writing(self.path / "lock"):
                self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            _LOCKS.add(self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FedtailorError:
            self.unlock()
            raise
        except OSError:
            self.unlock()
            raise FedtailorError(f"Another process is running in {self.path}: wait for it, or end it first.") from None

    def unlock(self) -> None:
        _OPEN.discard(self.path.resolve())
        if self._lock is not None:
            _LOCKS.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def check_links(self) -> None:
        """Refuse a directory in which a name of ours leads to somewhere else: nothing is written or removed there."""
        for names, is_right, kind in ((FOLDERS, stat.S_ISDIR, "directory"), (FILES, stat.S_ISREG, "file")):
            for name in names:
                path = self.path / name
                if not os.path.lexists(path):
                    continue
                found = path.lstat()
                linked = name in GROWING and found.st_nlink > 1  # these are not replaced, but written in
                if linked or not is_right(found.st_mode):
                    raise FedtailorError(
                        f"{path} is no {kind} of its own (a link, perhaps), and a run writes nowhere but in its "
                        f"directory: put a real {kind} there, or remove it."
                    )


def _close_locks() -> None:
    """Let go of a parent's locks in a process that was forked: it could outlive the parent."""
    for descriptor in _LOCKS:
        os.close(descriptor)
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


def versions() -> dict[str, str]:
    """The versions of all that a run's numbers may depend on, and the kind of processor: it decides about rounding."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = {"fedtailor": __version__, "torch": str(torch.__version__), "numpy": np.__version__, "python": python}
    return {**packages, "processor": torch.backends.cpu.get_cpu_capability()}


def describe(data: FederatedData, hostile: Sequence[int] = ()) -> Plain:
    """The partition as plain values, with a fingerprint of the samples themselves, and the hostile clients."""
    splits = {split: data.counts(split).tolist() for split in ("train", "validation", "test")}
    return {
        "data": data.name,
        "classes": list(data.classes),
        "clients": list(data.names),
        "new": sorted(data.new),
        "partition": data.partition,
        "assignment": data.assignment,
        **splits,
        "n_train": data.n_samples.tolist(),
        "fingerprint": data.fingerprint(),
        "joined": [asdict(join) for join in data.joined],
        "hostile": list(hostile),
        "preprocessing": data.preprocessing and data.preprocessing.model_dump(mode="json"),
        "shifts": list(data.shifts),
        "picture": _picture(data) if data.shifts else "",
    }


def _picture(data: FederatedData) -> str:
    """Draw one image of each client, as base64; "" if the samples are no images."""
    sheet = contact_sheet(data)
    return "" if sheet is None else b64encode(sheet).decode()


def check_free(path: Path) -> None:
    """Refuse a run directory that is not new; what a run left that was killed before it began is taken over."""
    if (path / "experiment.toml").is_file():
        raise FedtailorError(f"{path} is a run already: choose another --out, or go on with `fedtailor resume {path}`.")
    if os.path.lexists(path) and not is_beginning(path):
        raise FedtailorError(f"{path} exists already and is not a run directory: choose another --out.")


def is_beginning(path: Path) -> bool:
    """Find out whether a directory holds nothing, or no more than a run writes before it begins."""
    if not path.is_dir():
        return False
    ours = {*BEGINNING, *(f"{name}.tmp" for name in (*BEGINNING, "experiment.toml"))}
    return all(file.name in ours and is_regular(file) for file in path.iterdir())


def new_directory(name: str, below: str = "runs") -> Path:
    """The first free `runs/NAME-K`."""
    number = 1
    while os.path.lexists(path := Path(below) / f"{name}-{number}"):
        number += 1
    return path


def plain(value: Any) -> Any:
    """A value as JSON has it: text for keys, and null for NaN and infinities."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return finite(value)


def _lines(path: Path, kind: type[AnyRecord], safe: int | None = None) -> Iterator[tuple[AnyRecord, Tail]]:
    """The records of a file, and the file's tail behind each; a last line that a crash cut off is left out. Rounds
    behind the `safe` one can be made again."""
    if not path.exists():
        return
    tail, number = Tail(), 0
    with reading(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            number += 1
            try:
                tail = Tail(tail.end + len(line), unseal(line, tail.checksum))
                record = kind.from_json(line)
                if record.round != number:
                    raise ValueError(f"it is of round {record.round}")
            except ValueError as error:
                unsynced = safe is not None and number > safe
                raise (_unsynced(path, safe) if unsynced else damaged(path, error, number)) from None
            yield record, tail


def _unsynced(path: Path, round: int | None) -> FedtailorError:
    """Make the error of records that were not on the disk itself yet: a power cut may leave any part of them."""
    return FedtailorError(
        f"{path} is damaged behind the checkpoint of round {round}, as after a power cut: `fedtailor resume "
        f"{path.parent}` makes these rounds again."
    )

"""The run directory: the complete experiment, a JSON line a round, every client's results, the checkpoints.

experiment.toml    all settings: `fedtailor run experiment.toml` does it again
partition.json     every client's name and its training, validation and test samples by class
rounds.jsonl       one object a round: metrics, bytes, seconds
clients.jsonl      one object a round: each client's results and bytes
observed/          what the method shows of itself, by round, if it shows anything
checkpoint/        what to resume from
lock               held by the process that runs here
result.json        the outcome, once the run is finished
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from fedtailor.data import FederatedData
from fedtailor.errors import FedtailorError, brief
from fedtailor.experiment import Experiment, make_experiment, read_experiment, write_toml
from fedtailor.files import fsync_file, write_atomically
from fedtailor.server.records import ClientsRecord, Plain, RoundRecord, finite

try:
    import fcntl
except ImportError:  # not on this system: two processes in one run directory are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

AnyRecord = TypeVar("AnyRecord", RoundRecord, ClientsRecord)
_OPEN: set[Path] = set()  # directories in which this process is writing: its own lock would not stop it


class RunDirectory:
    """One run's files. While a process writes in it, it is that process's alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, experiment: Experiment, data: FederatedData, network: str) -> "RunDirectory":
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FedtailorError(f"The run directory {path} cannot be made: {error.strerror}.") from None
        run = cls(path)
        write_atomically(path / "partition.json", json.dumps(plain({**describe(data), "network": network})) + "\n")
        write_atomically(path / "experiment.toml", write_toml(experiment.model_dump()))
        run.lock()
        return run

    def rounds(self) -> list[RoundRecord]:
        """Read the record of every round."""
        return [self._typed(RoundRecord, plain) for plain, _ in _lines(self.path / "rounds.jsonl")]

    def clients(self) -> Iterator[ClientsRecord]:
        """Read the clients' records one by one: those of many rounds together could fill the memory."""
        return (self._typed(ClientsRecord, plain) for plain, _ in _lines(self.path / "clients.jsonl"))

    def _typed(self, kind: type[AnyRecord], plain: Plain) -> AnyRecord:
        try:
            return kind.from_plain(plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FedtailorError(f"{self.path} is damaged: its records cannot be read ({brief(error)}).") from None

    def experiment(self) -> Experiment:
        """The run's experiment; says so if this is not a run directory at all."""
        if not (self.path / "experiment.toml").is_file() or not (self.path / "partition.json").is_file():
            raise FedtailorError(f"{self.path} is not a run directory: it has no experiment.toml and partition.json.")
        return make_experiment(read_experiment(self.path / "experiment.toml"))

    def partition(self) -> Plain:
        found = _json(self.path / "partition.json")
        if not isinstance(found, dict) or not isinstance(found.get("clients"), list):
            raise FedtailorError(f"{self.path / 'partition.json'} is damaged: it names no clients.")
        return found

    def check(self, data: FederatedData, network: str) -> None:
        """Refuse to go on with other data, or from another first vector (`network` is its checksum)."""
        recorded = self.partition()
        if recorded.pop("network", None) != network:
            raise FedtailorError(f"The network is not the one of the run in {self.path}: it cannot go on with it.")
        if recorded != plain(describe(data)):
            raise FedtailorError(f"The data are not those of the run in {self.path}: it cannot go on with them.")

    def sync(self) -> None:
        """Have the system write the records to the disk itself."""
        for name in ("rounds", "clients"):
            if (path := self.path / f"{name}.jsonl").exists():
                fsync_file(path)

    def cut(self, round: int) -> None:
        """Forget the records behind this round, as they will be made again."""
        for path in (self.path / "rounds.jsonl", self.path / "clients.jsonl"):
            found, end = 0, 0
            for record, behind in _lines(path):
                if record["round"] != found + 1 or found == round:
                    break
                found, end = found + 1, behind
            if found != round:
                raise FedtailorError(f"{path} does not have all rounds up to {round}: it was changed.")
            if path.exists():
                os.truncate(path, end)

    def append(self, round: Plain, clients: Plain) -> None:
        """Write a round down."""
        for name, record in (("clients", clients), ("rounds", round)):
            with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def finish(self, result: Plain) -> None:
        write_atomically(self.path / "result.json", json.dumps(plain(result), indent=2) + "\n")

    def lock(self) -> None:
        """Keep other processes from writing here. A killed process's lock is gone with it."""
        if self.path.resolve() in _OPEN:
            raise FedtailorError(f"Another run of this process is writing in {self.path}: wait for it.")
        _OPEN.add(self.path.resolve())
        if fcntl is None:
            return
        self._lock = (self.path / "lock").open("w", encoding="utf-8")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.unlock()
            raise FedtailorError(f"Another process is running in {self.path}: wait for it, or end it first.") from None

    def unlock(self) -> None:
        _OPEN.discard(self.path.resolve())
        if self._lock is not None:
            self._lock.close()


def describe(data: FederatedData) -> Plain:
    """The partition as plain values, with a fingerprint of the samples themselves."""
    splits = {split: data.counts(split).tolist() for split in ("train", "validation", "test")}
    return {
        "data": data.name,
        "classes": list(data.classes),
        "clients": list(data.names),
        "new": sorted(data.new),
        **splits,
        "fingerprint": data.fingerprint(),
    }


def check_free(path: Path) -> None:
    """Refuse a run directory that is not new."""
    if (path / "experiment.toml").is_file():
        raise FedtailorError(f"{path} is a run already: choose another --out, or go on with `fedtailor resume {path}`.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FedtailorError(f"{path} exists already and is not a run directory: choose another --out.")


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


def _json(path: Path) -> Plain:
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError, RecursionError):
        raise FedtailorError(f"{path} is damaged: it is not JSON.") from None


def _lines(path: Path) -> Iterator[tuple[Plain, int]]:
    """The records of a file, and where each of them ends; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise FedtailorError(f"{path} is damaged: it has a line that is not JSON.") from None
            yield record, end

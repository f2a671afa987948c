"""Trackers: tools like TensorBoard, MLflow and Weights & Biases get a run's metrics beside the run's own record.

What a tracker does, or fails to do, is no matter of the run: its functions are called in a thread of their own, and one
that fails is left out with a warning. `trackers/NAME.json` in the directory of a run or a study keeps its id in the
tool and the last round that the tool got: a resumed run goes on there.
"""

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, ClassVar

from fedtailor._common.errors import FedtailorError, brief, shown, unknown, warn
from fedtailor._common.extras import install_command
from fedtailor._common.files import Count, make_directory, read_sealed, seal, write_atomically
from fedtailor._common.imports import import_object
from fedtailor._common.toml import write_toml
from fedtailor.experiment import NONE, Experiment, flat
from fedtailor.server.records import Plain, Record, RoundRecord
from fedtailor.server.run_directory import plain

# By name: the module, and what has to be installed for it. The names are those of the extras, too.
TRACKERS = {
    "mlflow": ("fedtailor.engines.mlflow:MLflow", ("mlflow", "sqlalchemy", "alembic")),
    "tensorboard": ("fedtailor.engines.tensorboard:TensorBoard", ("torch.utils.tensorboard",)),
    "wandb": ("fedtailor.engines.wandb:WandB", ("wandb",)),
}
FOLDER = "trackers"
WAIT = 60.0  # seconds without an answer after which a tracker is given up


@dataclass
class TrackedRun:
    """A run as a tracker sees it: of one experiment, or a study that such runs belong to.

    `id` is what `start` returned, also when the run is resumed; it is "" before that. `logged` is the last round that
    was logged before, and `finished` the last one that counts: a resumed run repeats those between them.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)  # the settings, flat: `lr`, `parameters.lam`
    directory: Path | None = None  # of the run's own record, if it has one
    study: "TrackedRun | None" = None  # the comparison or tuning that it is a part of
    id: str = ""
    logged: int = 0
    finished: int = 0
    is_study: bool = False
    notes: list[str] = field(default_factory=list)  # what the tracker puts here becomes a warning


class Tracker:
    """What gets the metrics of runs. Override what you need; every function may fail.

    All functions of a tracker are called one after the other, in one thread. A study and its runs are open at once.
    """

    needs_directory: ClassVar[bool] = False  # True: it writes into the run directory, and needs one

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or go on with `run.id` where that is not empty. Return its id in the tool."""
        return run.id

    def log(self, run: TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a round."""

    def save(self, run: TrackedRun, name: str, files: Sequence[Path]) -> None:
        """Take files under a name: the `record` of a run, the `table` and `report` of a study, exported `models`."""

    def finish(self, run: TrackedRun, complete: bool) -> None:
        """End a run. It is not complete if it failed or was interrupted."""


Track = str | Tracker | type[Tracker] | Sequence[str | Tracker | type[Tracker]]


@dataclass(kw_only=True)
class Kept(Record):
    """The file of a tracker in a run's directory."""

    id: str
    round: Count = 0


class Feed:
    """One tracker, and the thread in which its functions are called: while a run or study works, and between runs none,
    as workers are forked there."""

    def __init__(self, name: str, tracker: Tracker, named: bool) -> None:
        self.name, self.tracker, self.named = name, tracker, named
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None
        self._made = 0
        self._failed: str = ""
        self._warned = False

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called in its turn."""
        if self._failed:
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
            self._thread.start()
        self._calls.put(function)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._failed:
                try:
                    call()
                except (Exception, SystemExit) as error:  # whatever a tool or its server comes up with
                    self._failed = brief(error)
            self._made += 1

    def wait(self) -> None:
        """Wait until all calls are made, but not for a tracker that does not come to an end with one."""
        if self._thread is not None:
            self._calls.put(None)
            made = -1
            while self._thread.is_alive() and made != self._made:
                made = self._made
                self._thread.join(WAIT)
            if self._thread.is_alive():
                self._failed = self._failed or f"no answer for {WAIT:g} seconds"
            self._thread = None

    def say(self, run: TrackedRun) -> None:
        """Warn of what the tracker has to say, and once of its failure."""
        while run.notes:
            warn(run.notes.pop(0))
        if self._failed and not self._warned:
            self._warned = True
            warn(f"The tracker {self.name} failed ({self._failed}): what follows is done without it.")

    # --- what is called in the thread ---

    def start(self, run: TrackedRun) -> None:
        if (file := self._file(run)) is not None and file.exists():
            kept = read_sealed(file, Kept.from_json)
            run.id, run.logged = kept.id, kept.round
        run.id = self.tracker.start(run) or ""
        self._keep(run, run.logged)

    def log(self, run: TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log(run, round, metrics)
        self._keep(run, max(run.logged, round))

    def save(self, run: TrackedRun, name: str, files: Sequence[Path]) -> None:
        self.tracker.save(run, name, files)

    def finish(self, run: TrackedRun, complete: bool) -> None:
        self.tracker.finish(run, complete)

    def _file(self, run: TrackedRun) -> Path | None:
        return run.directory and run.directory / FOLDER / f"{self.name.replace(':', '.')}.json"

    def _keep(self, run: TrackedRun, round: int) -> None:
        if (file := self._file(run)) is not None:
            make_directory(file.parent)
            write_atomically(file, seal(asdict(Kept(id=run.id, round=round))))


class OpenRun:
    """A run that is tracked at present."""

    def __init__(self, of: Mapping[Feed, TrackedRun]) -> None:
        self.of = of
        for feed, run in of.items():
            if feed.tracker.needs_directory and run.directory is None:
                raise FedtailorError(f"The tracker {feed.name} needs a directory: give --out (out= in Python).")
        self._call(Feed.start)

    def _call(self, function: Callable[..., None], *given: Any) -> None:
        for feed, run in self.of.items():
            feed.say(run)
            feed.call(partial(function, feed, run, *given))

    def record(self, record: RoundRecord) -> None:
        """Track the record of a round: what has a number in it, under the same names."""
        numbers = {name: value for name, value in record.flat().items() if isinstance(value, int | float)}
        del numbers["round"]
        self.log(record.round, {**numbers, "participants": len(record.participants)})

    def log(self, round: int, metrics: Mapping[str, float]) -> None:
        """Track the metrics of a round."""
        self._call(Feed.log, round, dict(metrics))

    def save(self, name: str, files: Sequence[Path]) -> None:
        """Track files, and wait until they are taken: they may go away after that."""
        self._call(Feed.save, name, files)
        self.wait()

    def save_record(self, experiment: Experiment, outcome: Plain) -> None:
        """Track what repeats a run, and what came of it."""
        if self.of:
            with TemporaryDirectory() as folder:
                files = [Path(folder) / "experiment.toml", Path(folder) / "result.json"]
                write_atomically(files[0], write_toml(experiment.model_dump()))
                write_atomically(files[1], seal(plain(outcome), pretty=True))
                self.save("record", files)

    def finish(self, complete: bool) -> None:
        """End the run."""
        self._call(Feed.finish, complete)
        self.wait()

    @property
    def ids(self) -> dict[str, str]:
        """The run's ids by tracker."""
        return {feed.name: run.id for feed, run in self.of.items()}

    def wait(self) -> None:
        """Wait until all is done so far."""
        for feed, run in self.of.items():
            feed.wait()
            feed.say(run)


class Tracking:
    """The trackers of one run, or of a study and all its runs: from names, objects, or another one that is shared."""

    def __init__(self, track: "Track | Tracking | None") -> None:
        self.feeds: list[Feed] = track.feeds if isinstance(track, Tracking) else list(map(_feed, _listed(track)))
        self._studies: dict[Feed, TrackedRun] = {}

    @property
    def names(self) -> str | None:
        """The names among the trackers, as an experiment has them; objects are not recorded."""
        return ",".join(feed.name for feed in self.feeds if feed.named) or None

    @contextmanager
    def run(
        self,
        name: str,
        parameters: Mapping[str, Any],
        directory: Path | None = None,
        finished: int = 0,
        is_study: bool = False,
        ids: Mapping[str, str] | None = None,
    ) -> Iterator[OpenRun]:
        """Track a run from here to the end of the block. `ids` are those that a run without a directory has already."""
        settings = {key: value for key, value in flat(parameters) if value is not None and key != "track"}
        of = {
            feed: TrackedRun(
                name,
                settings,
                directory,
                self._studies.get(feed),
                (ids or {}).get(feed.name, ""),
                finished=finished,
                is_study=is_study,
            )
            for feed in self.feeds
            if directory or not self._studies or not feed.tracker.needs_directory  # as for the trials of a tuning
        }
        opened, complete = OpenRun(of), False
        try:
            yield opened
            complete = True
        finally:
            opened.finish(complete)

    @contextmanager
    def study(self, name: str, parameters: Mapping[str, Any], directory: Path | None = None) -> Iterator[OpenRun]:
        """Track a study: the runs inside the block belong to it."""
        with self.run(name, parameters, directory, is_study=True) as opened:
            opened.wait()  # for its id: the runs name it
            self._studies = dict(opened.of)
            try:
                yield opened
            finally:
                self._studies = {}


def check_trackers(track: str | None) -> None:
    """Refuse trackers that there are not, or whose packages are not installed."""
    for name in _listed(track):
        find_tracker(name)


def find_tracker(name: str) -> Any:
    """Find the tracker of this name, one of ours or `module:Class`, or its class; refuse one that is not installed."""
    if ":" not in name and name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    place, needed = TRACKERS.get(name, (name, ()))
    if not all(map(_is_installed, needed)):
        raise FedtailorError(f"The tracker {name} is not installed: {install_command(name)}, or leave it out.")
    return _checked(import_object(place, "tracker"), name)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # what it is a part of is missing; the module is None, as tests make it
        return False


def _checked(tracker: Any, name: str) -> Any:
    if not isinstance(tracker, Tracker) and not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        raise FedtailorError(f"The tracker {name} is no Tracker: make it a subclass of fedtailor.Tracker.")
    return tracker


def _listed(track: "Track | None") -> list[Any]:
    """List the names and objects that stand for trackers."""
    if track is None:
        return []
    given = list(track) if isinstance(track, Sequence) and not isinstance(track, str) else [track]
    split = [each.strip() for one in given if isinstance(one, str) for each in one.split(",")]
    names = [name for name in dict.fromkeys(split) if name and name != NONE]
    return [*names, *(one for one in given if not isinstance(one, str))]


def _feed(one: "str | Tracker | type[Tracker]") -> Feed:
    named = isinstance(one, str)
    found = find_tracker(str(one)) if named else _checked(one, shown(one))
    made = found() if isinstance(found, type) else found
    return Feed(str(one) if named else type(made).__name__, made, named)

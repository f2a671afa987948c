"""A comparison: methods, choices of settings and seeds on the same clients, as one piece of work in one directory.

comparison.toml    the question: all methods, seeds and settings
runs.json          every run's title, with its directory and its number of rounds
runs/              a run directory for each method, choice of settings and seed
tuning/            how the methods' settings were chosen, if they were

Whoever asked for it writes the table beside them (`reporting.tables.write_tables`).
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedtailor._common.errors import FedtailorError, shown, unknown
from fedtailor._common.files import Count, make_directory, read_bytes, read_sealed, seal, write_atomically
from fedtailor._common.imports import GIVEN
from fedtailor.engines.own_code import named_code
from fedtailor.engines.preparation import Objects, Prepared
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import OnRound, OnStart, PreparedRuns
from fedtailor.engines.trackers import OpenRun, Track, Tracking
from fedtailor.experiment import (
    DATA_SETTINGS,
    EXECUTION_ONLY,
    Experiment,
    flat,
    in_sections,
    make_experiment,
    merged,
    read_experiment,
)
from fedtailor.experiment.tuned import find_settings, refuse_twice, with_settings
from fedtailor.methods import find_method, method_class
from fedtailor.server.loop import Loop
from fedtailor.server.records import Plain, Record
from fedtailor.server.run_directory import RunDirectory
from fedtailor.studies.runner import again, done, is_begun, keep_data, noted_toml, perform, run_name
from fedtailor.studies.summary import Summary, summarize
from fedtailor.training.metrics import AUTO, METRICS

Settings = dict[str, Any]
FILE, RUNS, RESULT = "comparison.toml", "runs.json", "result.json"
TUNED = "tuning"  # the directory in which the methods' settings are chosen before the runs begin
SEEDS = (0, 1, 2)
# What differs from a single run: a crash costs one round, and no method wins by a lucky last round.
DEFAULTS: Settings = {"checkpoint_every": 1, "evaluation": {"choose": "last-5"}}
MOST_RUNS = 10_000
LARGEST = 1e300  # target
TUNING = "fine_tune"  # the one setting of the evaluation that lines may differ in: it makes another method of it


@dataclass(frozen=True)
class Comparison:
    """The question of a comparison: every method with every choice of the grid, with every seed."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings  # of all experiments, complete
    parameters: dict[str, Settings]  # of each method, complete
    grid: dict[str, list[Any]]  # values of settings and parameters
    target: float | None = None  # the value of the metric to which rounds and bytes are counted
    own: dict[str, Settings] = field(default_factory=dict)  # settings of one method in place of those of all
    tuned: str | None = None  # how these were chosen, if by `tune`

    def written(self) -> Settings:
        """Return all settings as the file has them."""
        asked = {"methods": list(self.methods), "seeds": list(self.seeds), "target": self.target, "tuned": self.tuned}
        return {**asked, **self.settings, "grid": self.grid, "settings": self.own, "parameters": self.parameters}

    def runs(self) -> dict[str, Experiment]:
        """Return all experiments by title, each once, those of one seed (and so of the same data) together."""
        found: dict[str, tuple[str, Experiment]] = {}
        for seed, method, values in product(self.seeds, self.methods, product(*self.grid.values())):
            chosen = dict(zip(self.grid, values, strict=True))
            experiment, varied = self.experiment(method, seed, chosen)
            title = ", ".join([method, *(f"{n}={v}" for n, v in varied.items()), f"seed {seed}"])
            found.setdefault(run_name(experiment), (title, experiment))
        return dict(found.values())

    def experiment(self, method: str, seed: int, chosen: Settings) -> tuple[Experiment, Settings]:
        """Make the experiment of one run, and return it with the chosen values that apply to it: other methods'
        parameters do not."""
        known = method_class(method).model_fields
        own = {name: value for name, value in chosen.items() if name in known}
        tuning = {name: value for name, value in chosen.items() if name == TUNING and name not in own}
        common = {n: v for n, v in chosen.items() if n not in own and n in Experiment.model_fields}
        settings = merged(self.settings, in_sections(self.own.get(method, {})))
        settings |= {**common, "method": method, "seed": seed}
        settings["parameters"] = {**self.parameters.get(method, {}), **own}
        settings["evaluation"] = {**settings["evaluation"], **tuning}
        return make_experiment(settings), {**own, **common, **tuning}


def make_comparison(asked: Mapping[str, Any]) -> Comparison:
    """Make a comparison from an experiment's settings and `methods`, `seeds`, `grid`, `target`, `tuned`, and the
    `parameters` and `settings` of each method; `settings` may also say where these are, as `tuned:NAME` or a path. The
    first wrong one is named in the error."""
    for name in ("method", "seed"):
        if name in asked:
            raise FedtailorError(f"A comparison has {name}s (a list), not {name}.")
    methods = _distinct("methods", asked.get("methods"), str)
    seeds = _distinct("seeds", asked.get("seeds", list(SEEDS)), int)
    if isinstance(asked.get("settings"), str):
        asked = _with_tuned(asked, methods)
    fields = {method: method_class(method).model_fields for method in methods}
    given, own = (_sections(section, asked.get(section, {}), methods) for section in ("parameters", "settings"))
    for name in (name for of_method in own.values() for name in of_method if name != TUNING):
        check_varied(name, set(), "The settings of one method")
    parameters = {m: find_method(m, given.get(m)).model_dump(exclude_none=True) for m in methods}
    ours = ("methods", "seeds", "grid", "parameters", "settings", "target", "tuned")
    rest = in_sections({n: v for n, v in asked.items() if n not in ours})
    rest = merged({**DEFAULTS, "evaluation": {}} if _patient(rest) else DEFAULTS, rest)
    grid = _grid(asked.get("grid", {}), {parameter for known in fields.values() for parameter in known})
    each = {"lr"} if "optimizer" in grid and "lr" not in rest else set()  # every optimiser has a default of its own
    complete = make_experiment(rest).model_dump(exclude={"method", "seed", "parameters", *each})
    tuned = None if asked.get("tuned") is None else str(asked["tuned"])
    target = _target(asked.get("target"), complete["evaluation"]["metric"])
    comparison = Comparison(methods, seeds, complete, parameters, grid, target, own, tuned)
    if (runs := len(methods) * len(seeds) * prod(map(len, grid.values()))) > MOST_RUNS:
        raise FedtailorError(f"The comparison would have {runs:,} runs, more than {MOST_RUNS:,}: ask for fewer.")
    for experiment in comparison.runs().values():  # every value of the grid is looked at
        find_method(experiment.method, experiment.parameters)
    return comparison


def _with_tuned(asked: Mapping[str, Any], methods: tuple[str, ...]) -> Settings:
    """Take the methods' settings from where `settings` says, `tuned:NAME` or a path."""
    complete = with_settings({**asked, "settings": {}}, find_settings(asked["settings"]), methods)
    for method, own in complete["settings"].items():
        refuse_twice(method, own, in_sections({n: v for n, v in asked.items() if n != "settings"}))
    return complete


def _sections(name: str, given: Any, methods: tuple[str, ...]) -> dict[str, Settings]:
    """Check that there is nothing but a section for each method."""
    if not isinstance(given, dict) or not all(isinstance(of_method, dict) for of_method in given.values()):
        raise FedtailorError(f"The {name} of a comparison stand in a section for each method: [{name}.METHOD].")
    for method in given:
        if method not in methods:
            raise unknown("method of this comparison", method, methods)
    return given


def _patient(settings: Settings) -> bool:
    """Find out whether runs may stop early: then the best round on validation data counts, and not the last five."""
    protocol = settings.get("evaluation")
    return isinstance(protocol, Mapping) and protocol.get("patience") is not None


def _distinct(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Check that this is a list of different values, and not an empty one."""
    whole = isinstance(values, list) and values and all(type(value) is kind for value in values)
    if not whole or (kind is int and min(values) < 0):
        what = "methods' names" if kind is str else "whole numbers of at least 0"
        raise FedtailorError(f"The {name} of a comparison must be a list of {what}, not {shown(values)}.")
    if twice := [value for value in values if values.count(value) > 1]:
        raise FedtailorError(f"{shown(twice[0])} is named twice among the {name} of the comparison.")
    return tuple(values)


def _target(value: Any, metric: str) -> float | None:
    """Check a target. If the metric depends on the data, `Comparing.begin` checks whether a run can reach it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        raise FedtailorError(f"The target is {shown(value)}, but it must be a number, like 0.9 for 90 % accuracy.")
    if metric in METRICS:
        METRICS[metric].check_target(value)
    return value


def _grid(asked: Any, parameters: set[str]) -> dict[str, list[Any]]:
    """Check the lists of values by name."""
    if not isinstance(asked, dict):
        raise FedtailorError("The grid of a comparison is a section: [grid] with lines like lr = [0.1, 0.01].")
    for name, values in asked.items():
        if name not in parameters and name != TUNING:
            check_varied(name, parameters)
        if not isinstance(values, list) or not values:
            raise FedtailorError(f"The grid's {name} must be a list of values, not {shown(values)}.")
    return {name: ["inf" if value == inf else value for value in values] for name, values in asked.items()}


def check_varied(name: str, parameters: set[str], who: str = "The grid") -> None:
    """Refuse a setting in which the lines of one table may not differ."""
    if name not in Experiment.model_fields:
        raise unknown("setting or parameter", name, [*Experiment.model_fields, TUNING, *parameters])
    if name in ("method", "seed", "parameters"):
        instead = {"method": "methods = [...]", "seed": "seeds = [...]", "parameters": "the parameters' own names"}
        raise FedtailorError(f"{who} cannot vary {name}: give {instead[name]}.")
    if name in EXECUTION_ONLY or name == "observe_every":
        raise FedtailorError(f"{who} cannot vary {name}, as it does not change the numbers.")
    if name in DATA_SETTINGS or name in ("evaluation", "dtype"):
        hint = f"of the evaluation only {TUNING} may vary" if name == "evaluation" else "make a comparison for each"
        raise FedtailorError(
            f"{who} cannot vary {name}, as the lines of a table need the same clients and protocol: {hint}."
        )


def check_place(out: Path) -> None:
    """Refuse a directory with something else in it than a comparison that was killed before its question was written
    down."""
    if not is_begun(out, {f"{FILE}.tmp", TUNED}):
        raise FedtailorError(f"{out} exists already and is not a comparison: choose another --out.")


class Comparing:
    """A comparison at work in its directory: new, one that was begun there, or an extension of that."""

    def __init__(
        self,
        comparison: Comparison,
        out: Path,
        track: Track | Tracking | None = None,
        objects: Objects | None = None,
    ) -> None:
        self.comparison, self.out, self.objects = comparison, out, objects or Objects()
        self.tracking = Tracking(comparison.settings["track"] if track is None else track)
        self.runs = comparison.runs()
        self.failed: dict[str, str] = {}  # by title: why a run came to no end
        self._prepared = PreparedRuns(self.objects)
        self._check_directory()

    def _check_directory(self) -> None:
        """Refuse a directory of something else, or of a comparison with runs that this one does not have."""
        if not (self.out / FILE).is_file():
            check_place(self.out)
            return
        if not planned_runs(self.out).keys() <= {self.path(title) for title in self.runs}:
            before = read_experiment(self.out / FILE)  # as it was written: its methods may be anybody's code
            raise self._not_extended(dict(flat(before)), dict(flat(self.comparison.written())))

    def _not_extended(self, before: Settings, now: Settings) -> FedtailorError:
        """Name what keeps this comparison from being an extension of the one that is there."""
        for name in (name for name, value in before.items() if isinstance(value, list)):
            if lost := [value for value in before[name] if value not in now.get(name, [])]:
                what = f"values of {name.removeprefix('grid.')}" if name.startswith("grid.") else name
                return FedtailorError(
                    f"{self.out} has {lost[0]} among its {what}: a comparison can only get more of them, so name it "
                    "too, or choose another --out."
                )
        may_differ = {
            *EXECUTION_ONLY,
            "target",
            "tuned",
            "methods",
            "seeds",
            *(name for name in before if "grid." in name),
        }
        of_method = ("parameters.", "settings.")
        may_differ |= {name for name in now if name.startswith(of_method) and name not in before}  # a new method's
        differ = (name for name in (*now, *before) if name not in may_differ and before.get(name) != now.get(name))
        if (first := next(differ, None)) is None:
            return FedtailorError(f"{self.out} has runs of another comparison: choose another --out.")
        there, here = ("not set" if value is None else value for value in (before.get(first), now.get(first)))
        return FedtailorError(
            f"{self.out} is another comparison, where {first} is {there} and not {here}: choose another --out."
        )

    def path(self, title: str) -> Path:
        """Return the directory of a run."""
        return self.out / "runs" / run_name(self.runs[title])

    def todo(self) -> dict[str, Experiment]:
        """List the runs that are not finished yet."""
        return {title: run for title, run in self.runs.items() if done(self.path(title)) is None}

    def begin(self, todo: Mapping[str, Experiment], look: Callable[[Prepared], None] | None = None) -> None:
        """Check all runs before the first one begins, and write the question down. `look` is shown each of them."""
        for experiment in todo.values():
            prepared = self._prepared.prepare(experiment)
            prepared.terms.metric.check_target(self.comparison.target)
            if look:
                look(prepared)
        if todo or self.objects.given:
            self._check_first()
        make_directory(self.out)
        keep_data(self.comparison.settings, self.objects)
        directories = {title: str(self.path(title).relative_to(self.out)) for title in self.runs}
        runs = {title: {"directory": directories[title], "rounds": run.rounds} for title, run in self.runs.items()}
        write_atomically(self.out / FILE, noted_toml(self.comparison.written(), self.runs.values()))
        write_atomically(self.out / RUNS, seal({"runs": runs}, pretty=True))

    def _check_first(self) -> None:
        """Refuse to go on with other data or another network of the user's own than the first run has that is there."""
        there = (title for title in self.runs if (self.path(title) / "experiment.toml").is_file())
        if (first := next(there, None)) is not None and (self.objects.given or named_code(self.runs[first])):
            prepared = self._prepared.prepare(self.runs[first])
            RunDirectory(self.path(first)).check_beginning(prepared.data, prepared.terms.fingerprint, prepared.hostile)

    def run(self, title: str, on_round: OnRound | None, on_start: OnStart) -> RunResult | None:
        """Do one run, or what is left of it. Return None for a run that fails after it began: the others go on."""
        begun = False

        def start(loop: Loop) -> None:
            nonlocal begun
            begun = True
            on_start(loop)

        try:
            run, prepare = self.runs[title], self._prepared.prepare
            return perform(
                run, self.path(title), prepare, on_round, start, tracking=self.tracking, objects=self.objects
            )
        except FedtailorError as error:
            if not begun:
                raise
            self.failed[title] = str(error)
            return None

    def tracked(self) -> AbstractContextManager[OpenRun]:
        """Track the comparison, and the runs inside the block as its own."""
        return self.tracking.study(self.out.name, self.comparison.written(), self.out)

    def finish(self) -> Summary:
        """Summarize all runs that came to their end."""
        found = (done(self.path(title), given=again(run, self.objects)) for title, run in self.runs.items())
        results = [result for result in found if result is not None]
        if not results:
            raise FedtailorError(f"No run came to its end: {next(iter(self.failed.values()), 'none was begun.')}")
        return summarize(results, self.comparison.target, self.comparison.tuned)

    @property
    def extra(self) -> Plain:
        """The entries of result.json beside the summary: the directory of each run, and why some of them failed."""
        names = {title: str(self.path(title).relative_to(self.out)) for title in self.runs}
        return {"runs": names, "failed": self.failed}


@dataclass(frozen=True)
class Progress:
    """A comparison as its directory has it: the summary of the runs that are finished, and the others by title."""

    summary: Summary | None  # None: no run is finished
    unfinished: dict[str, tuple[int, int]]  # rounds that are done, of those that were asked for
    failed: dict[str, str]  # why some of these came to no end, as the last `compare` said
    only_in_python: bool = False  # it names objects that no import finds


def read_comparison(path: Path) -> Progress:
    """Read a comparison. Nothing is run: its methods may be anybody's code."""
    asked, planned = read_experiment(path / FILE), planned_runs(path)
    tuned = None if asked.get("tuned") is None else str(asked["tuned"])
    if not planned:
        raise FedtailorError(f"The comparison in {path} was stopped before it began: start it again.")
    finished, unfinished = [], {}
    for directory, (title, rounds) in planned.items():
        if (result := done(directory)) is not None:
            finished.append(result)
        else:
            begun = (directory / "experiment.toml").is_file()
            unfinished[title] = (len(RunDirectory(directory).rounds()) if begun else 0, rounds)
    summary = summarize(finished, _target(asked.get("target"), AUTO), tuned) if finished else None
    reasons = _reasons(path / RESULT)
    named = [one for _, value in flat(asked) for one in (value if isinstance(value, list) else [value])]
    python = any(isinstance(one, str) and one.startswith(GIVEN) for one in named)
    return Progress(summary, unfinished, {title: reasons[title] for title in unfinished if title in reasons}, python)


def _reasons(path: Path) -> dict[str, str]:
    """Read from a comparison's result why runs failed. It has no checksum: what cannot be read is left out."""
    try:
        failed = json.loads(read_bytes(path))["failed"]
        return {str(title): str(reason) for title, reason in failed.items()}
    except (FedtailorError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


@dataclass(kw_only=True)
class PlannedRun(Record):
    """A run that a comparison has, or will have."""

    directory: Annotated[str, Field(pattern=r"^runs/[^/]+$")]
    rounds: Count


@dataclass(kw_only=True)
class Plan(Record):
    """All runs of a comparison, by title."""

    runs: Annotated[dict[str, PlannedRun], Field(min_length=1)]


def planned_runs(path: Path) -> dict[Path, tuple[str, int]]:
    """Read the directory, the title and the number of rounds of every run that a comparison is to have. Its methods are
    not needed for it, which may be anybody's code."""
    if not (path / RUNS).is_file():
        return {}
    plan = read_sealed(path / RUNS, Plan.from_json)
    return {path / run.directory: (title, run.rounds) for title, run in plan.runs.items()}

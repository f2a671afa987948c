"""A comparison: methods, choices of settings and seeds on the same clients, as one piece of work in one directory.

comparison.toml    what was asked: all methods, seeds and settings
runs/              a run directory for each method, choice of settings and seed
table.txt …        the table, as text, Markdown, LaTeX and CSV
result.json        the table's numbers
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fedtailor.api import OnRound, RunResult
from fedtailor.errors import FedtailorError, unknown
from fedtailor.experiment import DATA_SETTINGS, Experiment, make_experiment, read_experiment, write_toml
from fedtailor.methods import find_method
from fedtailor.report.tables import Summary, summarize, write_tables
from fedtailor.server.loop import Federation
from fedtailor.store import write_atomically
from fedtailor.studies.runner import NO_MATTER, Benches, done, perform, run_name

Settings = dict[str, Any]
OnStart = Callable[[Federation], None]
FILE = "comparison.toml"
SEEDS = (0, 1, 2)
TUNING = "fine_tune"  # the one setting of the evaluation that lines may differ in: it makes another method of it


@dataclass(frozen=True)
class Comparison:
    """What is asked: every method with every choice of the grid, with every seed."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings  # of all experiments, complete
    parameters: dict[str, Settings]  # of each method, complete
    grid: dict[str, list[Any]]  # values of settings and parameters
    target: float | None = None  # the accuracy to which rounds and bytes are counted

    def written(self) -> Settings:
        """As the file has it."""
        own = {"methods": list(self.methods), "seeds": list(self.seeds), "target": self.target}
        return {**own, **self.settings, "grid": self.grid, "parameters": self.parameters}

    def runs(self) -> dict[str, Experiment]:
        """All experiments by a title, each once, those of one seed (and so of the same data) together."""
        found: dict[str, tuple[str, Experiment]] = {}
        for seed, method, values in product(self.seeds, self.methods, product(*self.grid.values())):
            chosen = dict(zip(self.grid, values, strict=True))
            experiment, varied = self._experiment(method, seed, chosen)
            title = ", ".join([method, *(f"{n}={v}" for n, v in varied.items()), f"seed {seed}"])
            found.setdefault(run_name(experiment), (title, experiment))
        return dict(found.values())

    def _experiment(self, method: str, seed: int, chosen: Settings) -> tuple[Experiment, Settings]:
        """One run, and what of the grid concerns it: another method's parameter does not."""
        known = type(find_method(method)).model_fields
        own = {name: value for name, value in chosen.items() if name in known}
        tuning = {name: value for name, value in chosen.items() if name == TUNING and name not in own}
        common = {n: v for n, v in chosen.items() if n not in own and n in Experiment.model_fields}
        settings = {**self.settings, **common, "method": method, "seed": seed}
        settings["parameters"] = {**self.parameters.get(method, {}), **own}
        settings["evaluation"] = {**settings["evaluation"], **tuning}
        return make_experiment(settings), {**own, **common, **tuning}


def make_comparison(asked: Mapping[str, Any]) -> Comparison:
    """The comparison of these settings: an experiment's, and `methods`, `seeds`, `grid`, `target`, and the `parameters`
    of each method. The first that is wrong is named."""
    for name in ("method", "seed"):
        if name in asked:
            raise FedtailorError(f"A comparison has {name}s (a list), not {name}.")
    methods = _distinct("methods", asked.get("methods"), str)
    seeds = _distinct("seeds", asked.get("seeds", list(SEEDS)), int)
    fields = {method: type(find_method(method)).model_fields for method in methods}
    given = asked.get("parameters", {})
    if not isinstance(given, dict) or not all(isinstance(of_method, dict) for of_method in given.values()):
        raise FedtailorError("The parameters of a comparison stand in a section for each method: [parameters.METHOD].")
    for name in given:
        if name not in methods:
            raise unknown("method of this comparison", name, methods)
    parameters = {m: find_method(m, given.get(m)).model_dump(exclude_none=True) for m in methods}
    rest = {n: v for n, v in asked.items() if n not in ("methods", "seeds", "grid", "parameters", "target")}
    complete = make_experiment({"checkpoint_every": 1, **rest}).model_dump(exclude={"method", "seed", "parameters"})
    grid = _grid(asked.get("grid", {}), {parameter for known in fields.values() for parameter in known})
    comparison = Comparison(methods, seeds, complete, parameters, grid, _target(asked.get("target")))
    for experiment in comparison.runs().values():  # every value of the grid is looked at
        find_method(experiment.method, experiment.parameters)
    return comparison


def _distinct(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    """A list of different values, and not an empty one."""
    whole = isinstance(values, list) and values and all(type(value) is kind for value in values)
    if not whole or (kind is int and min(values) < 0):
        what = "methods' names" if kind is str else "whole numbers of at least 0"
        raise FedtailorError(f"The {name} of a comparison must be a list of {what}, not {values!r}.")
    if twice := [value for value in values if values.count(value) > 1]:
        raise FedtailorError(f"{twice[0]!r} is named twice among the {name} of the comparison.")
    return tuple(values)


def _target(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1):
        raise FedtailorError(f"The target accuracy is {value!r}, but it must be a number above 0 and at most 1.")
    return value


def _grid(asked: Any, parameters: set[str]) -> dict[str, list[Any]]:
    """The lists of values by name."""
    if not isinstance(asked, dict):
        raise FedtailorError("The grid of a comparison is a section: [grid] with lines like lr = [0.1, 0.01].")
    for name, values in asked.items():
        if name not in parameters and name != TUNING:
            _check_varied(name, parameters)
        if not isinstance(values, list) or not values:
            raise FedtailorError(f"The grid's {name} must be a list of values, not {values!r}.")
    return asked


def _check_varied(name: str, parameters: set[str]) -> None:
    """May lines of one table differ in this setting?"""
    if name not in Experiment.model_fields:
        raise unknown("setting or parameter", name, [*Experiment.model_fields, TUNING, *parameters])
    if name in ("method", "seed", "parameters"):
        instead = {"method": "methods = [...]", "seed": "seeds = [...]", "parameters": "the parameters' own names"}
        raise FedtailorError(f"The grid cannot vary {name}: give {instead[name]}.")
    if name in NO_MATTER or name == "observe_every":
        raise FedtailorError(f"The grid cannot vary {name}, as it does not change the numbers.")
    if name in DATA_SETTINGS or name in ("evaluation", "dtype"):
        hint = f"of the evaluation only {TUNING} may vary" if name == "evaluation" else "make a comparison for each"
        raise FedtailorError(
            f"The grid cannot vary {name}, as the lines of a table need the same clients and protocol: {hint}."
        )


class Comparing:
    """A comparison at work in its directory: new, or one that was begun there."""

    def __init__(self, comparison: Comparison, out: Path) -> None:
        self.comparison, self.out = comparison, out
        self.runs = comparison.runs()
        self.failed: dict[str, str] = {}  # by title: why a run came to no end
        self._benches = Benches()
        self._check_directory()

    def _check_directory(self) -> None:
        """Refuse a directory of something else, or of another question."""
        if not (self.out / FILE).is_file():
            if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
                raise FedtailorError(f"{self.out} exists already and is not a comparison: choose another --out.")
            return
        before = dict(_flat(read_comparison(self.out).written()))
        now = dict(_flat(self.comparison.written()))
        for name in (*now, *before):
            if name in NO_MATTER or name == "target" or before.get(name) == now.get(name):
                continue
            there, here = ("not set" if value is None else value for value in (before.get(name), now.get(name)))
            raise FedtailorError(
                f"{self.out} is another comparison, where {name} is {there} and not {here}: choose another --out."
            )

    def path(self, title: str) -> Path:
        return self.out / "runs" / run_name(self.runs[title])

    def todo(self) -> dict[str, Experiment]:
        return {title: run for title, run in self.runs.items() if done(self.path(title)) is None}

    def begin(self, todo: Mapping[str, Experiment]) -> None:
        """Find out what is wrong with any run before the first one, and write down what is asked."""
        for experiment in todo.values():
            self._benches.prepare(experiment)
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomically(self.out / FILE, write_toml(self.comparison.written()))

    def run(self, title: str, on_round: OnRound, on_start: OnStart) -> RunResult | None:
        """Do one run, or what is left of it. One that fails after it was begun is none, and the others go on."""
        begun = False

        def start(run: Federation) -> None:
            nonlocal begun
            begun = True
            on_start(run)

        try:
            return perform(self.runs[title], self.path(title), self._benches.prepare, on_round, start)
        except FedtailorError as error:
            if not begun:
                raise
            self.failed[title] = str(error)
            return None

    def finish(self) -> Summary:
        """The table of all runs that came to an end, also on disk."""
        results = [result for title in self.runs if (result := done(self.path(title))) is not None]
        if not results:
            raise FedtailorError(f"No run came to its end: {next(iter(self.failed.values()), 'none was begun.')}")
        summary = summarize(results, self.comparison.target)
        names = {title: str(self.path(title).relative_to(self.out)) for title in self.runs}
        write_tables(summary, self.out, {"runs": names, "failed": self.failed})
        return summary


def read_comparison(path: Path) -> Comparison:
    """The comparison of a directory."""
    return make_comparison(read_experiment(path / FILE))


def _flat(settings: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{inside}{name}.")
        else:
            yield inside + name, value

"""Tuning: the settings of methods, chosen on validation data, with the same budget for every method.

tuning.toml           the question: methods, seeds, budget, ranges and settings
trials/METHOD.json    every trial: its settings, its validation value after each round, and how it ended
tuned.toml            the chosen settings, as a comparison that can be run
runs/                 a run directory for each method with its chosen settings, and seed

Test data have no part in it: a trial's record does not even hold them.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Self

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import make_directory, read_sealed, seal, write_atomically
from fedtailor._common.toml import parse_toml, write_toml
from fedtailor.engines.preparation import Objects, Prepared
from fedtailor.engines.runs import OnStart, PreparedRuns, result_of, run_prepared
from fedtailor.engines.simulation import Simulation
from fedtailor.engines.trackers import OpenRun, Track, Tracking
from fedtailor.experiment import EXECUTION_ONLY, NONE, Experiment, first_difference, read_experiment
from fedtailor.experiment.tuned import FILE as CHOSEN
from fedtailor.methods import find_method, method_class
from fedtailor.server.evaluation import chosen_round
from fedtailor.studies.comparison import FILE as QUESTION
from fedtailor.studies.comparison import TUNED, TUNING, Comparison, Settings, check_place, check_varied
from fedtailor.studies.measures import LEVEL, client_values, validation_score
from fedtailor.studies.ranges import check_only, search_ranges
from fedtailor.studies.runner import OnRoundOf, is_begun, keep_data, noted_toml, perform, run_name, told
from fedtailor.studies.trials import Budget, Trial, Trials, Tuned, check_installed, p_of_more, propose
from fedtailor.training.isolation import isolated
from fedtailor.training.metrics import ACCURACY

FILE = "tuning.toml"
WORSE, LATE = "worse than the median of the trials before it", "its time was up"


class Tuner:
    """A tuning at work: new, or one that was begun in its directory. Without a directory, nothing is written."""

    def __init__(
        self,
        comparison: Comparison,
        budget: Budget,
        ranges: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        out: Path | None = None,
        objects: Objects | None = None,
        track: Track | Tracking | None = None,
        level: float = LEVEL,
    ) -> None:
        check_installed()
        if not 0 < level <= 1:
            raise FedtailorError(f"The level is a p-value, above 0 and at most 1, and not {level:g}.")
        self.comparison, self.budget, self.out, self.level = comparison, budget, out, level
        self.tracking = Tracking(comparison.settings["track"] if track is None else track)
        self.objects = objects or Objects()
        _check_question(comparison, ranges or {})
        self.ranges = {method: search_ranges(method, ranges, only) for method in comparison.methods}
        check_only(only or (), self.ranges)
        self._check_ends()
        self._prepared = {seed: PreparedRuns(self.objects) for seed in comparison.seeds}
        self.metric = ACCURACY  # until the data are known
        self._check_directory()
        self.trials = {method: self._recorded(method) for method in comparison.methods}

    @classmethod
    def of(cls, comparison: Comparison, trials: int | None, out: Path | None, objects: Objects | None = None) -> Self:
        """Tune the methods of a comparison before it begins, with its first seed and untracked; `out` is the
        comparison's."""
        if out is not None and not (out / QUESTION).is_file():
            check_place(out)
        elif out is not None and not (out / TUNED).is_dir():
            raise FedtailorError(f"{out} is a comparison whose settings were not tuned: choose another --out.")
        first = replace(comparison, seeds=comparison.seeds[:1])
        return cls(first, Budget(trials), out=out and out / TUNED, objects=objects, track=NONE)

    # --- the question ---

    def _check_ends(self) -> None:
        """Refuse a range that goes beyond what a setting may be."""
        for method, ranges in self.ranges.items():
            for name, end in ((name, end) for name, searched in ranges.items() for end in searched.ends):
                value = int(end) if ranges[name].whole else end
                experiment = self._experiment(method, self.comparison.seeds[0], {name: value})
                find_method(experiment.method, experiment.parameters)

    def _experiment(self, method: str, seed: int, settings: Settings) -> Experiment:
        return self.comparison.experiment(method, seed, settings)[0]

    def written(self) -> Settings:
        """Return the question as the file has it."""
        ranges = {m: {name: searched.text for name, searched in of_m.items()} for m, of_m in self.ranges.items()}
        budget = {"trials": self.budget.trials, "seconds": self.budget.seconds, "level": self.level}
        return {**budget, **self.comparison.written(), "ranges": ranges}

    def _noted(self, written: Settings) -> str:
        return noted_toml(written, self.comparison.runs().values())

    def _check_directory(self) -> None:
        """Refuse a directory of something else, or of trials under other settings."""
        if self.out is None:
            return
        if not (self.out / FILE).is_file():
            if not is_begun(self.out, {f"{FILE}.tmp"}):
                raise FedtailorError(f"{self.out} exists already and is not a tuning: choose another --out.")
            return
        before, now = read_experiment(self.out / FILE), parse_toml(write_toml(self.written()))
        fields = Experiment.model_fields  # a setting that an older version did not have had its default
        before = {n: v for n, v in now.items() if n in fields and v == fields[n].default} | before
        both = [method for method in now["methods"] if method in before.get("methods", [])]
        if found := first_difference(_deciding(before, both), _deciding(now, both)):
            name, there, here = found
            raise FedtailorError(
                f"{self.out} is another tuning, where {name} is {there} and not {here}: choose another --out."
            )
        if (self.out / "trials").is_symlink():
            raise FedtailorError(f"{self.out / 'trials'} is a link: remove it.")

    def begin(self, look: Callable[[Prepared], None] | None = None) -> None:
        """Check all methods before the first trial, and write the question down. `look` is shown each of them."""
        for seed in self.comparison.seeds:
            for method in self.comparison.methods:
                prepared = self._prepared[seed].prepare(self._experiment(method, seed, {}))
                _check_validation(prepared)
                self.metric = prepared.terms.metric
                if look:
                    look(prepared)
        if self.out is not None:
            make_directory(self.out)
            keep_data(self.comparison.settings, self.objects)
            write_atomically(self.out / FILE, self._noted(self.written()))  # first: it makes the directory a tuning
            make_directory(self.out / "trials")

    # --- the trials ---

    def _file(self, method: str) -> Path | None:
        return self.out and self.out / "trials" / f"{method.replace(':', '.')}.json"

    def _recorded(self, method: str) -> list[Trial]:
        """Read the trials that were made before, as many as the budget has."""
        file = self._file(method)
        if file is None or not file.is_file():
            return []
        return read_sealed(file, Trials.from_json).trials[: self.budget.trials]

    def tune(
        self,
        method: str,
        on_trial: Callable[[Trial], None] | None = None,
        on_begin: Callable[[int, Settings, int], None] | None = None,
        on_round: Callable[[int, float | None], None] | None = None,
    ) -> Tuned:
        """Make the trials of a method that are left of its budget.

        `on_begin` is called with a trial's number, settings and rounds, `on_round` with a round and its value.
        """
        trials = self.trials[method]
        while not self.budget.is_spent(trials) and (not trials or self.ranges[method]):
            trials.append(self._trial(method, trials, on_begin, on_round))
            if (file := self._file(method)) is not None:
                write_atomically(file, seal(asdict(Trials(trials=trials)), pretty=True))
            self._track(f"{method}, trial {len(trials)}", trials[-1])
            if on_trial:
                on_trial(trials[-1])
        return self.tuned(method)

    def _track(self, name: str, trial: Trial) -> None:
        with self.tracking.run(name, {**trial.settings, "state": trial.state}) as tracked:
            for round, value in trial.values.items():
                tracked.log(round, {f"validation_{self.metric.name}": self.metric.score(value)})

    def tracked(self) -> AbstractContextManager[OpenRun]:
        """Track the tuning, and the trials and runs inside the block as its own."""
        return self.tracking.study(self.out.name if self.out else "tuning", self.written(), self.out)

    def tuned(self, method: str) -> Tuned:
        """Return the trials that a method has so far."""
        return Tuned(method, tuple(self.trials[method]), metric=self.metric, level=self.level)

    def _trial(
        self,
        method: str,
        before: list[Trial],
        on_begin: Callable[[int, Settings, int], None] | None,
        on_round: Callable[[int, float | None], None] | None,
    ) -> Trial:
        """Run a trial to its end, or until it is pruned or fails. The first one has the settings as they are."""
        begin, ranges = time.perf_counter(), self.ranges[method]
        left = self.budget.seconds_left(before) if before else float("inf")  # the first comes to its end
        proposal = propose(ranges, before, self.comparison.seeds[0], self.comparison.settings["rounds"])
        settings = {name: searched.rounded(proposal.params[name]) for name, searched in ranges.items()}
        trial = Trial(settings=settings if before else self._present(method), state="done")
        with isolated(), warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore", UserWarning)  # of clients that fail: the trial says how it ended
            try:
                runs = [self._started(method, seed, trial.settings, stack) for seed in self.comparison.seeds]
                last = runs[0].experiment.rounds
                if on_begin:
                    on_begin(len(before), trial.settings, last)
                for trial.rounds, value in _values(runs, stack):
                    if on_round:
                        on_round(trial.rounds, value)
                    if value is not None:
                        trial.values[trial.rounds] = value
                        proposal.report(value, trial.rounds)
                    why = WORSE if proposal.should_prune() else LATE if time.perf_counter() - begin > left else ""
                    if why and trial.rounds < last:
                        trial.state, trial.reason = "pruned", why
                        break
                if trial.state == "done" and last not in trial.values:
                    trial.state, trial.reason = "failed", "its last round has no finite value on validation data"
                if trial.state == "done":
                    found = _by_client(runs)
                    if not before:
                        trial.clients = found
                    elif before[0].clients:
                        trial.p = p_of_more(found, before[0].clients)
            except FedtailorError as error:
                trial.state, trial.reason = "failed", str(error)
        trial.seconds = round(time.perf_counter() - begin, 3)
        return trial

    def _started(self, method: str, seed: int, settings: Settings, stack: ExitStack) -> Simulation:
        prepared = self._prepared[seed].prepare(self._experiment(method, seed, settings))
        simulation = stack.enter_context(closing(Simulation(prepared)))
        simulation.start()
        return simulation

    def _present(self, method: str) -> Settings:
        """Return the values that the searched settings have before tuning."""
        experiment = self._experiment(method, self.comparison.seeds[0], {})
        values = {**experiment.model_dump(), TUNING: experiment.evaluation.fine_tune}
        values |= find_method(method, experiment.parameters).model_dump()
        return {name: values[name] for name in self.ranges[method] if values[name] is not None}

    # --- what comes out ---

    def apply(self, comparison: Comparison) -> Comparison:
        """Give a comparison of these methods the chosen settings."""
        parameters, own = dict(comparison.parameters), dict(comparison.own)
        for method in comparison.methods:
            tuned = self.tuned(method)
            if tuned.chosen is None:
                raise FedtailorError(
                    f"All {len(tuned.trials)} trials of {method} failed; the first one: {tuned.trials[0].reason}"
                )
            known = method_class(method).model_fields
            chosen = {name: value for name, value in tuned.settings.items() if name in known}
            parameters[method] = {**parameters[method], **chosen}
            rest = {name: value for name, value in tuned.settings.items() if name not in known}
            own[method] = {**own.get(method, {}), **rest}
        seeds = self.comparison.seeds
        tuned_how = f"{self.budget}, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        return replace(comparison, parameters=parameters, own=own, tuned=tuned_how)

    def finish(self, method: str, on_round: OnRoundOf | None = None, on_start: OnStart | None = None) -> Tuned:
        """Run a method with its chosen settings, all rounds of all seeds: only now its test metrics are looked at."""
        tuned, results = self.tuned(method), []
        for seed in self.comparison.seeds if tuned.chosen else ():
            experiment, prepare = self._experiment(method, seed, tuned.settings), self._prepared[seed].prepare
            tell = told(on_round, f"{method}, seed {seed}")
            if self.out is None:
                results.append(run_prepared(experiment, prepare(experiment), None, tell, on_start, self.tracking))
            else:
                path = self.out / "runs" / run_name(experiment)
                results.append(
                    perform(experiment, path, prepare, tell, on_start, tracking=self.tracking, objects=self.objects)
                )
        return replace(tuned, results=tuple(results))

    def write(self) -> Comparison:
        """Write the chosen settings down as a comparison, without methods of which all trials failed, and return it."""
        methods = [method for method in self.comparison.methods if self.tuned(method).chosen]
        parameters = {method: self.comparison.parameters[method] for method in methods}
        own = {method: own for method, own in self.comparison.own.items() if method in methods}
        tuned = replace(self.comparison, methods=tuple(methods), parameters=parameters, own=own)
        tuned = self.apply(tuned if methods else self.comparison)
        if self.out is not None:
            write_atomically(self.out / CHOSEN, self._noted(tuned.written()))
        return tuned


def _check_question(comparison: Comparison, ranges: Mapping[str, str]) -> None:
    """Refuse what cannot be tuned, or not without test data."""
    if comparison.grid:
        raise FedtailorError("A grid lists the values that tuning looks for: give one of the two.")
    if comparison.settings["evaluation"]["choose"] == "best-test":
        raise FedtailorError(
            "The rule best-test looks at test data, and tuning must not: take --choose best-validation."
        )
    if not comparison.settings["evaluation"]["every"]:
        raise FedtailorError("Tuning needs rounds that are evaluated: give --evaluate-every 1.")
    if comparison.settings["evaluation"]["patience"] is not None:
        raise FedtailorError("Trials are ended by a rule of their own: leave --patience out, and set it for the runs.")
    if not comparison.settings["validation"]:
        raise FedtailorError("Settings are chosen on validation data, and there are none: give --validation 0.1.")
    known = {name for method in comparison.methods for name in method_class(method).model_fields}
    for name in (name for name in ranges if name not in known and name != TUNING):
        check_varied(name, known, "Tuning")


def _check_validation(prepared: Prepared) -> None:
    if not (prepared.data.places[:, 2] > prepared.data.places[:, 1]).any():
        raise FedtailorError("Settings are chosen on validation data, and no client has any: give --validation 0.2.")


def _deciding(question: Settings, methods: Sequence[str]) -> Settings:
    """Return the part of a question that trials of these methods depend on."""
    of_methods = ("ranges", "settings", "parameters")
    rest = {*EXECUTION_ONLY, "methods", "trials", "seconds", "level", "target", "tuned", *of_methods}
    common = {name: value for name, value in question.items() if name not in rest}
    sections = {name: question.get(name) or {} for name in of_methods}
    return common | {n: {m: of[m] for m in methods if m in of} for n, of in sections.items()}


def _by_client(runs: Sequence[Simulation]) -> dict[str, float]:
    """Return the validation value of each client of each seed, more being better."""
    found, metric = [result_of(run) for run in runs], runs[0].terms.metric
    return {
        f"{result.experiment.seed}/{client}": metric.score(value)
        for result in found
        for client, value in client_values(result, split="validation").items()
    }


def _values(runs: Sequence[Simulation], stack: ExitStack) -> Iterator[tuple[int, float | None]]:
    """Do the rounds of all seeds side by side. Yield each round with the mean of the validation values that the runs
    would have if they ended with it."""
    rounds = [stack.enter_context(closing(run.run())) for run in runs]
    for records in zip(*rounds, strict=True):
        metric = runs[0].terms.metric
        counted = [chosen_round(run.loop.rounds, run.experiment.evaluation.choose, metric) for run in runs]
        found = [validation_score(record, metric) for record in counted if record is not None]
        evaluated = all(record.evaluated for record in records) and len(found) == len(runs)
        yield records[0].round, fmean(v for v in found if v is not None) if evaluated and None not in found else None

"""Studies of many runs as functions: `compare`, `tune`, `advise`, `report`, `reproduce`, like the commands."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

from fedtailor._common.errors import FedtailorError, unknown, warn
from fedtailor.data import DataObject, FederatedData
from fedtailor.data.own_data import data_in_words
from fedtailor.engines.own_code import importable_name, named_settings, names_and_objects
from fedtailor.engines.preparation import Objects
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import PreparedRuns, load, run_prepared
from fedtailor.engines.trackers import OpenRun, Track, Tracking
from fedtailor.experiment import Settings, in_sections, make_experiment
from fedtailor.method import Method
from fedtailor.models import ModelLike
from fedtailor.reporting.found_runs import Runs, read_runs
from fedtailor.reporting.result_table import Table
from fedtailor.studies.advice import SHORTLIST, Advice
from fedtailor.studies.advice import advise as race
from fedtailor.studies.comparison import SEEDS, Comparing, Comparison, make_comparison
from fedtailor.studies.measures import LEVEL, client_values
from fedtailor.studies.runner import OnRoundOf, told, with_named_data
from fedtailor.studies.summary import Summary, summarize
from fedtailor.studies.trials import Budget, Trial, Tuned
from fedtailor.studies.tuner import Tuner
from fedtailor.training.metrics import METRICS, Metric
from fedtailor.training.network import Loss
from fedtailor.training.predictions import OwnMetric

if TYPE_CHECKING:
    import plotly.graph_objects

    from fedtailor.reporting.axes import Along

OnRun = Callable[[str, RunResult | None], None]
Reported = str | Path | RunResult | Table


def compare(
    methods: Sequence[str | type[Method]],
    *,
    seeds: Sequence[int] = SEEDS,
    grid: Mapping[str, Sequence[Any]] | None = None,
    target: float | None = None,
    method_parameters: Mapping[str | type[Method], Mapping[str, Any]] | None = None,
    method_settings: Mapping[str | type[Method], Mapping[str, Any]] | str | Path | None = None,
    tune: int | None = None,
    data: str | Path | DataObject = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    metric: str | OwnMetric | None = None,
    out: str | Path | None = None,
    track: Track | None = None,
    on_run: OnRun | None = None,
    on_round: OnRoundOf | None = None,
    **settings: Unpack[Settings],
) -> Table:
    """Run methods on the same clients with several seeds, and return the table that papers print.

    `grid` has lists of values for settings and parameters: every combination is a line. `metric` decides which line is
    the best; `target` is its value to which rounds and bytes are counted. `method_parameters` are the parameters of
    each method by its name or class, and `method_settings` what one has in place of the settings of all, such as a
    learning rate of its own; or where a tuning's are that has both: `"tuned:digits"` (`fedtailor settings` lists the
    names), or the path of your own. `tune` is a number of trials with which each method's settings are chosen on
    validation data first, with the first seed (see `fedtailor.tune`). With `out`, all is recorded there, data that are
    objects too, and the same call goes on after an interrupt, or adds methods, seeds and values of the grid. `track`
    names tools that get every run, the table and the report, as in `run`. `on_run` is called with the title and result
    of each run, and `on_round` with its title and the record of each round: it may stop that run as in `run`.
    """
    asked, objects = _question(methods, seeds, method_parameters, method_settings, data, model, loss, metric, settings)
    tracking = Tracking(track)
    asked |= {"track": tracking.names}
    asked |= {"grid": {name: list(values) for name, values in (grid or {}).items()}}
    comparison = make_comparison(asked if target is None else {**asked, "target": target})
    tell = on_run or (lambda title, result: None)
    if out is not None:
        comparison, objects = _kept(comparison, objects, Path(out))
    if tune is not None:
        comparison = _tuned(comparison, tune, None if out is None else Path(out), objects)
    if out is None:
        results, shared = [], PreparedRuns(objects)
        stem = Path(data_in_words(comparison.settings["data"])).stem.removeprefix("your ").replace(" ", "-")
        with tracking.study(f"{stem}-comparison", comparison.written()) as study:
            for title, experiment in comparison.runs().items():
                prepared = shared.prepare(experiment)
                prepared.terms.metric.check_target(target)
                results.append(run_prepared(experiment, prepared, on_round=told(on_round, title), tracking=tracking))
                tell(title, results[-1])
            summary = summarize(results, target, comparison.tuned)
            save_study(study, summary, lambda: Runs(results, target=target, tuned=comparison.tuned))
        return Table(summary)
    from fedtailor.reporting.tables import write_tables

    work = Comparing(comparison, Path(out), tracking, objects)
    todo = work.todo()
    work.begin(todo)
    with work.tracked() as study:
        for title in todo:
            tell(title, work.run(title, told(on_round, title), lambda loop: None))
        summary = work.finish()
        write_tables(summary, work.out, work.extra)
        save_study(study, summary, lambda: read_runs([work.out]), work.extra)
    return Table(summary, work.failed)


def save_study(study: OpenRun, summary: Summary, runs: Callable[[], Runs], more: dict[str, Any] | None = None) -> None:
    """Give the table and the report to the trackers of a comparison, if there are any."""
    if not study.of:
        return
    from fedtailor.reporting.page import prepare, write_page
    from fedtailor.reporting.tables import write_tables

    with TemporaryDirectory() as folder:
        study.save("table", write_tables(summary, Path(folder), more))
        page = Path(folder) / "report.html"
        try:
            write_page(prepare(runs()), page)
        except FedtailorError as error:  # there may be a table and nothing to draw
            warn(f"The comparison is tracked without a report: {error}")
        else:
            study.save("report", [page])


def _question(
    methods: Sequence[str | type[Method]],
    seeds: Sequence[int],
    method_parameters: Mapping[str | type[Method], Mapping[str, Any]] | None,
    method_settings: Mapping[str | type[Method], Mapping[str, Any]] | str | Path | None,
    data: Any,
    model: Any,
    loss: Any,
    metric: Any,
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], Objects]:
    """Write what was asked for as a comparison's file has it, and return it with the objects in place of names."""
    if "parameters" in settings:
        raise FedtailorError("A comparison has the parameters of each method: give method_parameters={method: {…}}.")
    names, objects = names_and_objects(data, model, loss, metric)
    parameters = {importable_name(method): dict(own) for method, own in (method_parameters or {}).items()}
    of_methods: Any = str(method_settings)  # where they are
    if not isinstance(method_settings, str | Path):
        of_methods = {importable_name(method): dict(own) for method, own in (method_settings or {}).items()}
    asked = {"methods": [*map(importable_name, methods)], "seeds": list(seeds), "parameters": parameters, **names}
    return {**asked, "settings": of_methods, **named_settings(settings, objects)}, objects


def _kept(comparison: Comparison, objects: Objects, out: Path) -> tuple[Comparison, Objects]:
    """Name the data of a comparison as they will be kept in its directory, if they are objects."""
    first = next(iter(comparison.runs().values()))
    settings, objects = with_named_data(first, objects, out)
    return replace(comparison, settings={**comparison.settings, **settings}), objects


def _tuned(comparison: Comparison, trials: int, out: Path | None, objects: Objects) -> Comparison:
    """Choose the settings of a comparison's methods, and return it with them."""
    work = Tuner.of(comparison, trials, out, objects)
    work.begin()
    for method in comparison.methods:
        work.tune(method)
    return work.apply(comparison)


@dataclass(frozen=True)
class Tuning:
    """The outcome of tuning: each method's chosen settings, its trials, and the runs of the chosen settings.

    `tuning["ditto"].settings` are those of one method. `parameters` and `settings` have those of all, as `compare`
    takes them: `method_parameters=tuning.parameters, method_settings=tuning.settings`.
    """

    methods: tuple[Tuned, ...]
    comparison: Comparison  # with the chosen settings; without methods of which all trials failed
    budget: Budget

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        return self.comparison.parameters

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        return self.comparison.own

    def __getitem__(self, method: str) -> Tuned:
        return {tuned.method: tuned for tuned in self.methods}[method]

    def __iter__(self) -> Iterator[Tuned]:
        return iter(self.methods)

    def __repr__(self) -> str:
        from fedtailor.reporting.tuning_tables import plain_text

        return plain_text(self.methods, str(self.budget))


def tune(
    methods: Sequence[str | type[Method]],
    *,
    trials: int | None = None,
    seconds: float | None = None,
    level: float = LEVEL,
    seeds: Sequence[int] = (0,),
    ranges: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
    method_parameters: Mapping[str | type[Method], Mapping[str, Any]] | None = None,
    method_settings: Mapping[str | type[Method], Mapping[str, Any]] | str | Path | None = None,
    data: str | Path | DataObject = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    metric: str | OwnMetric | None = None,
    out: str | Path | None = None,
    track: Track | None = None,
    on_trial: Callable[[str, Trial], None] | None = None,
    on_round: OnRoundOf | None = None,
    **settings: Unpack[Settings],
) -> Tuning:
    """Choose the settings of methods on validation data, each with the same budget of trials (20) or seconds.

    A method's learning rate and the parameters for which it declares a range are searched. `ranges` has other ranges,
    or those of other settings: `{"lr": "0.01..1:log", "epochs": "1..10", "batch": "10|32"}`; `only` names those that
    are searched. The first trial has the settings as they are given, and is chosen unless others are better with a p of
    at most `level` (Wilcoxon's test over the clients, by Holm; 1: the best is chosen). With several seeds, a trial is a
    run with each, and the mean counts. With `out`, all is recorded there, data that are objects too, and the same call
    goes on after an interrupt, or with more trials. `on_trial` is called with the method and each trial. `track` names
    tools that get every trial, and the runs of the chosen settings, as in `run`.

    `on_round` is called with a title and the record of each round of the runs with the chosen settings, and may stop a
    run as in `run`. Trials are ended by a rule of their own, which is the same for all.
    """
    asked, objects = _question(methods, seeds, method_parameters, method_settings, data, model, loss, metric, settings)
    tracking = Tracking(track)
    asked |= {"track": tracking.names}
    comparison, place = make_comparison(asked), Path(out) if out else None
    if place is not None:
        comparison, objects = _kept(comparison, objects, place)
    work = Tuner(comparison, Budget(trials, seconds), ranges, only, place, objects, tracking, level)
    work.begin()
    with work.tracked():
        for method in work.comparison.methods:
            work.tune(method, on_trial and partial(on_trial, method))
        comparison = work.write()
        found = tuple(work.finish(method, on_round) for method in work.comparison.methods)
    return Tuning(found, comparison, work.budget)


def advise(
    *,
    data: str | Path | DataObject = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    metric: str | OwnMetric | None = None,
    budget: float = 90.0,
    methods: Sequence[str | type[Method]] = SHORTLIST,
    **settings: Unpack[Settings],
) -> Advice:
    """Find out whether personalization is needed on these clients, and which method is the simplest that will do.

    Methods race for about `budget` seconds, judged on validation samples: a fifth of each client's unless said. Where
    these cannot tell, the advice is not `decided`.
    """
    names, objects = names_and_objects(data, model, loss, metric)
    experiment = make_experiment({**names, "validation": 0.2, **named_settings(settings, objects)})

    def describe(data: FederatedData) -> None:
        for note in data.notes:
            warn(note)

    return race(experiment, budget, tuple(map(importable_name, methods)), objects=objects, on_data=describe)


def report(
    runs: Reported | Sequence[Reported],
    to: str | Path = "report.html",
    figures: str | Path | None = None,
    tables: str | Path | None = None,
    columns: Sequence[str] | None = None,
    x: "Along" = "rounds",
) -> Path:
    """Make one HTML page of runs (a comparison's table, results, run directories, or directories that contain some; one
    of these, or several), and return its path.

    `figures` is a directory for every figure as PNG, PDF and SVG, and `tables` one for the table as text, Markdown and
    LaTeX; `columns` are the table's. `x` is what curves are drawn over first: rounds, bytes, time, or "clock", the
    virtual time of clients that have a system.
    """
    from fedtailor.reporting.page import prepare, write_page
    from fedtailor.reporting.paper import check_matplotlib, save
    from fedtailor.reporting.tables import write_readable

    if figures is not None:
        check_matplotlib()
    prepared = prepare(_of_report(runs), columns, x)
    for note in prepared.notes:
        warn(note)
    path = Path(to)
    write_page(prepared, path)
    if figures is not None:
        list(save(prepared.figures, Path(figures)))
    if tables is not None:
        write_readable(prepared.summary, Path(tables), columns)
    return path


def _of_report(runs: Reported | Sequence[Reported]) -> Runs:
    """Read and collect the runs of a report. Several tables have no target in common."""
    given = [runs] if isinstance(runs, str | Path | RunResult | Table) else list(runs)
    if len(given) == 1 and isinstance(given[0], Table):
        return given[0].runs
    directories = [Path(run) for run in given if isinstance(run, str | Path)]
    found = read_runs(directories) if directories else Runs()
    for run in given:
        if isinstance(run, Table):
            found.results += run.runs.results
            found.failed |= run.failed
        elif isinstance(run, RunResult):
            found.results.append(run)
    return found


def histogram(
    runs: "Table | str | Path | RunResult | Sequence[str | Path | RunResult]", metric: str | None = None
) -> "plotly.graph_objects.Figure":
    """Draw how many clients have which test value in the round that counts, as a figure of plotly (`.show()`,
    `.write_html(path)`): of one run, of several, or of each line of a comparison, over its seeds. `metric` is the one
    that decides unless another one is named. Hostile clients do not count.
    """
    from fedtailor.reporting.standalone import histogram as draw

    if isinstance(runs, Table):
        found = {line.label: line.results for line in runs.lines}
    else:
        given = [runs] if isinstance(runs, str | Path | RunResult) else list(runs)
        results = [run if isinstance(run, RunResult) else load(run) for run in given]
        titles = [result.method_title for result in results]
        named = [t if titles.count(t) == 1 else f"{t}, {place}" for place, t in enumerate(titles, 1)]
        found = {title: (result,) for title, result in zip(named, results, strict=True)}
    if not found:
        raise FedtailorError("There is no run to draw: give one, or several.")
    measure = _metric_of(next(iter(found.values()))[0], metric)
    values = {title: [v for r in of for v in client_values(r, measure).values()] for title, of in found.items()}
    if not any(values.values()):
        raise FedtailorError(f"No client has a test value of the metric {measure.title} in the round that counts.")
    return draw(values, measure)


def _metric_of(result: RunResult, name: str | None) -> Metric:
    own = result.experiment.evaluation.metrics or {}
    if name in (None, result.metric.name):
        return result.metric
    if name not in METRICS and name not in own:
        raise unknown("metric", str(name), (*METRICS, *own))
    return METRICS[str(name)] if name in METRICS else Metric(str(name), more=True)


def reproduce(
    preset: str,
    *,
    only: Sequence[str] | None = None,
    out: str | Path = "reproductions",
    seeds: int = 1,
    on_run: OnRun | None = None,
    **changes: Unpack[Settings],
) -> dict[str, Any]:
    """Run a table or figure of a paper (`fedtailor presets` lists them), and return our numbers beside the paper's.

    `only` names the methods to run. `changes` are settings over the preset's, such as `rounds` or `workers`. The runs
    are kept in `out`, with the outcome as Markdown and JSON: the same call goes on after an interrupt. With matplotlib
    installed, a figure's curves are drawn beside them.
    """
    from fedtailor.reporting.reproduced import draw_outcome
    from fedtailor.studies.presets import find_preset
    from fedtailor.studies.reproduction import Reproduction

    found = find_preset(preset)
    work = Reproduction(found.of_rows(only) if only else found, Path(out), seeds, in_sections(changes))
    for path, experiment in work.todo().items():
        result = work.run(path, experiment, lambda record: None, lambda loop: None)
        if on_run:
            on_run(path.name, result)
    outcome = work.outcome()
    draw_outcome(outcome, work.write(outcome))
    return outcome

"""Studies of many runs as functions: `compare`, `advise`, `report`, `reproduce`, like the commands of these names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedtailor.data import Dataset
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Settings, in_sections, make_experiment
from fedtailor.local.isolation import isolated
from fedtailor.local.metrics import OwnMetric
from fedtailor.local.network import Loss
from fedtailor.method import Method
from fedtailor.methods import check_class
from fedtailor.models import ModelLike
from fedtailor.result import RunResult
from fedtailor.runs import method_name, names_and_objects, run_prepared
from fedtailor.simulation import Objects, prepare
from fedtailor.studies.advice import SHORTLIST, Advice
from fedtailor.studies.advice import advise as race
from fedtailor.studies.comparison import SEEDS, Comparing, make_comparison
from fedtailor.studies.summary import Line, Summary, summarize

if TYPE_CHECKING:
    import pandas

OnRun = Callable[[str, RunResult | None], None]


@dataclass(frozen=True)
class Table:
    """The table of a comparison. `str(table)` is the text that `fedtailor compare` prints; `lines` has the numbers."""

    summary: Summary
    failed: dict[str, str] = field(default_factory=dict)  # by title: why a run came to no end

    @property
    def lines(self) -> tuple[Line, ...]:
        """One for each method and choice of settings, over its seeds."""
        return self.summary.lines

    @property
    def best(self) -> Line | None:
        return self.summary.best

    def __str__(self) -> str:
        from fedtailor.reporting.tables import plain_text

        return plain_text(self.summary)

    def markdown(self) -> str:
        from fedtailor.reporting.tables import markdown

        return markdown(self.summary)

    def latex(self) -> str:
        """A table environment for LaTeX; it needs the package booktabs."""
        from fedtailor.reporting.tables import latex

        return latex(self.summary)

    def csv(self) -> str:
        """Raw numbers: accuracies are shares of 1, missing values are empty."""
        from fedtailor.reporting.tables import comma_separated

        return comma_separated(self.summary)

    def to_pandas(self) -> "pandas.DataFrame":
        """The numbers as a table of pandas: a row a line."""
        try:
            import pandas
        except ImportError:
            raise FedtailorError("pandas is not installed: pip install 'fedtailor[pandas]'.") from None
        return pandas.DataFrame([line.plain() for line in self.lines]).set_index("title")

    def _repr_html_(self) -> str:
        from fedtailor.reporting.tables import table_rows

        head, *rows = table_rows(self.summary, "<b>{}</b>", "<u>{}</u>", escape)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        names = "".join(f"<th>{name}</th>" for name in head)
        caption = escape(f"{self.summary.title}. {self.summary.caption}")
        return f"<table><caption>{caption}</caption><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"


def compare(
    methods: Sequence[str | type[Method]],
    *,
    seeds: Sequence[int] = SEEDS,
    grid: Mapping[str, Sequence[Any]] | None = None,
    target: float | None = None,
    method_parameters: Mapping[str | type[Method], Mapping[str, Any]] | None = None,
    data: str | Path | Dataset | Sequence[Any] = "digits",
    model: ModelLike = "mlp",
    loss: str | Loss = "cross-entropy",
    metric: str | OwnMetric | None = None,
    out: str | Path | None = None,
    on_run: OnRun | None = None,
    **settings: Unpack[Settings],
) -> Table:
    """Run methods on the same clients with several seeds, and return the table that papers print.

    `grid` has lists of values for settings and parameters: every combination is a line. `metric` decides which line is
    the best; `target` is its value to which rounds and bytes are counted. `method_parameters` are the parameters of
    each method by its name or class. With `out`, all is recorded there, and the same call goes on after an interrupt,
    or adds methods, seeds and values of the grid; data, model, loss and metric are then names. `on_run` is called with
    the title and result of each run.
    """
    if "parameters" in settings:
        raise FedtailorError("A comparison has the parameters of each method: give method_parameters={method: {…}}.")
    names, objects = names_and_objects(data, model, loss, metric)
    parameters = {_named(method): dict(own) for method, own in (method_parameters or {}).items()}
    asked = {"methods": [*map(_named, methods)], "seeds": list(seeds), "parameters": parameters, **names}
    asked |= {"grid": {name: list(values) for name, values in (grid or {}).items()}, **settings}
    comparison = make_comparison(asked if target is None else {**asked, "target": target})
    tell = on_run or (lambda title, result: None)
    if out is None:
        results = []
        for title, experiment in comparison.runs().items():
            with isolated():
                prepared = prepare(experiment, objects)
            prepared.terms.metric.check_target(target)
            results.append(run_prepared(experiment, prepared))
            tell(title, results[-1])
        return Table(summarize(results, target))
    if objects != Objects():
        raise FedtailorError(
            "A comparison that is recorded needs names for data, model, loss and metric: leave out= away."
        )
    from fedtailor.reporting.tables import write_tables

    work = Comparing(comparison, Path(out))
    todo = work.todo()
    work.begin(todo)
    for title in todo:
        tell(title, work.run(title, lambda record: None, lambda loop: None))
    summary = work.finish()
    write_tables(summary, work.out, work.extra)
    return Table(summary, work.failed)


def _named(method: Any) -> Any:
    """The name of a method that many runs can find again."""
    if isinstance(method, Method):
        kind = type(method).__name__
        raise FedtailorError(f"Give the class {kind}, not an object of it, and its parameters in method_parameters=.")
    if not isinstance(method, type):
        return method
    name = method_name(check_class(method, method.__name__))
    if name.startswith("object:"):
        raise FedtailorError(
            f"The class {method.__name__} is inside a function: move it out, where it can be imported."
        )
    return name


def advise(
    *,
    data: str | Path | Dataset | Sequence[Any] = "digits",
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
    experiment = make_experiment({**names, "validation": 0.2, **settings})
    return race(experiment, budget, tuple(map(_named, methods)), objects=objects)


def report(
    runs: str | Path | RunResult | Sequence[str | Path | RunResult],
    to: str | Path = "report.html",
    figures: str | Path | None = None,
) -> Path:
    """Make one HTML page of runs (results, run directories, or directories that contain some), and return its path.

    `figures` is a directory for every figure as PNG, PDF and SVG.
    """
    from fedtailor.files import write_atomically
    from fedtailor.reporting.page import html, prepare
    from fedtailor.reporting.paper import check_matplotlib, save
    from fedtailor.reporting.runs import Runs, read_runs

    if figures is not None:
        check_matplotlib()
    given = [runs] if isinstance(runs, str | Path | RunResult) else list(runs)
    results = [run for run in given if isinstance(run, RunResult)]
    directories = [Path(run) for run in given if not isinstance(run, RunResult)]
    found = read_runs(directories) if directories else Runs()
    found.results += results
    prepared = prepare(found)
    path = Path(to)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html(prepared))
    if figures is not None:
        list(save(prepared.figures, Path(figures)))
    return path


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
    are kept in `out`, with the outcome as Markdown and JSON: the same call goes on after an interrupt.
    """
    from fedtailor.presets import find_preset
    from fedtailor.studies.reproduction import Reproduction

    found = find_preset(preset)
    work = Reproduction(found.of_rows(only) if only else found, Path(out), seeds, in_sections(changes))
    for path, experiment in work.todo().items():
        result = work.run(path, experiment, lambda record: None, lambda loop: None)
        if on_run:
            on_run(path.name, result)
    outcome = work.outcome()
    work.write(outcome)
    return outcome

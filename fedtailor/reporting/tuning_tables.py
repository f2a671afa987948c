"""The table of a tuning: one line a method, with what was chosen, by what, and what it came to."""

from collections.abc import Sequence
from statistics import fmean
from textwrap import wrap
from typing import Any

from rich.console import Group
from rich.text import Text

from fedtailor._common.text import plain_table, visible
from fedtailor.methods import command_title
from fedtailor.reporting.client_tables import as_text
from fedtailor.server.records import Plain
from fedtailor.studies.trials import Tuned

PAGE = 120  # columns of the table as text
STATES = ("done", "pruned", "failed")


def settings_in_words(settings: Plain) -> str:
    """Write settings as `lr=0.1, lam=0.5`."""
    return ", ".join(f"{name}={_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_lines(tuned: Tuned, width: int) -> list[str]:
    """Say what was chosen, and in how many trials: in one line, or in several on a narrow page."""
    counts = ", ".join(f"{tuned.count(state)} {state}" for state in STATES)
    text = tuned.metric.text
    values = f"{tuned.metric.shown(tuned.validation)} on validation data, {text(tuned.before)} before"
    if tuned.best is not tuned.chosen:
        values += f"; the best trial, {text(tuned.best_value)}, has p = {_p(tuned)}"
    settings = settings_in_words(tuned.settings) or "no settings"
    said = f"{command_title(tuned.method)}: {settings} ({values}; trials: {counts})"
    return wrap(said, width, subsequent_indent="  ", break_on_hyphens=False)


def tuning_table(tuned: Sequence[Tuned], budget: str) -> Group:
    """The table for a terminal."""
    metric = tuned[0].metric.title
    table = plain_table(f"Settings chosen on validation data, {budget}")
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("chosen settings", overflow="fold")  # a value is never cut
    for name in (
        f"validation\n{metric}",
        "before\ntuning",
        "p of\nthe best",
        *(f"trials\n{state}" for state in STATES),
        f"test\n{metric}",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for method in tuned:
        table.add_row(*map(Text, _row(method)))
    return Group(table, Text(_caption(tuned, metric), style="dim"))


def _row(tuned: Tuned) -> list[str]:
    found = settings_in_words(tuned.settings) if tuned.chosen else "none: all trials failed"
    values = (tuned.metric.text(value) for value in (tuned.validation, tuned.before))
    counts = (str(tuned.count(state)) for state in STATES)
    return [visible(command_title(tuned.method)), visible(found), *values, _p(tuned), *counts, _test(tuned)]


def _p(tuned: Tuned) -> str:
    return "–" if tuned.p is None else f"{tuned.p:.3f}" if tuned.p >= 0.001 else f"{tuned.p:.0e}"


def _test(tuned: Tuned) -> str:
    found = [result.value for result in tuned.results if result.value is not None]
    return tuned.metric.text(fmean(found) if found else None)


def _caption(tuned: Sequence[Tuned], metric: str) -> str:
    results = next((method.results for method in tuned if method.results), ())
    seeds = f" Mean over {len(results)} seeds." if len(results) > 1 else ""
    return (
        f"Validation {metric} of the round that counts; before tuning: that of the first trial, with the settings as "
        f"they were. They are kept unless a trial is better with p of at most {tuned[0].level:g} (Wilcoxon's test over "
        f"the clients, corrected by Holm).{seeds} Test {metric}: of a run with the chosen settings; it had no part in "
        "the choice."
    )


def plain_text(tuned: Sequence[Tuned], budget: str) -> str:
    """The table without colours."""
    return as_text(tuning_table(tuned, budget), PAGE)


def plain(tuned: Sequence[Tuned]) -> list[Plain]:
    """All numbers as JSON has them, without the trials, which are on file."""
    return [
        {
            "method": method.method,
            "settings": method.settings,
            "validation": method.validation,
            "before": method.before,
            "best": method.best and {"settings": method.best.settings, "validation": method.best_value, "p": method.p},
            "trials": {state: method.count(state) for state in STATES},
            "metric": method.metric.name,
            "test": [{"seed": r.experiment.seed, method.metric.name: r.value, "loss": r.loss} for r in method.results],
            "failures": [trial.reason for trial in method.trials if trial.state == "failed"],
        }
        for method in tuned
    ]

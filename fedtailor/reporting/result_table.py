"""The table that a comparison returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Literal

from fedtailor._common.errors import unknown
from fedtailor._common.extras import import_pandas
from fedtailor.reporting.found_runs import Runs
from fedtailor.studies.client_results import ClientTable, client_table
from fedtailor.studies.summary import Line, Summary

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


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
    def runs(self) -> Runs:
        """All runs of all lines, as a report takes them."""
        results = [result for line in self.lines for result in line.results]
        return Runs(results, target=self.summary.target, tuned=self.summary.tuned, failed=self.failed)

    @property
    def best(self) -> Line | None:
        return self.summary.best

    def __str__(self) -> str:
        from fedtailor.reporting.tables import plain_text

        return plain_text(self.summary)

    def markdown(self, columns: Sequence[str] | None = None) -> str:
        """The table for Markdown, with all columns or these."""
        from fedtailor.reporting.tables import markdown

        return markdown(self.summary, columns)

    def latex(self, columns: Sequence[str] | None = None) -> str:
        """Table environments for LaTeX, with all columns or these; they need the package booktabs."""
        from fedtailor.reporting.tables import latex

        return latex(self.summary, columns)

    def csv(self) -> str:
        """Raw numbers: accuracies are shares of 1, missing values are empty."""
        from fedtailor.reporting.tables import comma_separated

        return comma_separated(self.summary)

    @cached_property
    def clients(self) -> ClientTable:
        """Each client's result with each line, by name."""
        return client_table(self.summary)

    def to_pandas(self, what: Literal["lines", "clients"] = "lines") -> "pandas.DataFrame":
        """The numbers as a table of pandas: a row a line, or a row a client with a column for each line."""
        pandas = import_pandas()
        if what == "lines":
            return pandas.DataFrame([line.plain() for line in self.lines]).set_index("title")
        if what != "clients":
            raise unknown("table", what, ("lines", "clients"))
        named = {row.name: (row.n_train, row.n_test, *row.values) for row in self.clients.rows}
        columns = ["train", "test", *self.clients.titles]
        return pandas.DataFrame.from_dict(named, orient="index", columns=columns).rename_axis("client")

    def figures(self) -> dict[str, "plotly.graph_objects.Figure"]:
        """Draw the figures of the report by plotly, by name: `table.figures()["curves-rounds"]` shows itself in a
        notebook, and has `.show()` and `.write_html(path)`."""
        from fedtailor.reporting.page import prepare
        from fedtailor.reporting.standalone import drawing

        return {figure.name: drawing(figure) for figure in prepare(self.runs).figures if figure.panels}

    def _repr_html_(self) -> str:
        from fedtailor.reporting.tables import table_rows

        head, *rows = table_rows(self.summary, "<b>{}</b>", "<u>{}</u>", escape)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        names = "".join(f"<th>{name}</th>" for name in head)
        caption = escape(f"{self.summary.title}. {self.summary.caption}")
        return f"<table><caption>{caption}</caption><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"

"""The papers' tables and figures as experiments: one file a paper, with its complete settings and its own numbers.

A preset is `paper/table`, or `paper/table-column` for one of its columns. Its cells are experiments; cells that ask for
the same run share it.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.experiment import Experiment, make_experiment, merged
from fedtailor.methods import CATALOGUE, find_method

PAPERS = ("pgfed", "pfedmb", "fedacs", "pflego")
EXPLICIT = {"implicit": "fedavg", "explicit": "fedavg"}  # both begin with FedAvg's model (PGFed, Figure 2)
Settings = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of a table: a method with settings of its own."""

    name: str
    title: str
    method: str
    settings: Settings
    theirs: tuple[str, ...]  # the paper's numbers, one a column, as it prints them; "" where it prints none
    added: bool = False  # not in the paper's table or figure

    @property
    def missing(self) -> bool:
        """True if the method is not in the catalogue."""
        return self.method not in CATALOGUE


@dataclass(frozen=True)
class Preset:
    """One table or figure of a paper."""

    name: str
    title: str
    paper: str
    measure: str
    settings: Settings
    columns: dict[str, Settings]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    claim: str = ""  # the paper's own conclusion from a figure whose numbers it does not print
    target: float | None = None
    domains: bool = False  # the columns are groups of clients, and the last one all of them
    slowest: dict[str, float] = field(default_factory=dict)  # most rounds of any method in the paper, by column

    @property
    def one_run(self) -> bool:
        """True if all columns are numbers of the same run."""
        return self.domains or self.measure in ("correlation", "pairs")

    @property
    def not_in_paper(self) -> str:
        """Name the rows that the paper's table or figure does not have; "" if there are none."""
        titles = [row.title for row in self.rows if row.added]
        return f"Not in the paper's table or figure: {'; '.join(titles)}." if titles else ""

    def paper_speedup(self, row: Row, column: str) -> float | None:
        """Divide the rounds of the paper's slowest method by those of this one; None where it prints no rounds."""
        printed = row.theirs[list(self.columns).index(column)]
        return self.slowest[column] / float(printed) if printed and column in self.slowest else None

    def experiment(self, row: Row, column: str, changes: Settings | None = None) -> Experiment:
        """Make the experiment of one cell."""
        settings = merged(merged(self.settings, row.settings), self.columns[column])
        settings = merged(settings, changes or {})
        known = type(find_method(row.method)).model_fields
        parameters = {name: value for name, value in settings.get("parameters", {}).items() if name in known}
        return make_experiment({**settings, "method": row.method, "parameters": parameters})

    def of_column(self, column: str) -> "Preset":
        """Make the preset of one column."""
        place = list(self.columns).index(column)
        rows = tuple(replace(row, theirs=row.theirs[place : place + 1]) for row in self.rows)
        return replace(self, name=f"{self.name}-{column}", columns={column: self.columns[column]}, rows=rows)

    def of_rows(self, names: Sequence[str]) -> "Preset":
        """Make the preset of some of the rows."""
        for name in names:
            if name not in {row.name for row in self.rows}:
                raise unknown(f"row of {self.name}", name, [row.name for row in self.rows])
        return replace(self, rows=tuple(row for row in self.rows if row.name in names))


def presets() -> dict[str, Preset]:
    """Read all presets by name, without those of single columns."""
    return {preset.name: preset for paper in PAPERS for preset in _of_paper(paper)}


def find_preset(name: str) -> Preset:
    """Find the preset `paper/table` or `paper/table-column`."""
    known = presets()
    if name in known:
        return known[name]
    columns = {f"{preset.name}-{column}": (preset, column) for preset in known.values() for column in preset.columns}
    if name in columns:
        preset, column = columns[name]
        if preset.one_run:
            raise FedtailorError(f"The columns of {preset.name} are one run: reproduce it as a whole.")
        return preset.of_column(column)
    raise unknown("preset", name, [*known, *columns])


def _of_paper(paper: str) -> Iterator[Preset]:
    """Read the presets of a paper's file."""
    content = tomllib.loads((files(__name__) / f"{paper}.toml").read_text(encoding="utf-8"))
    for name, table in content.items():
        if name in ("paper", "notes", "settings", "rows"):
            continue
        yield Preset(
            name=f"{paper}/{name}",
            title=table["title"],
            paper=content["paper"],
            measure=table["measure"],
            settings=merged(content["settings"], table.get("settings", {})),
            columns=table["columns"],
            rows=tuple(_row(key, numbers, content, table) for key, numbers in table["numbers"].items()),
            notes=(*content["notes"], *table.get("notes", ())),
            claim=table.get("claim", ""),
            target=table.get("target"),
            domains=table.get("domains", False),
            slowest=_slowest(table),
        )


def _slowest(table: Settings) -> dict[str, float]:
    """Find the most rounds of any method in each column of a table that counts rounds."""
    if table["measure"] != "rounds":
        return {}
    columns = zip(*(numbers for numbers in table["numbers"].values() if numbers), strict=True)
    return {name: max(map(float, numbers)) for name, numbers in zip(table["columns"], columns, strict=True)}


def _row(name: str, numbers: list[str], content: Settings, table: Settings) -> Row:
    """Make a row from the settings that the file and the table have for it."""
    own = merged(content.get("rows", {}).get(name, {}), table.get("rows", {}).get(name, {}))
    title, method = own.pop("title", name), own.pop("method", EXPLICIT.get(name, name))
    added = name in table.get("added", ()) or (not numbers and any(table["numbers"].values()))
    return Row(name, title, method, own, tuple(numbers) or ("",) * len(table["columns"]), added)

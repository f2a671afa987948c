"""The user's own table: a CSV or Parquet file, or a pandas table, whose columns are features and a few roles."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor._common.errors import FedtailorError, listed, nearest, shown
from fedtailor.data import telling_columns
from fedtailor.data.arrays import encode
from fedtailor.data.cells import Cells, number
from fedtailor.data.columns import FEW, LIKE, Column, check_named, decide, parse_columns
from fedtailor.data.csv_file import CsvFile
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from fedtailor.data.foreign_files import check_size
from fedtailor.data.frames import add_array, frame_columns, is_frames, parquet_names, read_parquet

LABELS = ("label", "y", "class", "target")
CLIENT = "client"
ENDINGS = (".csv", ".csv.gz", ".tsv", ".parquet")
PARTS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
    **dict.fromkeys(("test", "testing"), TEST),
}


class TableSettings(TypedDict, total=False):
    """The settings of a table."""

    label_column: str | None
    client_column: str | None
    group: str | None
    split_column: str | None
    columns: str | None
    drop_unlabelled: bool
    separator: str | None
    decimal: str | None
    encoding: str | None


@dataclass(frozen=True)
class Purpose:
    """The purpose of reading a table: with labels or without, classes or numbers to predict, perhaps for a model that
    `knows` its columns and their kinds already."""

    labelled: bool = True
    regression: bool = False
    knows: Mapping[str, str] | None = None


def is_table(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS)


def read_table(path: Path, settings: TableSettings, purpose: Purpose) -> Dataset:
    """Read a table from a file."""
    if path.suffix.lower() == ".parquet":
        return from_columns(path.name, read_parquet(path), settings, purpose, f"The file {path}")
    file = _csv_file(path, settings)
    plan = _Plan(file.header(), settings, purpose, f"The file {path}")
    return plan.dataset(path.name, file.cells(plan.header, plan.kinds, plan.drops), file.notes)


def column_names(path: Path, settings: TableSettings) -> list[str]:
    """Read the names of a table's columns alone."""
    return parquet_names(path) if path.suffix.lower() == ".parquet" else _csv_file(path, settings).header()


def from_frame(frame: Any, settings: TableSettings, purpose: Purpose, name: str = "table") -> Dataset:
    """Make a data set of a pandas table, a dictionary of columns, or a list of such tables, one per client."""
    if isinstance(frame, Mapping) and is_frames(frame):
        named = _from_frames(list(frame.values()), settings, purpose, name)
        return replace(named, client_names=tuple(map(str, frame)))
    if isinstance(frame, Sequence):
        return _from_frames(frame, settings, purpose, name)
    return from_columns(name, frame_columns(frame), settings, purpose, "The table")


def from_columns(
    name: str, columns: Mapping[str, NDArray[Any]], settings: TableSettings, purpose: Purpose, where: str
) -> Dataset:
    """Make a data set of columns in memory."""
    lengths = {column: array.shape for column, array in columns.items()}
    if not lengths or any(len(shape) != 1 or shape != next(iter(lengths.values())) for shape in lengths.values()):
        raise FedtailorError(f"{where} has columns of different lengths, or none: give one value per sample in each.")
    if next(iter(lengths.values())) == (0,):
        raise FedtailorError(f"{where} has no samples: it needs at least one.")
    plan = _Plan(list(columns), settings, purpose, where)
    cells = {}
    for column, (kind, role) in plan.kinds.items():
        cells[column] = Cells(
            column, lambda row: f"Row {row} of {where[0].lower() + where[1:]}", kind, role, drops=plan.drops
        )
        add_array(cells[column], columns[column])
    return plan.dataset(name, cells)


def _from_frames(frames: Sequence[Any], settings: TableSettings, purpose: Purpose, name: str) -> Dataset:
    """Make one table of those of all clients, which have the same columns."""
    tables = [frame_columns(frame) for frame in frames]
    for client, table in enumerate(tables):
        if missing := sorted(set(tables[0]) ^ set(table)):
            raise FedtailorError(f"The tables of clients 0 and {client} differ: one has no column {missing[0]!r}.")
    if settings.get("client_column"):
        raise FedtailorError("A list of tables has one per client: leave client_column out.")
    sizes = [len(next(iter(table.values()), ())) for table in tables]
    if not all(sizes):
        raise FedtailorError(f"Client {sizes.index(0)} has no samples: give at least one.")
    owner = np.repeat(np.arange(len(tables)), sizes)
    joined = {column: np.concatenate([table[column] for table in tables]) for column in tables[0]}
    named: TableSettings = {**settings, "client_column": (number := "client number")}
    return from_columns(name, {**joined, number: owner}, named, purpose, "The table")


class _Plan:
    """Which columns of a table are what: roles, features, ignored ones."""

    def __init__(self, header: list[str], settings: TableSettings, purpose: Purpose, where: str) -> None:
        self.header, self.purpose, self.where = header, purpose, where
        self.drops = settings.get("drop_unlabelled", False)
        self.known = {name: kind for name, kind in (purpose.knows or {}).items() if name in header}
        features = {name for name, kind in self.known.items() if kind != "ignore"}
        said = parse_columns(settings.get("columns") or "")
        check_named(said, header, where)
        self.roles = self._roles(settings, features)
        label = self.roles.get("label")
        self.regression = purpose.regression or said.get(label or "") == "number"
        self.said = {**self.known, **said}
        for role, column in self.roles.items():
            if said.get(column) not in (None, *(("number", "category") if role == "label" else ())):
                raise FedtailorError(
                    f"{where} has the {role} in column {shown(column)}: it is no feature, so leave it out of --columns."
                )

    def _roles(self, settings: TableSettings, features: set[str]) -> dict[str, str]:
        """Find the columns that are no features: those that the user names, or else those that are called so."""
        asked = {
            "label": settings.get("label_column"),
            "client": settings.get("client_column"),
            "group": settings.get("group"),
            "split": settings.get("split_column"),
        }
        default = [name for name in LABELS if name in self.header and name not in features]
        if asked["label"] is None and default:
            asked["label"] = default[0]
        if asked["client"] is None and CLIENT in self.header and CLIENT not in features:
            asked["client"] = CLIENT
        if (asked["label"] is None and self.purpose.labelled) or asked["label"] not in (None, *self.header):
            named = asked["label"]
            wanted = f"label column {shown(named)}" if named else f"label column (one of {', '.join(LABELS)})"
            if named and (near := nearest(named, self.header, LIKE)) is not None:
                raise FedtailorError(f"{self.where} has no {wanted}: did you mean {shown(near)}?")
            raise FedtailorError(
                f"{self.where} has no {wanted}: its columns are {listed(self.header)}; "
                "say which one holds the labels with --label-column."
            )
        roles = {role: column for role, column in asked.items() if column is not None}
        check_named(roles.values(), self.header, self.where)
        if len(set(roles.values())) < len(roles):
            raise FedtailorError(f"{self.where} has one column for two of label, client, group and split: name others.")
        return roles

    @property
    def kinds(self) -> dict[str, tuple[str | None, str]]:
        """The kind that the user gives each column that is read, and its role."""
        roles = {column: role for role, column in self.roles.items()}
        if self.regression and "label" in self.roles:
            roles[self.roles["label"]] = "target"
        kinds = {name: (None if name in roles else self.said.get(name), roles.get(name, "")) for name in self.header}
        return {name: (kind, role) for name, (kind, role) in kinds.items() if kind != "ignore"}

    def dataset(self, name: str, cells: Mapping[str, Cells], notes: tuple[str, ...] = ()) -> Dataset:
        """Put the columns that were read together."""
        if self.drops and (label := self.roles.get("label")) is not None:
            notes = (*notes, *self._drop(name, cells, cells[label].present))
        roles = [self.roles[role] for role in ("group", "split") if role in self.roles]
        columns, ignored = [], list(dict.fromkeys([*roles, *(n for n, kind in self.said.items() if kind == "ignore")]))
        for column in (one for one in cells if one not in self.roles.values()):
            decided, why = decide(column, cells[column], self.said.get(column))
            if decided is None:
                ignored.append(column)
                notes = (*notes, f"The column {shown(column)} of {name} is ignored: {why}.")
            elif why:
                notes = (*notes, f"The column {shown(column)} of {name} is a feature: {why}.")
            columns += [decided] if decided else []
        if not columns:
            raise FedtailorError(f"{self.where} has no columns but label, client and ignored ones: it needs features.")
        x = self._samples(cells, columns)
        found = {role: self._role(role, cells[column]) for role, column in self.roles.items()}
        y, classes = found.get("label") or (torch.zeros(len(x)), ())
        if len(classes) > FEW and len(classes) > len(y) / 5 and all(number(name) is not None for name in classes):
            notes = (
                *notes,
                f"The label column {shown(self.roles['label'])} of {name} has {len(classes)} different numbers in "
                f"{len(y)} samples, and each counts as a class: for a regression say --loss mse.",
            )
        client, names = found.get("client") or (None, ())
        if self.purpose.labelled and not self.purpose.knows:
            asked = [(place, one) for place, one in enumerate(columns) if one.name not in self.said]  # by nobody
            notes = (*notes, *self._telling(name, x, asked, client, y))
        group, groups = found.get("group") or (None, ())
        part, _ = found.get("split") or (None, ())
        return Dataset(
            name,
            x,
            y,
            classes,
            part,
            client,
            names,
            group,
            part is not None,
            columns=tuple(columns),
            ignored=tuple(ignored),
            notes=notes,
            group_names=groups,
        )

    def _telling(
        self, name: str, x: Tensor, columns: list[tuple[int, Column]], client: Tensor | None, y: Tensor
    ) -> Iterator[str]:
        """Point out the features that tell the client or the label."""
        places, features = [place for place, _ in columns], [column for _, column in columns]
        who = None if client is None else client.numpy()
        yield from telling_columns.notes(name, x.numpy()[:, places], features, who, self.roles.get("label"), y.numpy())

    def _drop(self, name: str, cells: Mapping[str, Cells], labelled: NDArray[np.bool_]) -> Iterator[str]:
        """Leave out the lines without a label, and say how many they are."""
        if not labelled.any():
            raise FedtailorError(f"{self.where} has no label in column {shown(self.roles['label'])}: give some.")
        if count := int((~labelled).sum()):
            for column in cells.values():
                column.keep(labelled)
            are = "has no label and is" if count == 1 else "have no label and are"
            yield f"{count:,} of the {len(labelled):,} lines of {name} {are} left out (--drop-unlabelled)."

    def _samples(self, cells: Mapping[str, Cells], columns: list[Column]) -> Tensor:
        values = []
        for column in columns:
            numbers, own = cells[column.name].numbers, cells[column.name]
            if column.kind == "category":
                place = {text: position for position, text in enumerate(column.values)}
                order = np.array([place[text] for text in own.texts] + [np.nan], dtype=np.float64)  # the last is for -1
                values.append(order[own.codes])
            elif numbers is not None:
                values.append(numbers)
        check_size(self.where.removeprefix("The file "), 8 * len(values) * len(values[0]))
        return torch.from_numpy(np.stack(values, axis=1))

    def _role(self, role: str, cells: Cells) -> tuple[Tensor, tuple[str, ...]]:
        """Number the values of a column that is no feature."""
        if cells.numbers is not None:
            return torch.from_numpy(cells.numbers)[:, None], ()  # a network has one output for it
        if role == "split":
            for text, line in zip(cells.texts, cells.lines, strict=True):
                if text.lower() not in PARTS:
                    raise FedtailorError(
                        f"{cells.place(line)} has {shown(text)} in the split column: write train, validation or test."
                    )
            parts = np.array([PARTS[text.lower()] for text in cells.texts], dtype=np.uint8)
            return torch.from_numpy(parts[cells.codes]), ()
        values = [cells.texts[code] for code in cells.codes.tolist()]
        hint = "; for a regression say --loss mse" if role == "label" else ""
        return encode(values, f"The values in column {cells.name!r} of {self.where[0].lower() + self.where[1:]}", hint)


def _csv_file(path: Path, settings: TableSettings) -> CsvFile:
    separator = settings.get("separator") or ("\t" if path.suffix.lower() == ".tsv" else None)
    return CsvFile.of(path, separator, settings.get("decimal"), settings.get("encoding"))

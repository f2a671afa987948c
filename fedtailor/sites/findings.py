"""A site's data compared with the plan, before anything is joined: what is there, and all that is wrong with it.

Reading stops at the first mistake. Here every column is looked at, so that all of them are mended at once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch

from fedtailor._common.errors import FedtailorError, shown
from fedtailor.data import Dataset
from fedtailor.data.agreement import numbered
from fedtailor.data.columns import parse_columns
from fedtailor.data.sources import table_path
from fedtailor.data.table import CLIENT, LABELS, column_names
from fedtailor.engines.devices import find_device
from fedtailor.engines.own_code import named_code
from fedtailor.sites.declaration import read_data
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import SiteFile

MOST_COLUMNS = 500  # that are read one by one to find all mistakes


@dataclass(frozen=True)
class FoundColumn:
    """A column of a site's table. Its cells and values are counted here and nowhere else."""

    name: str
    kind: str  # number, category, group, split, label, ignored, or to mend
    missing: int | None = None  # cells
    values: int | None = None  # different values of a category
    rare: int = 0  # values of a category that are not declared, as too few training rows have them


@dataclass(frozen=True)
class Findings:
    """The data of a site, as they were found."""

    rows: int = 0
    classes: dict[str, int] = field(default_factory=dict)  # rows of each
    columns: tuple[FoundColumn, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # that keep the site from joining, each with how to mend it
    dataset: Dataset | None = None  # None if it cannot be read


def look(site: SiteFile, plan: Plan) -> Findings:
    """Look at a site's data and settings, and list all that keeps it from joining."""
    problems = [*_of_settings(site, plan), *_of_columns(site, plan)]
    kinds = _present(site, plan)
    if kinds == {}:
        return Findings(problems=_distinct(problems))
    dataset: Dataset | None
    wrong: set[str] = set()
    try:
        dataset = read_data(site, plan if kinds is None else plan.model_copy(update={"features": kinds}))
    except FedtailorError as error:
        mistakes, dataset, wrong = _of_cells(site, plan, error)
        problems += mistakes
    if dataset is None:
        return Findings(problems=_distinct(problems))
    problems += [*_of_classes(dataset, plan), *_of_size(dataset)]
    return Findings(
        len(dataset),
        _counted(dataset),
        tuple(_columns(site, dataset, wrong)),
        (*dataset.notes, *_of_values(dataset, plan)),
        _distinct(problems),
        dataset,
    )


def in_site_file(text: str) -> str:
    """Say in the words of a site's file what a message says in options of the command line."""
    text = re.sub(r"--columns ('[^']*'|\"[^\"]*\"|[^\s.,)]+)(=\w+)?", _as_setting, text)
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda found: f"{found[1].replace('-', '_')} (in site.toml)", text)


def _as_setting(found: re.Match[str]) -> str:
    named = found[1].strip("'\"") + (found[2] or "")
    return f'columns = "{named}" (in site.toml)'


def _distinct(problems: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(in_site_file, problems)))


# --- settings ---


def _of_settings(site: SiteFile, plan: Plan) -> Iterator[str]:
    """List what the plan asks for that the site does not allow, or does not have."""
    for kind, name in named_code(plan.terms()).items():
        if name not in site.allow:
            yield (
                f"The plan names code of its own, the {kind} {name}: if you trust it, install it and say "
                f'allow = ["{name}"] in site.toml.'
            )
    try:
        find_device(site.device)
    except FedtailorError as error:
        yield str(error)


# --- columns ---


def _header(site: SiteFile) -> list[str]:
    """The names of the table's columns; none if it is no table, or cannot be read."""
    try:
        table = table_path(str(site.path(site.data)))
        return [] if table is None else column_names(table, site.table)  # type: ignore[arg-type]
    except (FedtailorError, OSError):
        return []


def _present(site: SiteFile, plan: Plan) -> dict[str, Any] | None:
    """Those of the plan's features that the site's table has; None if the plan names none, or there is no table."""
    header = _header(site)
    if plan.features is None or not header:
        return None
    return {name: kind for name, kind in plan.features.items() if name in header}


def _of_columns(site: SiteFile, plan: Plan) -> Iterator[str]:
    """List the plan's features that are missing, or that the site's file says to be something else."""
    header = _header(site)
    if plan.features is None or not header:
        return
    try:
        said = parse_columns(site.columns or "")
    except FedtailorError:
        said = {}  # reading says so
    free = [name for name in header if name not in plan.features]
    for name, kind in plan.features.items():
        wanted = kind if isinstance(kind, str) else "category"
        if name not in header:
            near = _near(name, free)
            hint = f"rename the column {shown(near)}, if that is it" if near else "add the column, or rename the one"
            yield f"{site.data} has no column {shown(name)}, a {wanted} of the plan: {hint}."
        elif name == site.label_column:
            yield f"The label column {shown(name)} is a feature of the plan: say another label_column in site.toml."
        elif said.get(name, wanted) != wanted:
            yield (
                f"The column {shown(name)} is a {wanted} in the plan, but site.toml says {said[name]}: say "
                f'columns = "{name}={wanted}", or leave it out there.'
            )


def _label(site: SiteFile) -> str | None:
    """The label column, as the site's file says or as it is called."""
    header = _header(site)
    return site.label_column or next((name for name in LABELS if name in header), None)


def _near(name: str, names: list[str]) -> str | None:
    lower = {each.lower(): each for each in names}
    found = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    within = [each for each in lower if name.lower() in each or each in name.lower()]
    return lower[(found or within)[0]] if found or within else None


# --- cells ---


def _of_cells(site: SiteFile, plan: Plan, first: FedtailorError) -> tuple[list[str], Dataset | None, set[str]]:
    """List the mistakes of all columns, each read without the others; read those that have none, and name those that
    have. If that is not possible, the first mistake stands alone."""
    header, found, wrong = _header(site), [str(first)], set[str]()
    try:
        said = parse_columns(site.columns or "")
    except FedtailorError:
        return found, None, wrong
    roles = {_label(site), site.group, site.split_column, CLIENT}
    possible = header if plan.features is None else _present(site, plan) or {}
    features = [name for name in possible if name not in roles and said.get(name) != "ignore"]

    def read(names: list[str]) -> Dataset:
        others = {**said, **{each: "ignore" for each in header if each not in {*names, *roles}}}
        columns = ", ".join(f'"{each}={kind}"' if "," in each else f"{each}={kind}" for each, kind in others.items())
        known = {name: plan.features[name] for name in names} if plan.features is not None else None
        return read_data(site.model_copy(update={"columns": columns}), plan.model_copy(update={"features": known}))

    for name in features if len(features) <= MOST_COLUMNS else ():
        try:
            read([name])
        except FedtailorError as error:
            if "needs features" not in str(error):  # a column that is ignored by itself is no mistake
                found.append(str(error))
                wrong.add(name)
    try:
        return found, read([name for name in features if name not in wrong]), wrong
    except FedtailorError as error:
        return [*found, *([] if "needs features" in str(error) else [str(error)])], None, wrong


# --- classes and values ---


def _counted(dataset: Dataset) -> dict[str, int]:
    if dataset.targets == "numbers":
        return {}
    labels = dataset.targets == "labels"
    counts = dataset.y.sum(0) if labels else torch.bincount(dataset.y, minlength=len(dataset.classes))
    return dict(zip(dataset.classes, map(int, counts.tolist()), strict=True))


def _of_classes(dataset: Dataset, plan: Plan) -> Iterator[str]:
    """List the classes that the plan does not have, and those that are too rare to be declared."""
    if plan.terms().labels == "own" or dataset.targets == "numbers":
        return
    for name, count in _counted(dataset).items():
        if plan.classes is None:
            if count < plan.privacy.rare and dataset.targets == "classes":
                yield (
                    f"The class {shown(name)} has {_rows(count)}, fewer than the {plan.privacy.rare} of which a site "
                    "declares anything: leave these rows out, or ask the coordinator to give the classes in the plan."
                )
            continue
        try:
            numbered((name,), plan.classes, "")
        except FedtailorError:
            near = _near(name, list(plan.classes))
            hint = f"write {shown(near)}, if that is meant, or " if near else ""
            yield (
                f"The class {shown(name)} ({_rows(count)}) is not in the plan, which has {', '.join(plan.classes)}: "
                f"{hint}leave these rows out, or ask the coordinator to add it."
            )


def _of_size(dataset: Dataset) -> Iterator[str]:
    if len(dataset) < 3:
        yield f"There are {_rows(len(dataset))}: a site needs samples to train and to test on."


def _of_values(dataset: Dataset, plan: Plan) -> Iterator[str]:
    """Name the categories of which the plan lists values that some cells do not have."""
    for values, column in zip(dataset.cells.T if dataset.columns else (), dataset.columns, strict=True):
        given = (plan.features or {}).get(column.name)
        if column.kind != "category" or given is None or isinstance(given, str):
            continue
        strange = [place for place, value in enumerate(column.values) if value not in given]
        if strange:
            count = int(torch.isin(values, torch.tensor(strange, dtype=values.dtype)).sum())
            names = ", ".join(shown(column.values[place]) for place in strange[:3]) + (", …" if strange[3:] else "")
            yield (
                f"The column {shown(column.name)} has values that the plan does not have ({names}; {_rows(count)}): "
                "they count as none of its values."
            )


def _columns(site: SiteFile, dataset: Dataset, wrong: set[str]) -> Iterator[FoundColumn]:
    """Describe the columns: features, roles, those that are ignored, and those with mistakes."""
    for values, column in zip(dataset.cells.T if dataset.columns else (), dataset.columns, strict=True):
        missing = int(values.isnan().sum())
        yield FoundColumn(column.name, column.kind, missing, len(column.values) or None)
    if not dataset.columns:
        return
    roles = {"group": site.group, "split": site.split_column, "label": _label(site)}
    yield from (FoundColumn(name, role) for role, name in roles.items() if name)
    rest = [name for name in dataset.ignored if name not in roles.values()]
    yield from (FoundColumn(name, "to mend" if name in wrong else "ignored") for name in rest)


def _rows(count: int) -> str:
    return f"{count:,} row" + ("" if count == 1 else "s")


def with_rare(findings: Findings, declared: Mapping[str, int]) -> Findings:
    """Say of each category how many of its values are not declared. `declared` counts those that are."""
    columns = [
        replace(one, rare=one.values - declared[one.name]) if one.values and one.name in declared else one
        for one in findings.columns
    ]
    return replace(findings, columns=tuple(columns))

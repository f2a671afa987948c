"""A site's own data: read by its own file, declared to the server, and put into the federation's form."""

from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor._common.version import __version__
from fedtailor.data import Dataset, FederatedData, federate, load
from fedtailor.data.agreement import Common, Hello, Input, numbered
from fedtailor.data.preprocessing import How, Preprocessing
from fedtailor.data.sources import table_path
from fedtailor.data.table import column_names
from fedtailor.experiment import Experiment
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import SiteFile
from fedtailor.training.inputs import Inputs, Lazy, Several, tensors


def read_data(site: SiteFile, plan: Plan) -> Dataset:
    """Read a site's data as those of one client."""
    experiment, path = plan.terms(), str(site.path(site.data))
    dataset = load(
        path,
        image_size=experiment.image_size,
        regression=experiment.loss == "mse",
        knows=_kinds(site, plan, path),
        **site.table,
    )
    client = torch.zeros(len(dataset), dtype=torch.int64)
    return replace(dataset, client=client, client_names=(site.name,))


def _kinds(site: SiteFile, plan: Plan, path: str) -> dict[str, str] | None:
    """The columns as the plan has them: the site's other ones are ignored, and each of the plan's must be there."""
    table = table_path(path)
    if plan.features is None or table is None:
        return None
    header = column_names(table, site.table)  # type: ignore[arg-type]
    for name in plan.features:
        if name not in header:
            raise FedtailorError(
                f"{site.data} has no column {shown(name)}, which the plan names: its columns are {listed(header)}."
            )
    kinds = {name: kind if isinstance(kind, str) else "category" for name, kind in plan.features.items()}
    return {**dict.fromkeys(header, "ignore"), **kinds}


def split(dataset: Dataset, experiment: Experiment, table: How | Preprocessing | None) -> FederatedData:
    """Split a site's samples, and make features of its columns; None leaves these as they are."""
    return federate(
        dataset,
        partition="natural",
        seed=experiment.seed,
        test=experiment.test,
        validation=experiment.validation,
        split="official" if dataset.own_split else experiment.split,
        pixels=experiment.pixels,
        labels=experiment.labels,
        preprocessing=table,
        rare=experiment.rare,
        dtype=getattr(torch, experiment.dtype),
    )


def declare(site: SiteFile, plan: Plan, dataset: Dataset, salt: bytes) -> Hello:
    """Declare a site's data: all that leaves of them before the first round. `salt` is a secret of the site's."""
    experiment = plan.terms()
    data = split(dataset, experiment, None)  # others may know columns that are empty or rare here
    start, trained, validated, end = data.places[0].tolist()
    own, classes = experiment.labels == "own", _classes(dataset, plan, site.name)
    return Hello(
        name=site.name,
        versions={"fedtailor": __version__, "torch": str(torch.__version__)},
        train=trained - start,
        validation=validated - trained,
        test=end - validated,
        targets=dataset.targets,
        outputs=0 if dataset.classes else data.n_outputs,
        classes=() if own or plan.classes is not None else classes,
        own_classes=data.own_classes[0] if own else None,
        class_counts=_counts(data, dataset, classes) if experiment.class_weights == "balanced" and not own else None,
        inputs=() if dataset.columns else tuple(_inputs(data.x)),
        tokens=data.vocabulary,
        facts=_facts(data, plan) if dataset.columns else None,
        data=sha256(salt + data.fingerprint().encode()).hexdigest()[:16],
    )


def _classes(dataset: Dataset, plan: Plan, name: str) -> tuple[str, ...]:
    """The classes that a site declares: those of the plan, or its own. A rare one is content, and not declared."""
    if plan.terms().labels == "own" or not dataset.classes:
        return ()
    if plan.classes is not None:
        numbered(dataset.classes, plan.classes, f"The site {name}")
        return plan.classes
    if dataset.targets == "classes":
        counts = torch.bincount(dataset.y, minlength=len(dataset.classes)).tolist()
        for label, count in zip(dataset.classes, counts, strict=True):
            if count < plan.privacy.rare:
                raise FedtailorError(
                    f"The class {shown(label)} has {count} samples, fewer than the {plan.privacy.rare} of which a site "
                    "declares anything: give the classes in the plan, or leave these samples out."
                )
    return dataset.classes


def _counts(data: FederatedData, dataset: Dataset, classes: tuple[str, ...]) -> tuple[int, ...]:
    """Count the training samples of each class that is declared."""
    counts, places = [0] * len(classes), numbered(dataset.classes, classes, "The site").tolist()
    for place, count in zip(places, data.counts("train")[0].tolist(), strict=True):
        counts[place] = count
    return tuple(counts)


def _facts(data: FederatedData, plan: Plan) -> Any:
    """The facts of each column; the values of a category that the plan gives need not be told."""
    given = {name for name, values in (plan.features or {}).items() if not isinstance(values, str)}
    return tuple(fact.model_copy(update={"values": ()}) if fact.name in given else fact for fact in data.facts[0])


def _inputs(x: Inputs) -> list[Input]:
    like = x.like if isinstance(x, Lazy) else x
    parts = (
        [part.like if isinstance(part, Lazy) else part for part in like.parts] if isinstance(like, Several) else [like]
    )
    found = [tensor for part in parts for tensor in tensors(part)]
    return [Input(shape=tuple(each.shape[1:]), dtype=str(each.dtype).removeprefix("torch.")) for each in found]


def joined(dataset: Dataset, experiment: Experiment, common: Common, number: int) -> FederatedData:
    """Put a site's data into the federation's form: its classes, its features, its number."""
    name = common.sites[number]
    if experiment.labels != "own" and dataset.targets == "classes":
        places = numbered(dataset.classes, common.classes, f"The site {name}")
        dataset = replace(dataset, y=places[dataset.y], classes=common.classes)
    table = None if common.preprocessing is None else _with_ignored(common.preprocessing, dataset)
    data = split(dataset, experiment, table or experiment.preprocessing)
    placed = data.placed(number, common.sites)
    return replace(placed, classes=common.classes, tokens=common.tokens)


def _with_ignored(table: Preprocessing, dataset: Dataset) -> Preprocessing:
    """Add the columns that this site ignores: its model file takes its own table."""
    return table.model_copy(update={"ignored": dataset.ignored})

"""From a data set to a federation: its samples partitioned among clients, and each client's split into parts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError, listed, unknown, warn
from fedtailor.data.assignments import Assignment, assign, is_own, partition_name
from fedtailor.data.client_data import FederatedData
from fedtailor.data.dataset import TRAIN, Dataset, Ints
from fedtailor.data.foreign_files import check_size
from fedtailor.data.hashed_split import hashed_sides
from fedtailor.data.matched_columns import match
from fedtailor.data.partitions import NATURAL, WITHIN, draw, official_parts, parse, random_sides, strata_of, thin
from fedtailor.data.preprocessing import How, Preprocessing, facts_of_clients
from fedtailor.data.shifts import Asked, shifted, with_shifts
from fedtailor.training.inputs import Held, Inputs, Lazy, Several
from fedtailor.training.metrics import KINDS
from fedtailor.training.streams import numpy_stream

MOST_COUNTS = 20_000_000  # clients × classes


def federate(
    dataset: Dataset,
    *,
    partition: str | Path | Assignment = "dirichlet:0.3",
    clients: int | None = None,
    seed: int = 0,
    test: float = 0.2,
    validation: float = 0.1,
    split: Literal["merge", "official", "hash"] | None = None,
    stratify: bool = True,
    min_samples: int = 10,
    max_train: int | None = None,
    new_clients: int = 0,
    pixels: Literal["unit", "signed"] = "unit",
    labels: Literal["shared", "own"] = "shared",
    preprocessing: How | Preprocessing | None = "federated",
    rare: int = 1,
    dtype: torch.dtype = torch.float32,
) -> FederatedData:
    """Partition a data set among clients (20, or the natural ones, unless said) and split each client's samples.

    `partition` is one of the catalogue, or your own: a CSV file with the columns sample and client, `module:function`,
    or a function of (labels, clients, rng) that returns a client for each sample, or the samples of each client. Behind
    one that is named may stand shifts of the clients' features: "iid+rotate:0,90,180,270".

    `labels="own"` numbers each client's classes 0, 1, … anew: client 3's class 0 is then another than client 4's.

    `split="merge"` ignores the authors' split; `test` and `validation` are fractions of a client's samples.
    `split="official"` keeps it, and takes `validation` off the training part where the authors have none. The default
    is "official" where the split is the user's own, and "merge" otherwise. `stratify` splits each class in proportion.
    `split="hash"` goes by the content of each sample alone (or by its group), so that new samples move no others.

    `preprocessing` makes features of a table's columns, with the constants that all training clients agree on, those of
    each client, none, or those of an earlier federation. None declares the facts of each client and leaves the cells as
    they are. What fewer than `rare` of a client's training samples have is not declared.
    """
    if not isinstance(dataset, Dataset):
        raise FedtailorError(
            f"federate takes a data set that load_data returned, not a {type(dataset).__name__}: "
            "lists and dictionaries of clients go into run(data=…) as they are."
        )
    _check_options(test, validation, split, min_samples, max_train, pixels, seed, rare)
    units, first = dataset.units()
    strata = strata_of(dataset, units, first, stratify)
    name = partition_name(partition)
    shared, shifts = with_shifts(partition) if isinstance(partition, str) else (name, [])
    partition = shared if shifts else partition
    own = assign(dataset, partition, clients, seed) if is_own(partition) else None
    official = dataset.own_split if split is None else split == "official"
    parts = np.zeros_like(first)
    if official:
        natural = stratify and shared.startswith(NATURAL)
        parts = official_parts(dataset, first, strata, validation, seed, by_client=natural)
    if own is None:
        _check_table(dataset, shared, clients, labels)
        client, names = _clients(dataset, first, parts, shared, clients, min_samples, seed)
    else:
        _check_table(dataset, NATURAL if labels == "own" else "", len(own.names), labels)
        client, names = own.client[first], own.names
    if not 0 <= new_clients < len(names):
        raise FedtailorError(
            f"{new_clients} of {len(names)} clients cannot be new: hold out from 0 to {len(names) - 1}."
        )
    if new_clients:
        client, names = _new_last(client, names, new_clients, seed, renumbered=own is None and shared != NATURAL)
    if official:
        side = parts
    elif split == "hash":
        side = hashed_sides(dataset, first, test, validation, seed)
    else:
        side = random_sides(client, strata, len(names), test, validation, seed)
    client, side = client[units], side[units]
    if max_train is not None:
        client = thin(client, side, len(names), max_train, seed)
    bounds, order = _layout(client, side, names, dataset.name)
    if official or split == "hash" or (test and dataset.group is not None):
        _warn_of_untested(bounds, names)
    new = frozenset(range(len(names) - new_clients, len(names)))
    how = _Inputs(pixels, dtype, preprocessing, rare, shifts, seed)
    x, about = _inputs(dataset, order, bounds, new, how)
    federated = FederatedData(
        name=dataset.name,
        x=x,
        y=dataset.y[order].to(dtype) if dataset.y.is_floating_point() else dataset.y[order],
        bounds=bounds,
        classes=dataset.classes,
        names=names,
        new=new,
        partition=name,
        assignment=own.checksum if own else None,
        tokens=dataset.tokens,
        **about,
    )
    return (_own_labels(federated) if labels == "own" else federated).aligned()


@dataclass(frozen=True)
class _Inputs:
    """The settings that make a network's inputs of samples."""

    pixels: Literal["unit", "signed"]
    dtype: torch.dtype
    preprocessing: How | Preprocessing | None
    rare: int
    shifts: list[Asked]
    seed: int


def _inputs(
    dataset: Dataset, order: Tensor, bounds: Tensor, new: frozenset[int], how: _Inputs
) -> tuple[Inputs, dict[str, Any]]:
    """Make inputs of samples in this order, as the clients' own cameras and laboratories have them."""
    if dataset.columns:
        cells = dataset.cells[order]
        shifts = shifted(cells, how.shifts, bounds, new, how.seed, dataset.name, dataset.columns)
        x, about = _features(dataset, cells, bounds, new, how.preprocessing, how.rare)
        return x if how.preprocessing is None else as_inputs(x, how.pixels, how.dtype), about | {"shifts": shifts}
    if not how.shifts:
        return as_inputs(dataset.x[order], how.pixels, how.dtype), {}
    pictures = as_inputs(dataset.x[order], "unit", how.dtype)  # shifts are of pixels from 0 to 1
    shifts = shifted(pictures, how.shifts, bounds, new, how.seed, dataset.name)
    if how.pixels == "signed" and isinstance(pictures, Tensor) and dataset.cells.dtype == torch.uint8:
        pictures.mul_(2).sub_(1)
    return pictures, {"shifts": shifts}


def _features(
    dataset: Dataset, x: Tensor, bounds: Tensor, new: frozenset[int], how: How | Preprocessing | None, rare: int
) -> tuple[Tensor, dict[str, Any]]:
    """Make features of a table's columns. Only the training samples of training clients decide about the constants."""
    raw, places, sizes = x.numpy(), bounds.tolist(), bounds.diff(dim=1).numpy()
    part = np.tile([True, False, False], len(sizes)).repeat(sizes.ravel())  # of the samples, in their order: training
    declared = facts_of_clients(raw[part], sizes[:, 0], dataset.columns, rare)
    if how is None:
        return x, {"facts": declared, "notes": dataset.notes}
    earlier = isinstance(how, Preprocessing)  # then it is not of this training
    agreed = how if isinstance(how, Preprocessing) else declared.agreed(len(sizes) - len(new), how, dataset.ignored)
    raw, notes = match(agreed, raw, dataset.columns, dataset.name, part & earlier, rare)
    check_size(dataset.name, 8 * len(raw) * agreed.n_features)
    if agreed.how == "per-client":
        each = zip(declared, places, strict=True)
        features = np.concatenate([agreed.personal(own).transform(raw[start:end]) for own, (start, _, _, end) in each])
    else:
        features = agreed.transform(raw)
    about = {"preprocessing": agreed, "facts": declared, "notes": (*dataset.notes, *notes)}
    return torch.from_numpy(features), about


def _new_last(
    client: Ints, names: tuple[str, ...], new_clients: int, seed: int, renumbered: bool
) -> tuple[Ints, tuple[str, ...]]:
    """Choose the new clients at random and put them behind the others, so that the training clients are 0, 1, …"""
    new = set(numpy_stream(seed, "partition", "new").permutation(len(names))[:new_clients].tolist())
    order = [c for c in range(len(names)) if c not in new] + sorted(new)
    position = np.full(len(names) + 1, -1, dtype=np.int64)  # the last entry serves -1: no client
    position[order] = np.arange(len(names))
    return position[client], names if renumbered else tuple(names[c] for c in order)


def _own_labels(data: FederatedData) -> FederatedData:
    """Number each client's classes from 0, in their order."""
    if data.targets != "classes":
        raise FedtailorError(f"Labels of the clients' own need classes: these targets are {KINDS[data.targets]}.")
    y, own = data.y.clone(), []
    for start, _, _, end in data.bounds.tolist():
        present, y[start:end] = torch.unique(data.y[start:end], return_inverse=True)
        own.append(tuple(data.classes[number] for number in present.tolist()))
    counts = tuple(map(len, own))
    return replace(data, y=y, classes=tuple(map(str, range(max(counts)))), own_classes=counts, own_names=tuple(own))


def _check_options(
    test: float,
    validation: float,
    split: str | None,
    min_samples: int,
    max_train: int | None,
    pixels: str,
    seed: int,
    rare: int,
) -> None:
    if split not in (None, *(known := ("merge", "official", "hash"))):
        raise unknown("split", split, known)
    if pixels not in ("unit", "signed"):
        raise unknown("pixel range", pixels, ("unit", "signed"))
    if not (test >= 0 and validation >= 0 and test + validation < 1):
        raise FedtailorError(
            f"A test fraction of {test} and a validation fraction of {validation} leave nothing to train on: "
            "give fractions from 0 that sum to less than 1."
        )
    if rare < 1:
        raise FedtailorError(f"rare is {rare}: give 1 for all values, or more.")
    if min_samples < 0 or seed < 0:
        raise FedtailorError(f"min_samples ({min_samples}) and seed ({seed}) must not be negative: give 0 or more.")
    if max_train is not None and max_train < 1:
        raise FedtailorError(f"max_train is {max_train}, but each client needs a training sample: give 1 or more.")


def _check_table(dataset: Dataset, partition: str, clients: int | None, labels: str) -> None:
    """Refuse so many clients and classes that a table of their samples does not fit in memory."""
    n_clients = len(dataset.client_names) if partition == NATURAL else clients or 20
    n_classes = 1 if partition == NATURAL and labels == "own" else len(dataset.classes)
    if n_clients * n_classes > MOST_COUNTS:
        raise FedtailorError(
            f"The data set {dataset.name!r} has {n_classes} classes for {n_clients} clients, more than can be counted: "
            "check which columns hold the labels and the clients."
        )


def _clients(
    dataset: Dataset,
    first: Ints,
    parts: Ints,
    partition: str,
    clients: int | None,
    min_samples: int,
    seed: int,
) -> tuple[Ints, tuple[str, ...]]:
    """Assign each unit to a client; return the clients, and their names."""
    if partition == NATURAL:
        if dataset.client is None:
            raise FedtailorError(f"The data set {dataset.name!r} names no clients: choose another partition.")
        known = len(dataset.client_names)
        if clients not in (None, known):
            raise FedtailorError(
                f"The data set {dataset.name!r} has {known} natural clients, not {clients}: leave --clients out, or "
                "choose another --partition."
            )
        return dataset.client.numpy()[first], dataset.client_names
    clients = 20 if clients is None else clients
    parse(partition.removeprefix(WITHIN))
    if clients < 1:
        raise FedtailorError(f"{clients} clients were asked for: a federation needs at least 1.")
    if max(min_samples, 1) * clients > len(first):
        raise FedtailorError(
            f"The data set {dataset.name!r} has {len(first)} samples, too few for {clients} clients "
            f"with at least {max(min_samples, 1)} each: ask for fewer clients or a smaller --min-samples."
        )
    labels = dataset.y.numpy()[first]
    if dataset.targets == "labels" and parse(partition.removeprefix(WITHIN))[0].by_label:
        raise FedtailorError(
            f"The partition {partition!r} draws by class, but these samples have several labels: use iid, quantity or "
            "natural."
        )
    if partition.startswith(WITHIN):
        return _within(dataset, first, labels, parts, partition, clients, min_samples, seed)
    drawn = draw(labels, len(dataset.classes), parts, partition, clients, min_samples, seed)
    return drawn, tuple(map(str, range(clients)))


def _within(
    dataset: Dataset,
    first: Ints,
    labels: Ints,
    parts: Ints,
    partition: str,
    clients: int,
    min_samples: int,
    seed: int,
) -> tuple[Ints, tuple[str, ...]]:
    """Partition the samples of each natural client (a domain, say) among equally many clients."""
    if dataset.client is None:
        raise FedtailorError(f"The data set {dataset.name!r} names no clients: leave {WITHIN!r} out of the partition.")
    domains = dataset.client_names
    if clients % len(domains):
        raise FedtailorError(
            f"The partition {partition!r} needs a multiple of the {len(domains)} clients that the data set "
            f"{dataset.name!r} names, not {clients}."
        )
    each = clients // len(domains)
    client = np.full(len(first), -1, dtype=np.int64)
    of_domain = dataset.client.numpy()[first]
    for domain in range(len(domains)):
        mine = np.flatnonzero(of_domain == domain)
        spec = partition.removeprefix(WITHIN)
        drawn = draw(labels[mine], len(dataset.classes), parts[mine], spec, each, min_samples, seed, domain)
        client[mine] = np.where(drawn < 0, -1, drawn + domain * each)
    return client, tuple(f"{name}-{number}" for name in domains for number in range(each))


def _layout(client: Ints, side: Ints, names: tuple[str, ...], name: str) -> tuple[Tensor, Tensor]:
    """Compute the bounds of all clients, and the order of the samples that makes them slices."""
    order = np.lexsort((side, client))
    order = order[client[order] >= 0]
    counts = np.zeros((len(names), 3), dtype=np.int64)
    np.add.at(counts, (client[order], side[order]), 1)
    if not counts[:, TRAIN].all():
        empty = names[int(np.argmin(counts[:, TRAIN]))]
        raise FedtailorError(
            f"Client {empty!r} of {name!r} has no training sample: leave it out, or choose another split or partition."
        )
    ends = np.cumsum(counts).reshape(counts.shape)
    starts = ends[:, :1] - counts[:, :1]
    return torch.from_numpy(np.hstack([starts, ends])), torch.from_numpy(order)


def _warn_of_untested(bounds: Tensor, names: tuple[str, ...]) -> None:
    """Name the clients whose split leaves them nothing to test on, unless it is all of them."""
    without = [names[c] for c in (bounds[:, 2] == bounds[:, 3]).nonzero().flatten().tolist()]
    if 0 < len(without) < len(names):
        warn(
            f"{len(without)} of {len(names)} clients have no test samples and are not measured: {listed(without)}; one "
            "needs more samples or groups, or a test part of its own."
        )


@overload
def as_inputs(x: Held, pixels: str, dtype: torch.dtype) -> Held: ...
@overload
def as_inputs(x: Inputs, pixels: str, dtype: torch.dtype) -> Inputs: ...
def as_inputs(x: Inputs, pixels: str, dtype: torch.dtype) -> Inputs:
    """Convert samples to a network's inputs: pixels scaled, images with the channels last in memory (faster on a CPU).

    Images are copied in any case: so the strides are those of channels_last with one channel too, or convolutions
    would take a slower way. Integers and booleans stay what they are: whether the network takes them is not known yet.
    """
    if isinstance(x, Several):
        return Several(tuple(as_inputs(part, pixels, dtype) for part in x.parts))
    if isinstance(x, Lazy):
        return x.map(lambda samples: as_inputs(samples, pixels, dtype))
    if x.ndim == 4:
        x = x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)
    if x.dtype in (torch.int64, torch.bool):
        return x
    if x.dtype != torch.uint8:
        inputs = x.to(dtype)
        if dtype.itemsize < x.dtype.itemsize and not torch.isfinite(inputs).all():
            raise FedtailorError("Some features are too large for float32: scale them, or compute in float64.")
        return inputs
    x = x.to(dtype).div_(255)
    return x.mul_(2).sub_(1) if pixels == "signed" else x

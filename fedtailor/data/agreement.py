"""The declarations of sites that join a federation, and the agreement that follows from them.

A site declares facts about its samples and none of them. From the declarations of all sites follow the classes, the
features with their constants, and the size of the network: the same as in a simulation of the same data.
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from torch import Tensor

from fedtailor._common.errors import FedtailorError, listed, shown
from fedtailor._common.files import Count, read_sealed, seal, write_atomically
from fedtailor.data.arrays import encode
from fedtailor.data.cells import number
from fedtailor.data.client_data import Elsewhere, FederatedData
from fedtailor.data.preprocessing import Facts, How, Preprocessing, agree
from fedtailor.training.inputs import Held, Several
from fedtailor.training.metrics import KINDS, Targets

FILE = "federation.json"  # in the run directory of a federation
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # the name of a run: sites make a directory of it
DTYPES = ("float32", "float64", "int64", "bool")
Run = Annotated[str, StringConstraints(pattern=f"^{RUN.pattern}$")]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Input(_Plain):
    """One input of the network: the shape of a sample, and its type."""

    shape: tuple[Count, ...]
    dtype: str = Field(pattern=f"^({'|'.join(DTYPES)})$")


class Hello(_Plain):
    """All that a site declares of its data."""

    name: str
    versions: dict[str, str] = Field(description="of fedtailor and of PyTorch")
    train: Count = Field(description="numbers of its samples")
    validation: Count
    test: Count
    targets: Targets = Field(description="one class a sample, several labels, or numbers")
    outputs: Count = Field(description="numbers that are predicted; 0 for classes")
    classes: tuple[str, ...] = Field((), description="their names, if the plan does not give them")
    own_classes: Count | None = Field(None, description="number of its classes, where labels are each site's own")
    class_counts: tuple[Count, ...] | None = Field(
        None, description="training samples of each class, where the experiment balances them"
    )
    inputs: tuple[Input, ...] = Field((), description="shapes and types of a sample; a table declares columns")
    tokens: Count | None = Field(None, description="number of token values, where samples are texts")
    facts: Facts | None = Field(None, description="of each column of a table")
    data: str = Field(description="a checksum that says whether the data have changed, and nothing else")


class Common(_Plain):
    """The knowledge that all sites of a run share: its name, the roster, and the sum of the declarations."""

    run: Run
    sites: tuple[str, ...] = Field(min_length=1)
    targets: Targets
    classes: tuple[str, ...]
    inputs: tuple[Input, ...]
    outputs: Count
    tokens: Count | None = None
    preprocessing: Preprocessing | None = None

    @property
    def n_features(self) -> int:
        """The number of features of a table."""
        return 0 if self.preprocessing is None else self.preprocessing.n_features


class Agreement(_Plain):
    """The beginning of a run: what is common to all, and what each site declared."""

    model_config = ConfigDict(extra="ignore")  # the file has a checksum too

    common: Common
    declared: tuple[Hello, ...]

    def data(self, dtype: str = "float32") -> FederatedData:
        """The federation's data as the server knows them: names and numbers, and no sample."""
        common, declared = self.common, self.declared
        sizes = torch.tensor([[each.train, each.validation, each.test] for each in declared])
        ends = sizes.flatten().cumsum(0).view(-1, 3)
        counts = [_counts(each, common.classes) for each in declared if each.class_counts is not None]
        return FederatedData(
            name=common.run.rpartition("-")[0],
            x=_zeros(common.inputs or [Input(shape=(common.n_features,), dtype=dtype)]),
            y=_targets(common),
            bounds=torch.cat([ends[:, :1] - sizes[:, :1], ends], dim=1),
            classes=common.classes,
            names=common.sites,
            own_classes=tuple(each.own_classes for each in declared if each.own_classes is not None),
            tokens=common.tokens,
            preprocessing=common.preprocessing,
            elsewhere=Elsewhere(
                sha256("".join(each.data for each in declared).encode()).hexdigest()[:8],
                torch.stack(counts) if len(counts) == len(declared) else None,
            ),
        )


def read_agreement(run: Path) -> Agreement | None:
    """Read the agreement of a run directory; None if its sites are simulated."""
    path = run / FILE
    return read_sealed(path, Agreement.model_validate_json) if path.is_file() else None


def write_agreement(run: Path, agreement: Agreement) -> None:
    """Write the agreement into a run directory."""
    write_atomically(run / FILE, seal(agreement.model_dump(mode="json"), pretty=True))


def agree_on(
    run: str,
    hellos: Sequence[Hello],
    *,
    classes: Sequence[str] | None = None,
    features: Mapping[str, str | Sequence[str]] | None = None,
    how: How = "federated",
    own_labels: bool = False,
) -> Agreement:
    """Add up what sites declare, in the order of their numbers; `classes` and `features` are those of the plan.

    A site that does not fit the others is named, with what to do.
    """
    first = hellos[0]
    for hello in hellos:
        _check_alike(first, hello)
    return Agreement(
        common=Common(
            run=run,
            sites=tuple(hello.name for hello in hellos),
            targets=first.targets,
            classes=_classes(hellos, classes, own_labels),
            inputs=first.inputs if first.facts is None else (),
            outputs=first.outputs,
            tokens=max((hello.tokens for hello in hellos if hello.tokens is not None), default=None),
            preprocessing=None if first.facts is None else _preprocessing(hellos, features, how),
        ),
        declared=tuple(hellos),
    )


def _check_alike(one: Hello, other: Hello) -> None:
    """Refuse a site whose samples or targets are of another kind than the first one's."""
    who = f"The site {other.name}"
    if (one.facts is None) != (other.facts is None):
        raise FedtailorError(f"{who} has {_kind(other)}, but {one.name} has {_kind(one)}: all need the same.")
    if one.targets != other.targets or one.outputs != other.outputs:
        raise FedtailorError(
            f"{who} predicts {KINDS[other.targets]}, but {one.name} {KINDS[one.targets]}: give both the same label "
            "column, and loss mse in the plan for numbers."
        )
    if one.facts is None and one.inputs != other.inputs:
        shapes = [" and ".join(f"{each.dtype} {tuple(each.shape)}" for each in hello.inputs) for hello in (other, one)]
        raise FedtailorError(f"{who} has samples of {shapes[0]}, but {one.name} of {shapes[1]}: all need the same.")
    if not other.train:
        raise FedtailorError(f"{who} has no training sample: it cannot take part.")


def _kind(hello: Hello) -> str:
    return "samples without columns" if hello.facts is None else "a table"


def _classes(hellos: Sequence[Hello], given: Sequence[str] | None, own_labels: bool) -> tuple[str, ...]:
    """The classes of the plan, or of all sites together; numbers where labels are each site's own."""
    if own_labels:
        return tuple(map(str, range(max(hello.own_classes or 0 for hello in hellos))))
    if given is not None or hellos[0].targets == "numbers":
        return tuple(given or ())
    if hellos[0].targets == "labels":
        return hellos[0].classes
    return encode([name for hello in hellos for name in hello.classes], "The classes of all sites")[1]


def _preprocessing(
    hellos: Sequence[Hello], features: Mapping[str, str | Sequence[str]] | None, how: How
) -> Preprocessing:
    """Agree on the features of a table. Values of categories that the plan gives need no site's word."""
    declared = [hello.facts for hello in hellos if hello.facts is not None]
    given = {name: tuple(values) for name, values in (features or {}).items() if not isinstance(values, str)}
    completed = [
        tuple(
            fact.model_copy(update={"values": tuple(sorted(given[fact.name]))}) if fact.name in given else fact
            for fact in facts
        )
        for facts in declared
    ]
    return agree(completed, how, names=[f"site {hello.name}" for hello in hellos])


def numbered(names: Sequence[str], classes: Sequence[str], who: str) -> Tensor:
    """Number a site's classes as the federation does; refuse one that it does not have."""
    places = {_key(name): place for place, name in enumerate(classes)}
    for name in names:
        if _key(name) not in places:
            raise FedtailorError(
                f"{who} has the class {shown(name)}, which the federation does not: its classes are {listed(classes)}."
            )
    return torch.tensor([places[_key(name)] for name in names])


def _key(name: str) -> str | float:
    """Names of numbers go by their value: 1 and 01 are the same."""
    value = number(name)
    return name if value is None or isnan(value) else value


def _counts(hello: Hello, classes: Sequence[str]) -> Tensor:
    """Count a site's training samples by the federation's classes."""
    counts = torch.zeros(len(classes), dtype=torch.int64)
    places = numbered(hello.classes or classes, classes, f"The site {hello.name}")
    if len(places) != len(declared := hello.class_counts or ()):
        raise FedtailorError(f"The site {hello.name} counts {len(declared)} classes, but names {len(places)}.")
    counts[places] = torch.tensor(declared)
    return counts


def _zeros(inputs: Sequence[Input]) -> Held:
    """Make two samples of zeros, to build and try a network with."""
    parts = [torch.zeros(2, *each.shape, dtype=getattr(torch, each.dtype)) for each in inputs]
    return parts[0] if len(parts) == 1 else Several(tuple(parts))


def _targets(common: Common) -> Tensor:
    if common.targets == "classes":
        return torch.zeros(2, dtype=torch.int64)
    return torch.zeros(2, len(common.classes) or common.outputs)

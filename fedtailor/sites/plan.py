"""The plan of a federation, `federation.toml`: who takes part, what is learned, and what sites tell at most.

The coordinator writes it and every site has a copy: `fedtailor site check` shows a hospital what would leave by it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from fedtailor._common.errors import FedtailorError, shown, unknown, wanted
from fedtailor._common.toml import read_toml
from fedtailor.experiment import DATA_SETTINGS, Experiment, make_experiment
from fedtailor.experiment.privacy import Privacy as DifferentialPrivacy

# Settings about samples that all sites have in common; the others are each site's own, or have no meaning there.
COMMON = ("test", "validation", "pixels", "labels", "preprocessing", "image_size")
OWN = ({*DATA_SETTINGS} - {*COMMON}) | {"engine", "address", "workers", "deadline", "device", "debug"}
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"  # between the dots of a host name
Host = Annotated[str, StringConstraints(pattern=rf"^({_LABEL}\.)*{_LABEL}$", max_length=64)]  # as certificates have it
Disclosed = Literal["exact", "rounded", "none"]
DISCLOSED: tuple[Disclosed, ...] = ("exact", "rounded", "none")  # from all to nothing
FileModel = TypeVar("FileModel", bound="FileOf")


class FileOf(BaseModel):
    """The content of a TOML file that people write."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Privacy(FileOf):
    """The most that sites tell. Each may tell less."""

    metrics: Disclosed = Field("exact", description="the metrics of a site's models: exact, rounded (to 1 %), or none")
    rare: int = Field(
        5, ge=1, le=10**9, description="what fewer of a site's training rows have is not declared: values, columns"
    )


class Plan(FileOf):
    """The plan of a federation."""

    name: Name = Field(description="of the federation; names of its runs begin with it")
    server: Host = Field("localhost", description="the server's host name: what sites connect to, and its certificate")
    port: int = Field(8002, ge=1, le=65535, description="the one port that sites connect to")
    admin: str = Field(
        "coordinator@example.org",
        pattern=r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}$",
        description="who may start runs: a name like an e-mail address",
    )
    sites: tuple[Name, ...] = Field(min_length=1, max_length=10_000, description="in the order of the clients' numbers")
    classes: tuple[str, ...] | None = Field(None, description="their names [declared by the sites]")
    features: dict[str, Literal["number", "category"] | tuple[str, ...]] | None = Field(
        None,
        description="columns of the sites' tables: number, category, or a category's values [declared by the sites]",
    )
    deadline: float = Field(600.0, gt=0, description="seconds that a site has for its work in a round")
    join: float = Field(600.0, gt=0, description="seconds to wait for all sites before the first round")
    privacy: Privacy = Privacy()
    experiment: dict[str, Any] = Field(description="settings of the experiment: method, model, rounds, lr …")

    @field_validator("sites")
    @classmethod
    def _different(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        if len({name.lower() for name in sites}) < len(sites) or "server" in sites:
            raise ValueError("names that differ, and none of them server")
        return sites

    @field_validator("classes")
    @classmethod
    def _classes(cls, classes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if classes is not None and (len(classes) < 2 or len(set(classes)) < len(classes)):
            raise ValueError("two or more names that differ")
        return classes

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for setting in ("attack", "system"):
            if setting in self.experiment:
                raise FedtailorError(
                    f"The experiment of the plan sets {setting!r}, which is for simulations alone: leave it out."
                )
        for setting in self.experiment:
            if setting in OWN:
                where = (
                    "[privacy]"
                    if setting == "rare"
                    else "deadline, above [experiment]"
                    if setting == "deadline"
                    else "the site.toml of each site, or leave it out"
                )
                raise FedtailorError(
                    f"The experiment of the plan sets {setting!r}, which is not its to say: see {where}."
                )
        if (wanted := self.terms().privacy) and DifferentialPrivacy.parse(wanted).noise is None:
            raise FedtailorError(
                "The experiment's privacy does not say its noise, which every site must see in the plan: `fedtailor "
                "run METHOD --privacy … --epsilon …` finds it in a simulation."
            )
        if self.terms().secure and self.server in self.sites:
            raise FedtailorError(
                f"The server and a site are both called {self.server}: secure aggregation knows sites by the names in "
                "their certificates, so name the site otherwise."
            )
        return self

    def terms(self) -> Experiment:
        """The complete experiment. Its samples are split by a hash of each: a new row never moves another."""
        usual = {"checkpoint_every": 1}  # a round costs all sites their work: none is done twice
        given = {"data": self.name, "partition": "natural", "split": "hash", "rare": self.privacy.rare}
        return make_experiment({**usual, **self.experiment, **given, "clients": len(self.sites)})

    def number(self, site: str) -> int:
        """A site's number in the federation."""
        if site not in self.sites:
            raise unknown("site in the plan", site, self.sites)
        return self.sites.index(site)


def _check_names(experiment: Experiment) -> None:
    """Refuse a method, parameter or network that there is not. Code as module:name is the sites' to allow."""
    from fedtailor.methods import find_method
    from fedtailor.models import CATALOGUE

    if ":" not in experiment.method:
        find_method(experiment.method, experiment.parameters)
    if ":" not in experiment.model and experiment.model not in CATALOGUE:
        raise unknown("model", experiment.model, CATALOGUE)


def read_plan(path: Path, names: bool = True) -> Plan:
    """Read a plan; refuse a wrong one in one sentence.

    To find its method and network imports PyTorch, which takes seconds: without `names`, whoever runs the plan finds
    out whether there are such.
    """
    plan = read_file(path, Plan, "plan")
    if names:
        try:
            _check_names(plan.terms())
        except FedtailorError as error:
            raise FedtailorError(f"The plan {path}: {error}") from None
    return plan


def read_file(path: Path, kind: type[FileModel], what: str, **more: Any) -> FileModel:
    """Read a TOML file that people write."""
    settings = read_toml(path, what)
    try:
        return kind.model_validate({**settings, **more})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:2] if isinstance(part, str))
        if first["type"] == "extra_forbidden":
            known = kind.model_fields if len(first["loc"]) == 1 else Privacy.model_fields
            raise FedtailorError(f"The {what} {path}: {unknown('setting', name.rpartition('.')[2], known)}") from None
        if first["type"] == "missing":
            raise FedtailorError(f"The {what} {path} does not say {name!r}: {_meaning(kind, name)}.") from None
        raise FedtailorError(
            f"The {what} {path}: {name!r} is {shown(first['input'])}, but it must be {_wanted(first)}."
        ) from None
    except FedtailorError as error:
        raise FedtailorError(f"The {what} {path}: {error}") from None


def _meaning(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields.get(name)
    return field.description if field and field.description else "give it"


def _wanted(problem: Any) -> str:
    if problem["type"] == "string_pattern_mismatch":
        plain = re.sub(r"[\\^$]", "", problem["ctx"]["pattern"])
        return (
            "an address like name@example.org" if "@" in plain else "letters, digits and - (names also _, hosts also .)"
        )
    return wanted(problem)

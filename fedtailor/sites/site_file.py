"""A site's own file, `site.toml`: its data, what it tells, and what it lets the server ask for."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import TABLE_SETTINGS, Experiment
from fedtailor.sites.plan import DISCLOSED, Disclosed, FileOf, Name, Plan, read_file, read_plan

LOG, SECRET = "site.log", "secret"  # in its directory


class SiteFile(FileOf):
    """A site's settings. Paths are relative to the file; none of it is sent."""

    here: Path = Field(Path(), exclude=True)  # the file's directory
    name: Name = Field(description="the site's name in the plan")
    plan: str = Field("federation.toml", description="the federation's plan, as the coordinator sent it")
    kit: str = Field("kit", description="the directory with the site's keys and certificates")
    data: str = Field(description="the site's data: a table (CSV, Parquet), an npz file or a folder")
    directory: str = Field("private", description="where states, models and the log stay")
    allow: tuple[str, ...] = Field(
        (), description="methods, networks and losses beside the plan's own that the server may ask for"
    )
    metrics: Disclosed = Field("exact", description="what leaves of the metrics: exact, rounded (to 1 %), or none")
    epsilon: float | None = Field(
        None,
        gt=0,
        description="the most ε that all private trainings of all plans and runs together may cost these data "
        "[what the plan says, or its rounds cost]",
    )
    threads: int = Field(1, ge=1, le=1024, description="threads of a computation; the same bits are promised for 1")
    device: str = Field("cpu", description="cpu, cuda, mps or auto")
    label_column: str | None = None
    client_column: None = None
    group: str | None = None
    split_column: str | None = None
    columns: str | None = None
    drop_unlabelled: bool = False
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        return Experiment._columns(value)

    @model_validator(mode="after")
    def _kept_apart(self) -> Self:
        if self.private.resolve() == self.path(self.kit).resolve():
            raise ValueError("directory and kit must be two places")
        return self

    def path(self, name: str) -> Path:
        """A path that the file names."""
        return self.here / Path(name).expanduser()

    @property
    def private(self) -> Path:
        """The directory that never leaves the site."""
        return self.path(self.directory)

    @property
    def table(self) -> dict[str, Any]:
        """The settings of the site's table."""
        return {name: getattr(self, name) for name in TABLE_SETTINGS}

    def read_plan(self, names: bool = True) -> Plan:
        """Read the plan; refuse one that does not name this site. Of `names`, see `read_plan`."""
        plan = read_plan(self.path(self.plan), names)
        if self.name not in plan.sites:
            raise FedtailorError(
                f"The plan {self.path(self.plan)} has no site {self.name!r}: its sites are {', '.join(plan.sites)}."
            )
        return plan

    def tells(self, plan: Plan) -> Disclosed:
        """The part of the metrics that leaves: the less of what the plan and the site say."""
        return max(self.metrics, plan.privacy.metrics, key=DISCLOSED.index)


def read_site(path: Path) -> SiteFile:
    """Read a site's file; refuse a wrong one in one sentence."""
    return read_file(path, SiteFile, "site's file", here=path.parent)

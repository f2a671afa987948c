"""`fedtailor deploy run` and `status`, `fedtailor site start`: a federation of real sites at work."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor.cli import loudness
from fedtailor.cli.display import (
    INTERRUPTED,
    Bars,
    human_bytes,
    human_time,
    out,
    print_json,
    progress_bars,
    say,
    visible,
)
from fedtailor.cli.presence import PRESENT, read_status
from fedtailor.cli.watch import Watched

if TYPE_CHECKING:
    from fedtailor.server.records import RoundRecord
    from fedtailor.sites.plan import Plan
    from fedtailor.sites.site_file import SiteFile

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="the plan, federation.toml")]
Metrics = Annotated[
    int | None,
    typer.Option(min=1, max=65535, metavar="PORT", help="numbers for Prometheus, on http://127.0.0.1:PORT/metrics"),
]
AsJson = Annotated[bool, typer.Option("--json", help="lines as JSON, for a collector of logs")]
RunDir = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help=r"the run directory \[runs/NAME beside the plan]")
]


def run(
    plan: PlanFile,
    to: RunDir = None,
    kits: Annotated[
        Path | None, typer.Option(metavar="DIR", help=r"the directory with server/ and admin/ \[of the plan, or kits]")
    ] = None,
    metrics: Metrics = None,
    as_json: AsJson = False,
) -> None:
    """Run the plan with its sites: start the server, wait for the sites, do all rounds that are left.

    Sites, their jobs and the server may die and come back: the run goes on from its last checkpoint. Ctrl-C ends the
    server and leaves a run that the same command goes on with.

    [bold]Examples[/]
      fedtailor deploy run federation.toml
      fedtailor deploy run federation.toml --kits kits --out runs/heart --metrics 9464 --json
    """
    _need_nvflare()
    from fedtailor.sites.nvflare.driver import Driver
    from fedtailor.sites.plan import read_plan

    content = read_plan(plan)
    directory = to or plan.parent / "runs" / content.name
    folder = kits or _kits(plan)
    tell = Teller(as_json, role="server", federation=content.name)
    with nullcontext(Bars()) if as_json else progress_bars() as bars, tell.refusals():
        shown = Shown(directory, content, bars, tell)
        own = {"server": folder / "server" / "kit", "admin": folder / "admin" / "kit"}
        driver = Driver(plan, directory, own["server"], own["admin"], tell, shown.look)
        try:
            with _run_metrics(metrics, directory, content, own):
                driver.run()
        except KeyboardInterrupt:
            bars.stop()
            tell(f"Stopped after round {driver.rounds}: the same command goes on.")
            raise typer.Exit(INTERRUPTED) from None
        shown.look()
    for site, why in read_status(directory).get("sites", {}).items():
        if why != PRESENT:
            tell(f"{site}: {why}. When it is back, the same command hands out its model.", site=site)
    tell(f"Done: {driver.rounds} rounds. See `fedtailor show {directory}`.")


def status(
    plan: PlanFile,
    to: RunDir = None,
    watch: Annotated[bool, typer.Option("--watch", help="again every second, until the run is done or Ctrl-C")] = False,
) -> None:
    """Show which sites are there, and how far the run is: once, or with --watch again and again."""
    from fedtailor.sites.plan import read_plan

    content = read_plan(plan, names=False)
    directory = to or plan.parent / "runs" / content.name
    if not read_status(directory):
        raise FedtailorError(f"There is no run in {directory} yet: start it with `fedtailor deploy run {plan}`.")
    looked = _Look(directory, content.terms().rounds)
    if not (watch and out.is_terminal):
        out.print(looked(), soft_wrap=True)
        return
    with suppress(KeyboardInterrupt), Live(looked(), console=out, auto_refresh=False) as live:
        while looked.phase != "done":
            time.sleep(1)
            live.update(looked(), refresh=True)


class _Look:
    """The state of a run and its sites, read again with each call."""

    def __init__(self, directory: Path, rounds: int) -> None:
        self._directory, self._rounds, self.phase = directory, rounds, ""
        self._watched: Watched | None = None

    def __call__(self) -> Group:
        found = read_status(self._directory)
        self.phase = str(found.get("phase"))
        if self._watched is None and (self._directory / "experiment.toml").is_file():
            self._watched = Watched(self._directory)
        said = [f"Phase: {visible(self.phase)}, round {found.get('round')} of {self._rounds}"]
        for site, why in found.get("sites", {}).items():
            seen = found.get("seen", {}).get(site)
            ago = f", {human_time(max(0.0, time.time() - seen))} ago" if seen else ""
            said.append(f"  {visible(site)}: {visible(why)}{ago}")
        return Group(*([self._watched.look()] if self._watched else []), Text("\n".join(said)))


def start(
    site: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="the site's file")],
    metrics: Metrics = None,
    as_json: AsJson = False,
) -> None:
    """Take part: connect to the server and do the work that it asks for, until Ctrl-C.

    The connection is outgoing. If its process dies it is started again; what the site keeps is in its directory.
    With --json no text of a fault is printed, as it may have a patient's data in it: it is in the site's own log alone.
    """
    _need_nvflare()
    from fedtailor.sites.nvflare.client import stay_connected
    from fedtailor.sites.site_file import read_site

    file = read_site(site)
    plan = file.read_plan(names=False)
    tell = Teller(as_json, role="site", federation=plan.name, site=file.name)
    with suppress(KeyboardInterrupt), tell.refusals(), _site_metrics(metrics, file, plan):
        stay_connected(site, tell, plain=as_json)
    tell("Ended. The same command goes on.")


class Teller:
    """Prints lines with the time: for people, or as JSON for a collector of logs."""

    def __init__(self, as_json: bool, **about: str) -> None:
        self.as_json, self._about = as_json, about

    def __call__(self, text: str, level: str = "info", **more: object) -> None:
        """Print a line."""
        if self.as_json:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            print_json({"time": now, "level": level, **self._about, "message": text, **more}, indent=None)
            sys.stdout.flush()
        else:
            say(f"{time.strftime('%H:%M:%S')} {visible(text)}")

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Print a refusal as a line too, where lines are JSON."""
        try:
            yield
        except FedtailorError as error:
            if not self.as_json:
                raise
            self(str(error), level="error")
            raise typer.Exit(2) from None


class Shown:
    """The progress of a run, read from its directory: a bar at a terminal, a line for each round elsewhere."""

    def __init__(self, directory: Path, plan: "Plan", bars: Bars, tell: Teller) -> None:
        self._directory, self._bars, self._total, self._tell = directory, bars, plan.terms().rounds, tell
        self._task = bars.add_task(visible(plan.name), total=self._total, status="", lines="none")
        self._rounds, self._size = list["RoundRecord"](), 0  # as they were last read
        self.look(silent=True)

    def look(self, silent: bool = False) -> None:
        """Show what is new."""
        before = len(self._rounds)
        self._read()
        sites = read_status(self._directory).get("sites", {})
        here = f"{sum(why == PRESENT for why in sites.values())} of {len(sites)} sites"
        sent = human_bytes(sum(record.bytes for record in self._rounds))
        status = f"{self._quality(self._rounds[-1])}  {sent}  {here}" if self._rounds else here
        self._bars.update(self._task, completed=len(self._rounds), status=status)
        quiet = silent or loudness.quiet or (out.is_terminal and not self._tell.as_json)
        for record in self._rounds[before:] if not quiet else ():
            text = f"Round {record.round} of {self._total}: {self._quality(record)}, {record.seconds:.1f} s, {here}."
            numbers: dict[str, object] = {
                "bytes_down": record.bytes_down,
                "bytes_up": record.bytes_up,
                "seconds": record.seconds,
            }
            self._tell(text, "info", round=record.round, failed=len(record.failed), **numbers)

    def _read(self) -> None:
        from fedtailor.server.run_directory import RunDirectory

        file = self._directory / "rounds.jsonl"
        size = file.stat().st_size if file.is_file() else 0
        if size != self._size:
            with suppress(FedtailorError):  # a line is being written: the next look reads it
                run = RunDirectory(self._directory)
                self._rounds, self._metric, self._size = run.rounds(), run.metric(), size

    def _quality(self, record: "RoundRecord") -> str:
        value = self._metric.of(record)
        return "not measured" if value is None else self._metric.shown(value)


def _run_metrics(port: int | None, run: Path, plan: "Plan", kits: dict[str, Path]) -> AbstractContextManager[object]:
    if port is None:
        return nullcontext()
    from fedtailor.sites.exporter import exported, of_run
    from fedtailor.sites.nvflare.launch import certificate

    ends = {role: certificate(kit, role).not_valid_after_utc.timestamp() for role, kit in kits.items()}
    return exported(port, lambda: of_run(run, plan, ends))


def _site_metrics(port: int | None, file: "SiteFile", plan: "Plan") -> AbstractContextManager[object]:
    if port is None:
        return nullcontext()
    from fedtailor.sites.exporter import exported, of_site
    from fedtailor.sites.nvflare.launch import certificate

    ends = {file.name: certificate(file.path(file.kit), "client").not_valid_after_utc.timestamp()}
    return exported(port, lambda: of_site(file, plan, ends))


def _kits(plan: Path) -> Path:
    """Find the kits: the plan is in the server's directory, or beside all of them."""
    return plan.resolve().parent.parent if (plan.parent / "kit").is_dir() else plan.parent / "kits"


def _need_nvflare() -> None:
    from importlib.util import find_spec

    if find_spec("nvflare") is None:
        raise FedtailorError(f"Real sites need NVFlare: install it with {install_command('nvflare')}.")

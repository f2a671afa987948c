"""`fedtailor deploy run` and `status`, `fedtailor site start`: a federation of real sites at work."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor.cli import loudness
from fedtailor.cli.display import INTERRUPTED, Bars, human_bytes, out, progress_bars, say, visible
from fedtailor.cli.presence import read_status

if TYPE_CHECKING:
    from fedtailor.server.records import RoundRecord
    from fedtailor.sites.plan import Plan

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="the plan, federation.toml")]
RunDir = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help=r"the run directory \[runs/NAME beside the plan]")
]


def run(
    plan: PlanFile,
    to: RunDir = None,
    kits: Annotated[
        Path | None, typer.Option(metavar="DIR", help=r"the directory with server/ and admin/ \[of the plan, or kits]")
    ] = None,
) -> None:
    """Run the plan with its sites: start the server, wait for the sites, do all rounds that are left.

    Sites, their jobs and the server may die and come back: the run goes on from its last checkpoint. Ctrl-C ends the
    server and leaves a run that the same command goes on with.

    [bold]Examples[/]
      fedtailor deploy run federation.toml
      fedtailor deploy run federation.toml --kits kits --out runs/heart
    """
    _need_nvflare()
    from fedtailor.sites.nvflare.driver import Driver
    from fedtailor.sites.plan import read_plan

    content = read_plan(plan)
    directory = to or plan.parent / "runs" / content.name
    folder = kits or _kits(plan)
    with progress_bars() as bars:
        shown = Shown(directory, content, bars)
        driver = Driver(plan, directory, folder / "server" / "kit", folder / "admin" / "kit", _line, shown.look)
        try:
            driver.run()
        except KeyboardInterrupt:
            bars.stop()
            _line(f"Stopped after round {driver.rounds}: the same command goes on.")
            raise typer.Exit(INTERRUPTED) from None
        shown.look()
    for site, why in read_status(directory).get("sites", {}).items():
        if why != "present":
            _line(f"{site}: {why}. When it is back, the same command hands out its model.")
    _line(f"Done: {driver.rounds} rounds. See `fedtailor show {directory}`.")


def status(plan: PlanFile, to: RunDir = None) -> None:
    """Show once which sites are there, and how far the run is."""
    from fedtailor.cli.watch import Watched
    from fedtailor.sites.plan import read_plan

    content = read_plan(plan)
    directory = to or plan.parent / "runs" / content.name
    found = read_status(directory)
    if not found:
        raise FedtailorError(f"There is no run in {directory} yet: start it with `fedtailor deploy run {plan}`.")
    if (directory / "experiment.toml").is_file():
        out.print(Watched(directory).look())
    out.print(f"Phase: {visible(found['phase'])}, round {found['round']} of {content.terms().rounds}")
    for site, why in found["sites"].items():
        say(f"  {visible(site)}: {visible(why)}")


def start(site: Annotated[Path, typer.Argument(metavar="SITE.TOML", help="the site's file")]) -> None:
    """Take part: connect to the server and do the work that it asks for, until Ctrl-C.

    The connection is outgoing. If its process dies it is started again; what the site keeps is in its directory.
    """
    _need_nvflare()
    from fedtailor.sites.nvflare.client import stay_connected

    with suppress(KeyboardInterrupt):
        stay_connected(site, _line)
    _line("Ended. The same command goes on.")


class Shown:
    """The progress of a run, read from its directory: a bar at a terminal, a line for each round elsewhere."""

    def __init__(self, directory: Path, plan: "Plan", bars: Bars) -> None:
        self._directory, self._bars, self._total = directory, bars, plan.terms().rounds
        self._task = bars.add_task(visible(plan.name), total=self._total, status="", lines="none")
        self._rounds, self._size = list["RoundRecord"](), 0  # as they were last read
        self.look(silent=True)

    def look(self, silent: bool = False) -> None:
        """Show what is new."""
        before = len(self._rounds)
        self._read()
        sites = read_status(self._directory).get("sites", {})
        here = f"{sum(why == 'present' for why in sites.values())} of {len(sites)} sites"
        sent = human_bytes(sum(record.bytes for record in self._rounds))
        status = f"{self._quality(self._rounds[-1])}  {sent}  {here}" if self._rounds else here
        self._bars.update(self._task, completed=len(self._rounds), status=status)
        for record in self._rounds[before:] if not (silent or out.is_terminal or loudness.quiet) else ():
            _line(f"Round {record.round} of {self._total}: {self._quality(record)}, {record.seconds:.1f} s, {here}.")

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


def _kits(plan: Path) -> Path:
    """Find the kits: the plan is in the server's directory, or beside all of them."""
    return plan.resolve().parent.parent if (plan.parent / "kit").is_dir() else plan.parent / "kits"


def _need_nvflare() -> None:
    from importlib.util import find_spec

    if find_spec("nvflare") is None:
        raise FedtailorError(f"Real sites need NVFlare: install it with {install_command('nvflare')}.")


def _line(text: str) -> None:
    """Print a line with the time."""
    say(f"{time.strftime('%H:%M:%S')} {visible(text)}")

"""The driver of a federation: it starts the server, submits jobs and watches them until all rounds are done.

NVFlare lets no site into a running job, ends a whole job with one of its processes, and forgets a job with its
server. So a job is only a stretch of a run: after any of these the next one goes on from the checkpoint. Whether the
run is done is read from its directory alone.
"""

import json
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedtailor._common.errors import FedtailorError, listed
from fedtailor._common.files import make_directory
from fedtailor.sites.coordinator import STATUS
from fedtailor.sites.nvflare.admin import Admin, Unreachable
from fedtailor.sites.nvflare.job import PLAN, RUN, read_note, write_job
from fedtailor.sites.nvflare.launch import check_kit, launch, trim
from fedtailor.sites.nvflare.processes import alone, end
from fedtailor.sites.plan import read_plan

LOOK = 0.5  # seconds from look to look at the run directory
ASK = 3.0  # and from question to question to the server
START = 120.0  # seconds for a submitted job to start
END = 60.0  # and for one to end
SAVE = 10.0  # and to save its last round, which is all that Ctrl-C waits for
FRUITLESS = 5  # jobs in a row without a finished round: something is wrong
JOB = "fedtailor"  # the name of a job's folder
LOG, LOCK = "nvflare.log", "run.lock"  # in the server's kit


class Driver:
    """Sees a federation through. `tell` gets a line when something happens, `show` is called again and again."""

    def __init__(
        self,
        plan_file: Path,
        run: Path,
        server_kit: Path,
        admin_kit: Path,
        tell: Callable[[str], None],
        show: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = read_plan(plan_file)
        self.plan_file, self.directory, self.kit = plan_file, run, server_kit
        self.tell, self.show = tell, show
        check_kit(server_kit, "server", self.plan.server)
        check_kit(admin_kit, "admin", self.plan.admin)
        self._admin = Admin(admin_kit, self.plan.admin)
        self._server: subprocess.Popen[bytes] | None = None
        self._own = self._reached = False  # whether the server is ours, and has answered since it was started
        self._job: str | None = None

    @property
    def phase(self) -> str:
        """The phase of the run, as its coordinator says: `done`, or `incomplete` if a site has no model yet."""
        with suppress(OSError, ValueError, KeyError):
            if (self.directory / "result.json").is_file():
                return str(json.loads((self.directory / STATUS).read_text(encoding="utf-8"))["phase"])
        return ""

    @property
    def rounds(self) -> int:
        """The rounds that are done."""
        file = self.directory / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def run(self) -> None:
        """Run all rounds that are left. However it ends, what was started is ended, and the same call goes on."""
        with alone(self.kit / LOCK, f"{self.plan.name} is being run already: by another `fedtailor deploy run` here."):
            self._run()

    def _run(self) -> None:
        make_directory(self.directory)
        fruitless = 0
        finished = self.phase == "done"
        try:
            while not finished:
                self._serve()
                sites, before = self._gather(), self.rounds
                self._run_job(sites)
                finished = self.phase in ("done", "incomplete")
                fruitless = 0 if self.rounds > before else fruitless + 1
                if fruitless == FRUITLESS and not finished:
                    raise FedtailorError(
                        f"No round was finished in {FRUITLESS} jobs in a row: {self.kit / LOG} says what happened."
                    )
        finally:
            self._close()

    def _serve(self) -> None:
        """Start the server, unless it runs already."""
        if self._server and self._server.poll() is None:
            return
        if self._own and not self._reached:
            raise FedtailorError(f"The server does not start: {self.kit / LOG} says why.")
        if not self._own and _listens(self.plan.port):
            self.tell("The server runs already.")
            return
        environment = {PLAN: str(self.plan_file.resolve()), RUN: str(self.directory.resolve())}
        self._server = launch("server", self.plan.server, self.kit, self.kit / LOG, **environment)
        self.tell("The server was started again." if self._own else f"The server listens on port {self.plan.port}.")
        self._own, self._reached = True, False

    def _gather(self) -> list[str]:
        """Wait for the sites: for all of them before the first round, later as long as for a site's work."""
        begun = self.rounds > 0
        patience = self.plan.deadline if begun and self._reached else self.plan.join
        deadline, told = time.monotonic() + patience, [""]
        while True:
            self._look()
            present, why = self._connected()
            missing = [site for site in self.plan.sites if site not in present]
            if not missing:
                return present
            if time.monotonic() > deadline:
                break
            if missing != told:
                told = missing
                self.tell(f"Waiting for {listed(missing)}.")
            if self._own:
                self._serve()
            time.sleep(1.0)
        if why:
            raise FedtailorError(f"The server cannot be reached ({why}): {self.kit / LOG} says more.")
        if present and begun and self.plan.terms().on_failure == "skip":
            self.tell(f"The run goes on without {listed(missing)}.")
            return present
        raise FedtailorError(
            f"{listed(missing)} did not connect within {patience:g} s: start `fedtailor site start` there, and then "
            f"this command again, which goes on after round {self.rounds}."
        )

    def _connected(self) -> tuple[list[str], str]:
        """The sites of the plan that are connected; or, in words, why this is not known."""
        try:
            present = self._admin.sites()
        except Unreachable as error:
            return [], str(error)
        self._reached = True
        return [site for site in self.plan.sites if site in present], ""

    def _run_job(self, sites: Sequence[str]) -> None:
        """Submit a job and watch it to its end."""
        try:
            for old in self._admin.jobs():  # of a driver that was killed
                self._end(old)
            with TemporaryDirectory() as folder:
                write_job(Path(folder) / JOB, self.plan.name, sites)
                self._job = self._admin.submit(Path(folder) / JOB)
        except Unreachable as error:
            self.tell(f"The job was not submitted: {error}.")
            return
        reason = self._watch(self._job, sites)
        if reason:
            self.tell(f"After round {self.rounds}: {reason}. The run goes on from its checkpoint.")
        self._end(self._job, gently=not reason)
        self._job = None

    def _watch(self, job: str, sites: Sequence[str]) -> str:
        """Watch a job until it ends or must end; say why. The empty text: all rounds are done."""
        submitted, asked = time.monotonic(), time.monotonic()
        took_part, gone = set[str](), set[str]()
        while True:
            self._look()
            note = read_note(self.directory)
            state = note.state if note and note.job == job else ""
            if note and state in ("refused", "failed"):
                raise FedtailorError(note.reason)
            if note and state == "interrupted":
                return note.reason
            if state == "finished":
                return ""
            if self._server and self._server.poll() is not None:
                return "the server's process ended"
            if not state and time.monotonic() - submitted > START:
                return self._not_started()
            if time.monotonic() - asked < ASK:
                continue
            asked = time.monotonic()
            try:
                if self._admin.ended(job):
                    return self._ended_by_flare(job)
                back = [site for site in self._connected()[0] if site not in sites]
                now = self._admin.at_work(job)
            except Unreachable:
                continue
            took_part |= {site for site in now if now[site]}
            before, gone = gone, {site for site in took_part if now.get(site) is False}
            if returned := back or sorted(gone & before):  # twice: at its end, a job ends at the sites first
                return f"{listed(returned)} came back"

    def _ended_by_flare(self, job: str) -> str:
        """Say why a job ended of which its controller has not said so."""
        time.sleep(LOOK)
        note = read_note(self.directory)
        if not note or note.job != job:
            return self._not_started()
        if note.state in ("refused", "failed"):
            raise FedtailorError(note.reason)
        return "" if note.state == "finished" else note.reason or "a process of the job ended"

    def _not_started(self) -> str:
        if not self._own:
            raise FedtailorError(
                f"The server that runs already does not write to {self.directory}: end it, or start it with {RUN} set "
                f"to this directory and {PLAN} to the plan."
            )
        return "the job did not start"

    def _end(self, job: str, gently: bool = False) -> None:
        """Have a job ended, or let it end by itself, and wait for it."""
        deadline = time.monotonic() + END
        if not gently:
            with suppress(Unreachable):
                self._admin.abort(job)  # once: NVFlare kills a job that is aborted twice
        while time.monotonic() < deadline and not (self._server and self._server.poll() is not None):
            self._look()
            with suppress(Unreachable):
                if self._admin.ended(job):
                    return

    def _look(self) -> None:
        self.show()
        trim(self.kit / LOG)
        time.sleep(LOOK)

    def _close(self) -> None:
        """End what was started. The job is ended first, so that its last round is saved and sites hear of it."""
        if self._job and not (self._server and self._server.poll() is not None):
            with suppress(Unreachable):
                self._admin.abort(self._job)
            deadline = time.monotonic() + SAVE
            while (note := read_note(self.directory)) and note.state == "running" and time.monotonic() < deadline:
                time.sleep(LOOK)
        self._admin.close()
        if self._server:
            end(self._server)


def _listens(port: int) -> bool:
    """Find out whether something on this machine listens on a port."""
    with suppress(OSError), socket.create_connection(("localhost", port), 1.0):
        return True
    return False

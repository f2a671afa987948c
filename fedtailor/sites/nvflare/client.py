"""A site's connection: NVFlare's client in the foreground, started again when it dies, told in plain lines."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedtailor._common.files import make_directory
from fedtailor.sites.nvflare.job import SITE
from fedtailor.sites.nvflare.launch import check_kit, launch, trim
from fedtailor.sites.nvflare.processes import alone, end
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import LOG, SiteFile, read_site

LOOK = 0.3  # seconds from look to look at the logs
PAUSE = 5.0  # seconds before NVFlare's client is started again
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\S+ ")  # the time of a line in the log
OUTPUT, LOCK = "nvflare.log", "start.lock"  # in the site's directory
REFUSED = (
    "The server refuses this site: its certificate is revoked, or the plan no longer names it. Ask the coordinator."
)
EVENTS = (  # in NVFlare's output, and in plain words
    (re.compile(rb"Successfully registered client"), "Connected to {server}:{port}."),
    (re.compile(rb"Launch the job in process ID"), "A job has begun."),
    (re.compile(rb"could not register to server|certificate of \S+ is revoked"), REFUSED),
    (re.compile(rb"cannot send to 'server'"), "The server is not reached; trying again."),
    (re.compile(rb"SSLCertVerificationError|certificate verify failed"), "The server's certificate was not accepted."),
)


# Of the lines of the site's own log, those that say nothing of its data. All others may have the text of a fault.
PLAIN = re.compile(
    r"Round \d+ is done\.|Joined the run [\w-]+ as number \d+: \S+\.|Wrote the model of round \d+: .*\.safetensors\."
)
FAULT = f"A fault: its text is in {LOG}."


def stay_connected(path: Path, tell: Callable[[str], None], plain: bool = False) -> None:
    """Take part in a federation with what a site's file says, until Ctrl-C. `plain`: tell no text of a fault."""
    file = read_site(path)
    plan = file.read_plan(names=False)
    check_kit(file.path(file.kit), "client", file.name)
    make_directory(file.private)
    with alone(file.private / LOCK, f"{file.name} takes part already: another `fedtailor site start` runs here."):
        tell(f"{file.name} takes part in {plan.name}. What happens is in {file.private / LOG}; Ctrl-C ends it.")
        while True:
            _connect(path, file, plan, tell, plain)
            time.sleep(PAUSE)


def _connect(path: Path, file: SiteFile, plan: Plan, tell: Callable[[str], None], plain: bool) -> None:
    """Run NVFlare's client until it ends, and tell what happens."""
    log = file.private / OUTPUT
    output, news, last = Follow(log), Follow(file.private / LOG), ""
    tell(f"Connecting to {plan.server}:{plan.port} …")
    process = launch("client", file.name, file.path(file.kit), log, **{SITE: str(path.resolve())})
    running = True
    try:
        while running:
            time.sleep(LOOK)
            running = process.poll() is None  # what it said last is told too
            for line in output.lines():
                for pattern, words in EVENTS:
                    if pattern.search(line) and words != last:
                        last = words
                        tell(words.format(server=plan.server, port=plan.port))
            for line in news.lines():
                if said := _said(line.decode(errors="replace"), plain):
                    tell(said)
            trim(log)
    finally:
        end(process)
    tell(f"NVFlare's client ended (code {process.returncode}, see {log}); it is started again in {PAUSE:g} s.")


def _said(line: str, plain: bool) -> str:
    """A line of the site's own log, as it is told; nothing of the lines after the first of a fault's text."""
    text, stamped = STAMP.subn("", line)
    if not plain or (stamped and PLAIN.fullmatch(text)):
        return text
    return FAULT if stamped else ""


class Follow:
    """The lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = path.stat().st_size if path.is_file() else 0

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines that were added since the last look."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            if file.seek(0, 2) < self._end:  # begun anew
                self._end = 0
            file.seek(self._end)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        yield from whole.splitlines()

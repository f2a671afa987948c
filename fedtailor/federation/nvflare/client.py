"""A site's connection: NVFlare's client in the foreground, started again when it dies, told in plain lines."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedtailor.federation.nvflare.job import SITE
from fedtailor.federation.nvflare.launch import launch
from fedtailor.federation.nvflare.processes import end
from fedtailor.federation.site_file import LOG, SiteFile, read_site
from fedtailor.files import make_directory

LOOK = 0.3  # seconds from look to look at the logs
PAUSE = 5.0  # seconds before NVFlare's client is started again
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\S+ ")  # the time of a line in the log
OUTPUT = "nvflare.log"  # in the site's directory
EVENTS = (  # in NVFlare's output, and in plain words
    (re.compile(rb"Successfully registered client"), "Connected to {server}:{port}."),
    (re.compile(rb"Launch the job in process ID"), "A job has begun."),
    (re.compile(rb"cannot send to 'server'"), "The server is not reached; trying again."),
    (re.compile(rb"SSLCertVerificationError|certificate verify failed"), "The server's certificate was not accepted."),
)


def stay_connected(path: Path, tell: Callable[[str], None]) -> None:
    """Take part in a federation with what a site's file says, until Ctrl-C."""
    file = read_site(path)
    plan, kit = file.read_plan(), file.path(file.kit)
    make_directory(file.private)
    tell(f"{file.name} takes part in {plan.name}. What happens is in {file.private / LOG}; Ctrl-C ends it.")
    news = Follow(file.private / LOG)
    while True:
        tell(f"Connecting to {plan.server}:{plan.port} …")
        process = _start(path, file, kit)
        try:
            output, last = Follow(file.private / OUTPUT, from_start=True), ""
            while process.poll() is None:
                time.sleep(LOOK)
                for line in output.lines():
                    for pattern, words in EVENTS:
                        if pattern.search(line) and words != last:
                            last = words
                            tell(words.format(server=plan.server, port=plan.port))
                for line in news.lines():
                    tell(STAMP.sub("", line.decode(errors="replace")))
        finally:
            end(process)
        tell(f"NVFlare's client ended (code {process.returncode}); it is started again in {PAUSE:g} s.")
        time.sleep(PAUSE)


def _start(path: Path, file: SiteFile, kit: Path) -> "subprocess.Popen[bytes]":
    with open(file.private / OUTPUT, "wb") as log:
        return launch("client", file.name, kit, log, **{SITE: str(path.resolve())})


class Follow:
    """The lines that are added to a file."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._end = 0 if from_start or not path.is_file() else path.stat().st_size

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

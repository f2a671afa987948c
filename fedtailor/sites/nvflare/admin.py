"""NVFlare's admin session in a process of its own, ended when it does not answer in time.

The threads of a session never end once its server has died, and would keep its process alive for ever. `python -m`
this module is that process: questions and answers are lines of JSON on its pipes.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fedtailor._common.errors import brief
from fedtailor.sites.nvflare.processes import end_with_parent

MODULE = "fedtailor.sites.nvflare.admin"
CONNECT = 15.0  # seconds to reach the server
ANSWER = 60.0  # seconds for an answer


class Unreachable(Exception):
    """The server did not answer, or refused."""


class Admin:
    """The admin of a federation, with its start-up kit. Every wait has a deadline."""

    def __init__(self, kit: Path, user: str) -> None:
        self._command = [sys.executable, "-m", MODULE, str(kit.resolve()), user]
        self._process: subprocess.Popen[bytes] | None = None

    def sites(self) -> list[str]:
        """The sites that are connected."""
        return list(self._ask("sites"))

    def jobs(self) -> list[str]:
        """The jobs that run."""
        return list(self._ask("jobs"))

    def at_work(self, job: str) -> dict[str, bool]:
        """For each site that says so, whether it takes part in a job."""
        return dict(self._ask("at_work", job))

    def submit(self, folder: Path) -> str:
        """Submit a job; return its id."""
        return str(self._ask("submit", str(folder.resolve())))

    def ended(self, job: str) -> bool:
        """Tell whether NVFlare takes a job for ended."""
        return str(self._ask("status", job)).startswith("FINISHED")

    def abort(self, job: str) -> None:
        """Have a job ended."""
        self._ask("abort", job)

    def close(self) -> None:
        """End the session's process."""
        if process := self._process:
            self._process = None
            process.kill()
            process.communicate()

    def _ask(self, *question: str) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(_line(self._process.stdout.fileno(), ANSWER))
        except (OSError, ValueError, EOFError, TimeoutError) as error:
            self.close()
            raise Unreachable("the server does not answer") from error
        if "error" in answer:
            self.close()
            raise Unreachable(answer["error"])
        return answer["answer"]


def _line(pipe: int, seconds: float) -> bytes:
    """Read a line from a pipe within some seconds."""
    line, end = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(end - time.monotonic()):
                raise TimeoutError
            part = os.read(pipe, 65536)
            if not part:
                raise EOFError
            line += part
    return line


def _answer(session: Any, kind: str, *about: str) -> Any:
    if kind == "sites":
        return [client.name for client in session.get_connected_client_list()]
    if kind == "jobs":
        return [job.job_id for job in session.get_system_info().job_info]
    if kind == "at_work":
        found: dict[str, bool] = {}
        for row in session.get_client_job_status() or []:
            if row.get("status") not in ("error", "no_reply"):
                name = row["client_name"]
                found[name] = found.get(name, False) or row.get("job_id") == about[0]
        return found
    if kind == "submit":
        return session.submit_job(about[0])
    if kind == "status":
        return session.get_job_status(about[0])
    return session.abort_job(about[0])


def main() -> None:
    """Answer questions until there are no more."""
    kit, user = sys.argv[1:]
    questions, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NVFlare prints
    end_with_parent()
    os.chdir(kit)
    session = None
    for line in questions:
        try:
            if session is None:
                from nvflare.fuel.flare_api.flare_api import new_secure_session

                session = new_secure_session(user, kit, timeout=CONNECT, auto_login_max_tries=1)
            found = {"answer": _answer(session, *json.loads(line))}
        except Exception as error:
            found = {"error": brief(error)}
        print(json.dumps(found), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

"""The NVFlare job of a federation: a few names and intervals. No code and no paths are in it.

Where plan, run directory and data are is known to the processes that were started there, by their environment.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedtailor._common.files import is_regular, make_directory, read_bytes, write_atomically

TASK = "letter"  # the one kind of task, and the name of its content
PLAN, RUN, SITE = "FEDTAILOR_PLAN", "FEDTAILOR_RUN", "FEDTAILOR_SITE"  # environment variables
NOTE = "job.json"  # in the run directory
POLL = 0.2  # seconds between a site's questions for work: NVFlare's default of 2 is most of a round


class Note(BaseModel):
    """The outcome of the last job, as its controller wrote it down. NVFlare's own status is not to be relied on."""

    job: str
    state: str  # running, interrupted, refused, failed, finished
    reason: str = ""

    def write(self, run: Path) -> None:
        """Write it into the run directory."""
        make_directory(run)
        write_atomically(run / NOTE, self.model_dump_json(indent=2), durable=False)


def read_note(run: Path) -> Note | None:
    """Read what came of the last job, if anything was written down."""
    if not is_regular(run / NOTE):
        return None
    try:
        return Note.model_validate_json(read_bytes(run / NOTE))
    except ValidationError:
        return None


def write_job(folder: Path, name: str, sites: Sequence[str]) -> None:
    """Write the folder of a job for these sites."""
    here = __package__
    settings = folder / "app" / "config"
    make_directory(settings)
    _write(
        folder / "meta.json",
        name=name,
        resource_spec={},
        min_clients=1,
        mandatory_clients=list(sites),
        deploy_map={"app": ["server", *sites]},
    )
    _write(
        settings / "config_fed_server.json",
        format_version=2,
        server={"task_request_interval": POLL},
        dead_client_grace_period=5.0,
        dead_client_check_lead_time=2.0,
        task_data_filters=[],
        task_result_filters=[],
        components=[],
        workflows=[{"id": "fedtailor", "path": f"{here}.controller.FedtailorController", "args": {}}],
    )
    _write(
        settings / "config_fed_client.json",
        format_version=2,
        task_data_filters=[],
        task_result_filters=[],
        components=[],
        executors=[{"tasks": [TASK], "executor": {"path": f"{here}.executor.FedtailorExecutor", "args": {}}}],
    )


def _write(path: Path, **content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=2), durable=False)

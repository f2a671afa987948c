"""Weights & Biases as a tracker."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor._common.errors import brief
from fedtailor.engines.trackers import TrackedRun, Tracker

if TYPE_CHECKING:
    import wandb

PATIENCE = 30  # seconds for the server's answer when a run begins


class WandB(Tracker):
    """Runs in the project WANDB_PROJECT, by default `fedtailor`; those of a study are a group, with the study's own run
    in it. WANDB_MODE and WANDB_DIR count. If nobody is logged in, or the server is away, runs are written offline."""

    def __init__(self) -> None:
        self._runs: dict[str, wandb.Run] = {}
        self._offline = ""  # why, once it is known

    def start(self, run: TrackedRun) -> str:
        import wandb

        number = run.id or secrets.token_hex(4)
        asked = "WANDB_MODE" in os.environ or wandb.api.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        if not asked:
            self._say_offline(run, "nobody is logged in")
        try:
            self._runs[number] = self._begun(run, number, "offline" if self._offline else os.environ.get("WANDB_MODE"))
        except wandb.Error as error:
            if self._offline:
                raise
            self._say_offline(run, brief(error))
            number = run.id or secrets.token_hex(4)  # the other one counts as in use
            self._runs[number] = self._begun(run, number, "offline")
        return number

    def _say_offline(self, run: TrackedRun, why: str) -> None:
        if not self._offline:
            place = Path(os.environ.get("WANDB_DIR") or ".") / "wandb/offline-run-*"
            run.notes.append(f"Weights & Biases is offline ({why}): `wandb sync {place}` sends later what it has.")
            self._offline = why

    def _begun(self, run: TrackedRun, number: str, mode: Any) -> "wandb.Run":
        import wandb

        quiet = {} if "WANDB_SILENT" in os.environ else {"silent": True}
        patient = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": PATIENCE}
        top = run.study.id if run.study else number
        return wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else "fedtailor",
            id=number,
            name=run.name,
            config=None if run.id else run.parameters,
            group=f"{run.study.name if run.study else run.name}-{top}" if run.study or run.is_study else None,
            job_type="study" if run.is_study else "run",
            mode=mode,
            dir=os.environ.get("WANDB_DIR"),  # as it is now: W&B reads its environment once
            resume="allow" if run.id else None,
            reinit="create_new",
            settings=wandb.Settings(console="off", **quiet, **patient),
        )

    def log(self, run: TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        if round > run.logged:  # steps only grow
            self._runs[run.id].log(dict(metrics), step=round)

    def save(self, run: TrackedRun, name: str, files: Sequence[Path]) -> None:
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", f"{run.name}-{run.id}-{name}")[-128:], type=name)
        for file in files:
            artifact.add_file(str(file))
        self._runs[run.id].log_artifact(artifact)

    def finish(self, run: TrackedRun, complete: bool) -> None:
        self._runs.pop(run.id).finish(exit_code=0 if complete else 1)

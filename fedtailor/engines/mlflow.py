"""MLflow as a tracker."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.engines.trackers import TrackedRun, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

LONGEST = 6000  # characters of a parameter's value
MOST = 100  # parameters in a request


class MLflow(Tracker):
    """Runs in the store that MLFLOW_TRACKING_URI or `mlflow.set_tracking_uri` says, by default `mlflow.db` and `mlruns`
    here; in the experiment that MLFLOW_EXPERIMENT_NAME or `mlflow.set_experiment` says, by default `fedtailor`. The
    runs of a study are nested in it."""

    @cached_property
    def client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient()

    @cached_property
    def experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None and (number := os.environ.get("MLFLOW_EXPERIMENT_ID")):  # of `set_experiment`, too
            return number
        found = self.client.get_experiment_by_name(name or "fedtailor")
        return str(found.experiment_id if found else self.client.create_experiment(name or "fedtailor"))

    def start(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        if run.id:
            self.client.update_run(run.id, status="RUNNING")
            return run.id
        tags = {"mlflow.parentRunId": run.study.id} if run.study else {}
        number = str(self.client.create_run(self.experiment, run_name=run.name, tags=tags).info.run_id)
        given = [Param(_key(name), str(value)[:LONGEST]) for name, value in run.parameters.items()]
        for first in range(0, len(given), MOST):
            self.client.log_batch(number, params=given[first : first + MOST])
        return number

    def log(self, run: TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if round > run.logged:  # a step that is logged twice would be there twice
            now = int(time.time() * 1000)
            self.client.log_batch(run.id, metrics=[Metric(_key(n), value, now, round) for n, value in metrics.items()])

    def save(self, run: TrackedRun, name: str, files: Sequence[Path]) -> None:
        for file in files:
            self.client.log_artifact(run.id, str(file), name)

    def finish(self, run: TrackedRun, complete: bool) -> None:
        self.client.set_terminated(run.id, "FINISHED" if complete else "FAILED")


def _key(name: str) -> str:
    return re.sub(r"[^\w. /-]", "_", name)

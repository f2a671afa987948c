"""NVFlare's server side: the coordinator, over the letters of a job."""

import os
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedtailor._common.errors import FedtailorError, brief
from fedtailor.sites.coordinator import Coordinator
from fedtailor.sites.nvflare.channel import FlareChannel, Interrupted
from fedtailor.sites.nvflare.job import PLAN, RUN, Note
from fedtailor.sites.nvflare.processes import end_with_parent
from fedtailor.sites.plan import read_plan

CHECK = 0.1  # seconds from look to look at the tasks


class FedtailorController(Controller):  # type: ignore[misc]
    """Runs the rounds that are left. What came of it is written down in the run directory, for the driver."""

    def __init__(self) -> None:
        super().__init__(task_check_period=CHECK)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: all work is in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: what was begun is dropped, and the run goes on from its checkpoint."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop an answer that comes after its deadline."""
        self.log_info(fl_ctx, f"A late answer of {client.name} was dropped.")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the federation to its end, or until the job cannot go on."""
        end_with_parent()
        run, job = Path(os.environ[RUN]), fl_ctx.get_job_id()
        Note(job=job, state="running").write(run)
        try:
            Coordinator(read_plan(Path(os.environ[PLAN])), run, FlareChannel(self, fl_ctx, abort_signal)).run()
        except Interrupted as reason:
            Note(job=job, state="interrupted", reason=str(reason)).write(run)
        except FedtailorError as error:
            Note(job=job, state="refused", reason=str(error)).write(run)
        except Exception as error:
            Note(job=job, state="failed", reason=brief(error)).write(run)
            raise
        else:
            Note(job=job, state="finished").write(run)

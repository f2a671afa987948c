"""NVFlare's server side: the coordinator, over the letters of a job."""

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedtailor._common.errors import FedtailorError, brief, listed
from fedtailor.sites.coordinator import Coordinator
from fedtailor.sites.nvflare.job import PLAN, RUN, TASK, Note
from fedtailor.sites.nvflare.processes import end_with_parent
from fedtailor.sites.plan import read_plan

CHECK = 0.1  # seconds from look to look at the tasks
PATIENCE = 0.2  # seconds from look to look at NVFlare's wish to end the job
ABSENT = "it is not connected"
Answer = tuple[str, bytes | str | None]  # None: the site was lost


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


class Interrupted(KeyboardInterrupt):
    """The job cannot go on, but the run can, with another job: as after Ctrl-C, the open round counts for nothing."""


class FlareChannel:
    """The server's way to the sites of one job: a `send` for each. (A `broadcast` gives the first letter to all.)"""

    def __init__(self, controller: Controller, context: FLContext, abort: Signal) -> None:
        self._controller, self._context, self._abort = controller, context, abort

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        """Send each site its letter; yield every site once, with its answer, or in words why there is none.

        A site that was in the job and is gone ends it: NVFlare never lets it in again. The next job has it, if it is
        back by then.
        """
        answers: SimpleQueue[Answer] = SimpleQueue()
        present = {client.name for client in self._context.get_engine().get_clients()}
        tasks = {
            site: self._send(site, letter, deadline, answers) for site, letter in letters.items() if site in present
        }
        try:
            for site in letters:
                if site not in present:
                    yield site, ABSENT
            while tasks:
                if self._abort.triggered:
                    gone = [site for site in tasks if self._controller.get_client_disconnect_time(site)]
                    raise Interrupted(f"{listed(gone)} left" if gone else "a process of the job ended")
                try:
                    site, answer = answers.get(timeout=PATIENCE)
                except Empty:
                    continue
                if tasks.pop(site, None) is None:
                    continue
                if answer is None:
                    raise Interrupted(f"{site} left")
                yield site, answer
        finally:
            for task in tasks.values():
                self._controller.cancel_task(task)

    def _send(self, site: str, letter: bytes, deadline: float | None, answers: SimpleQueue[Answer]) -> Task:
        task = Task(
            name=TASK,
            data=Shareable({TASK: letter}),
            timeout=0 if deadline is None else max(1, math.ceil(deadline)),
            result_received_cb=partial(_received, answers),
            task_done_cb=partial(_done, answers),
        )
        self._controller.send(task, self._context, targets=[site])
        return task


def _received(answers: SimpleQueue[Answer], client_task: ClientTask, fl_ctx: FLContext) -> None:
    """Hand on the answer of a site."""
    result, client_task.result = client_task.result, None
    code, letter = result.get_return_code(), result.get(TASK)
    if code == ReturnCode.OK and isinstance(letter, bytes):
        answers.put((client_task.client.name, letter))
    elif code == ReturnCode.TASK_ABORTED:  # the job is being ended, at the sites first
        answers.put((client_task.client.name, None))
    else:
        failed = code == ReturnCode.EXECUTION_EXCEPTION
        answers.put((client_task.client.name, "its worker process failed" if failed else "it sent no letter"))


def _done(answers: SimpleQueue[Answer], task: Task, fl_ctx: FLContext) -> None:
    """Say why there is no answer, if there is none."""
    (site,) = task.targets
    if task.completion_status == TaskCompletionStatus.CLIENT_DEAD:
        answers.put((site, None))
    elif task.completion_status == TaskCompletionStatus.TIMEOUT:
        answers.put((site, f"it did not answer within {task.timeout} s"))
    elif task.completion_status != TaskCompletionStatus.OK:
        answers.put((site, "its task was ended"))

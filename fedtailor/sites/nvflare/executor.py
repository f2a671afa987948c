"""NVFlare's side of a site: it passes letters to the site's worker process, and answers back."""

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedtailor.sites.nvflare.job import TASK
from fedtailor.sites.nvflare.processes import end_with_parent
from fedtailor.sites.nvflare.worker import Worker, WorkerFailed


class FedtailorExecutor(Executor):  # type: ignore[misc]
    """Has letters answered. Nothing of the site is in this process, and no text of a fault leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self._worker = Worker()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start and end the worker process with the job, and end the job with NVFlare's client."""
        if event_type == EventType.START_RUN:
            end_with_parent()
            self._worker.start()
        elif event_type == EventType.END_RUN:
            self._worker.close()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Have a letter answered."""
        letter = shareable.get(TASK)
        if task_name != TASK or not isinstance(letter, bytes):
            return make_reply(ReturnCode.BAD_TASK_DATA)
        try:
            return Shareable({TASK: self._worker.answer(letter, lambda: bool(abort_signal.triggered))})
        except WorkerFailed as failure:
            self.log_error(fl_ctx, str(failure))
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

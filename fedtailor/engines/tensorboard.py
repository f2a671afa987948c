"""TensorBoard as a tracker: the metrics of a run, in its directory."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from fedtailor.engines.trackers import TrackedRun, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of a run directory. There are none of a study, and no files in them."""

    needs_directory: ClassVar[bool] = True

    def __init__(self) -> None:
        self._writers: dict[str, SummaryWriter] = {}

    def start(self, run: TrackedRun) -> str:
        return str(run.directory)

    def log(self, run: TrackedRun, round: int, metrics: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if run.id not in self._writers:  # a resumed run repeats rounds: what was written of them is void
            writer = SummaryWriter(f"{run.id}/tensorboard", purge_step=run.finished + 1)
            self._writers[run.id] = writer
            if not run.logged:
                rows = [f"| {name} | {value} |" for name, value in run.parameters.items()]
                writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *rows]))
        for name, value in metrics.items():
            self._writers[run.id].add_scalar(name, value, round)
        self._writers[run.id].flush()

    def finish(self, run: TrackedRun, complete: bool) -> None:
        if run.id in self._writers:
            self._writers.pop(run.id).close()

"""The metrics of every round for TensorBoard, beside the run's own record."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor.server.loop import Loop
from fedtailor.server.records import RoundRecord


def check_installed() -> None:
    """Before the run begins, not after its first round."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise FedtailorError(
            f"TensorBoard is not installed: {install_command('tensorboard')}, or leave --tensorboard out."
        ) from None


@contextmanager
def scalars(run: Loop) -> Iterator[Callable[[RoundRecord], None]]:
    """Yield a function that writes a round's metrics under the names of the record. A resumed run goes on after its
    checkpoint: what was written of later rounds is void."""
    if run.directory is None:
        raise FedtailorError("TensorBoard's files need a run directory: give --out (out= in Python).")
    from torch.utils.tensorboard import SummaryWriter

    with closing(SummaryWriter(run.directory.path / "tensorboard", purge_step=run.finished + 1)) as writer:

        def write(record: RoundRecord) -> None:
            for name, value in record.flat().items():
                if isinstance(value, int | float) and name != "round":
                    writer.add_scalar(name, value, record.round)
            writer.add_scalar("participants", len(record.participants), record.round)
            writer.flush()

        yield write

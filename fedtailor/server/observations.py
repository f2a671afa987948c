"""The diagnostics of a method (PGFed's A, pFedMB's α, FedACS's similarities), recorded within bounds."""

from pathlib import Path

from safetensors.torch import load_file, save

from fedtailor.errors import warn
from fedtailor.files import write_atomically
from fedtailor.messages import Message, State, copied, message_bytes


class Observations:
    """Named tensors by round, in a directory or in memory, up to a number of bytes altogether."""

    def __init__(self, directory: Path | None, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self._memory: dict[int, State] = {}
        self._full = False

    def put(self, round: int, tensors: Message) -> None:
        """Record a round, or warn once that there is no more room."""
        if not tensors or self._full:
            return
        if self._size() + message_bytes(tensors) > self.limit:
            self._full = True
            warn(
                f"the method's diagnostics are recorded up to round {round - 1} only: it has reached the limit of "
                f"{self.limit / 1e6:g} MB (observe_limit, observe_every)."
            )
        elif self.directory is None:
            self._memory[round] = copied(tensors)
        else:
            self.directory.mkdir(exist_ok=True)
            write_atomically(self._file(round), save(copied(tensors)))

    def get(self, round: int) -> State:
        """Read what was recorded of a round; it is empty if nothing was."""
        if self.directory is None:
            return self._memory.get(round, {})
        return load_file(self._file(round)) if self._file(round).exists() else {}

    def rounds(self) -> list[int]:
        """List the rounds that have a record."""
        if self.directory is None:
            return sorted(self._memory)
        return sorted(int(path.stem.removeprefix("round-")) for path in self.directory.glob("round-*.safetensors"))

    def cut(self, round: int) -> None:
        """Forget what was recorded after this round."""
        for later in (number for number in self.rounds() if number > round):
            self._memory.pop(later, None)
            if self.directory is not None:
                self._file(later).unlink()

    def _size(self) -> int:
        if self.directory is None:
            return sum(message_bytes(tensors) for tensors in self._memory.values())
        return sum(path.stat().st_size for path in self.directory.glob("round-*.safetensors"))

    def _file(self, round: int) -> Path:
        assert self.directory is not None
        return self.directory / f"round-{round}.safetensors"

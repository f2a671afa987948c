"""The diagnostics of a method (PGFed's A, pFedMB's α, FedACS's similarities), recorded within bounds."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedtailor._common.errors import warn
from fedtailor._common.files import (
    fsync_directory,
    fsync_file,
    is_regular,
    make_directory,
    read_bytes,
    remove,
    write_atomically,
    writing,
)
from fedtailor.messages import Message, State, copied, frame, message_bytes, unframe

NAME = re.compile(r"round-([1-9][0-9]{0,17})\.safetensors(\.tmp)?")


@dataclass
class Observations:
    """Named tensors by round, in a directory or in memory, up to a number of bytes altogether."""

    directory: Path | None
    limit: int
    _memory: dict[int, State] = field(default_factory=dict)
    _new: list[Path] = field(default_factory=list)  # files that a power cut could take
    _full: bool = False
    _bytes: int | None = None  # recorded until now, once they are counted

    def put(self, round: int, tensors: Message) -> None:
        """Record a round, or warn once that there is no more room."""
        if not tensors or self._full:
            return
        content = b"" if self.directory is None else frame(tensors, sender="method", round=round)
        if self._bytes is None:
            self._bytes = sum(path.stat().st_size for _, path in self._files())
        size = self._bytes + (len(content) or message_bytes(tensors))
        if size > self.limit:
            self._full = True
            warn(
                f"the method's diagnostics are recorded up to round {round - 1} only: it has reached the limit of "
                f"{self.limit / 1e6:g} MB (observe_limit, observe_every)."
            )
            return
        self._bytes = size
        if self.directory is None:
            self._memory[round] = copied(tensors)
        else:
            make_directory(self.directory)
            write_atomically(self._file(round), content, durable=False)
            self._new.append(self._file(round))

    def sync(self) -> None:
        """Have the system write what was recorded to the disk itself."""
        for path in self._new:
            fsync_file(path)
        if self._new and self.directory is not None:
            with writing(self.directory):
                fsync_directory(self.directory)
        self._new = []

    def get(self, round: int) -> State:
        """Read what was recorded of a round; it is empty if nothing was."""
        if self.directory is None:
            return self._memory.get(round, {})
        path = self._file(round)
        return unframe(read_bytes(path), str(path), sender="method", round=round) if path.exists() else {}

    def rounds(self) -> list[int]:
        """List the rounds that have a record."""
        if self.directory is None:
            return sorted(self._memory)
        return sorted(round for round, path in self._files() if path == self._file(round))

    def cut(self, round: int) -> None:
        """Forget what was recorded after this round, and what a killed run left half written."""
        self._memory = {number: tensors for number, tensors in self._memory.items() if number <= round}
        self._bytes = None if self.directory else sum(map(message_bytes, self._memory.values()))
        for number, path in list(self._files()):
            if number > round or path != self._file(number):
                remove(path)

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield the files that we have written, temporary ones too, with their rounds."""
        if self.directory is not None and self.directory.is_dir():
            for path in self.directory.iterdir():
                if (named := NAME.fullmatch(path.name)) and is_regular(path):
                    yield int(named[1]), path

    def _file(self, round: int) -> Path:
        assert self.directory is not None
        return self.directory / f"round-{round}.safetensors"

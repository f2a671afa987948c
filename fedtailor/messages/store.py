"""Named tensors by number and version, in memory or on disk: what a site keeps of itself, and a server of its clients.

A new version is proposed first and becomes current when it is accepted. On disk every version is a file of its own,
written under a temporary name and renamed, so a process can be killed at any instant. `save` makes the current versions
durable, and `prune` removes what they replaced, once whoever counts on them has written that down.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import (
    fsync_directory,
    fsync_file,
    fsync_files,
    is_regular,
    make_directory,
    read_bytes,
    remove,
    write_atomically,
    writing,
)
from fedtailor.messages import NEVER, State, frame, unframe


class StateLost(FedtailorError):
    """The state of a version that somebody counts on is not here."""


class Store:
    """States by number. `current` has the version of each: the round that made it; a number without one is empty.

    Without a directory nothing is ever saved. With `on_disk`, states are read from files and not held in memory.
    """

    def __init__(
        self, directory: Path | None, owner: str, on_disk: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        if on_disk and directory is None:
            raise FedtailorError("States on disk need a run directory: give --out (out= in Python).")
        self.directory, self.owner, self.on_disk, self.device = directory, owner, on_disk, device
        self.current: dict[int, int] = {}
        self._proposed: dict[int, tuple[int, State]] = {}  # empty states here if they are on disk
        self._memory: dict[int, State] = {}
        self._durable: dict[int, int] = {}
        self._changed: set[int] = set()  # what has another version than the durable one, or none there

    def get(self, number: int) -> State:
        """Read the current state; it is empty before the first one was put."""
        if number not in self.current:
            return {}
        return self._memory[number] if not self.on_disk else self._load(number, self.current[number])

    def at(self, number: int, version: int) -> State:
        """Read the state of one version, which becomes the current one.

        A later proposal never counted and is dropped. Refuse if the version is not here.
        """
        proposed, _ = self._proposed.get(number, (NEVER, {}))
        if version == proposed != NEVER:
            self.accept([number])
        elif proposed != NEVER:
            self._drop(number)
        here = self.current.get(number, NEVER)
        if here != version and version == NEVER:
            raise StateLost(f"{self.owner} {number} has a state of round {here} that the server does not know of.")
        if here != version:
            raise StateLost(
                f"The state of round {version} is not here: {self.owner} {number} has lost it, or is another one."
            )
        return self.get(number)

    def recall(self, number: int, version: int) -> None:
        """Make a version current that was proposed, or that is on the disk: after a restart, or if what came after it
        never counted."""
        proposed, _ = self._proposed.get(number, (NEVER, {}))
        if version == proposed != NEVER:
            self.accept([number])
        if version == self.current.get(number, NEVER):
            return
        if version == NEVER:
            self.current.pop(number, None)
            self._memory.pop(number, None)
        elif self.directory is not None and is_regular(self._file(number, version)):
            state = self._load(number, version)
            self.current[number] = version
            if not self.on_disk:
                self._memory[number] = state

    def propose(self, number: int, state: State, version: int) -> int:
        """Keep a new state beside the current one and return its version. An empty one after none leaves no trace."""
        if number in self._proposed:
            self._drop(number)
        if not state and number not in self.current:
            return NEVER
        if self.on_disk:
            self._write(number, state, version)
        self._proposed[number] = (version, {} if self.on_disk else state)
        return version

    def accept(self, numbers: Iterable[int]) -> None:
        """Make what these numbers proposed their current state."""
        for number in numbers:
            if number not in self._proposed:
                continue
            before = self.current.get(number)
            self.current[number], state = self._proposed.pop(number)
            self._changed.add(number)
            if not self.on_disk:
                self._memory[number] = state
            elif before not in (None, self.current[number], self._durable.get(number)):
                remove(self._file(number, before))

    def keep(self, number: int) -> None:
        """Make what this number proposed durable, beside the versions before it."""
        if self.directory is None or number not in self._proposed:
            return
        version, state = self._proposed[number]
        make_directory(self.directory)
        if not self.on_disk:
            self._write(number, state, version)
        fsync_file(self._file(number, version))
        with writing(self.directory):
            fsync_directory(self.directory)

    def forget(self, number: int, keep: set[int]) -> None:
        """Remove all versions of this number from the disk but these."""
        self._sweep({self._file(number, version).name for version in keep} if self.directory else set(), str(number))

    def saved(self, number: int) -> list[int]:
        """List the versions of this number that are on the disk."""
        if self.directory is None or not self.directory.is_dir():
            return []
        mine = re.compile(rf"{self.owner}-{number}-round-([0-9]+)\.safetensors")
        found = [mine.fullmatch(path.name) for path in self.directory.iterdir() if is_regular(path)]
        return sorted(int(match[1]) for match in found if match)

    def put(self, number: int, state: State, version: int) -> None:
        """Propose and accept."""
        self.propose(number, state, version)
        self.accept([number])

    def save(self) -> None:
        """Make the current states durable."""
        if self.directory is None:
            return
        changed = {number: self._file(number, self.current[number]) for number in self._changed}
        if not changed:
            return
        make_directory(self.directory)
        if not self.on_disk:
            for number in changed:
                self._write(number, self._memory[number], self.current[number])
        fsync_files(list(changed.values()))
        with writing(self.directory):
            fsync_directory(self.directory)

    def prune(self) -> None:
        """Remove the files of saved states that are no longer current."""
        for number in self._changed & self._durable.keys():
            if self._durable[number] != self.current[number]:
                remove(self._file(number, self._durable[number]))
        self._durable, self._changed = dict(self.current), set()

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None:
        """Go back to these saved versions. `sweep` removes all other files."""
        if sweep:
            self._sweep({self._file(number, version).name for number, version in versions.items()})
        self._memory = {} if self.on_disk else {number: self._load(number, v) for number, v in versions.items()}
        self.current, self._durable = dict(versions), dict(versions)
        self._proposed, self._changed = {}, set()

    def _drop(self, number: int) -> None:
        version, _ = self._proposed.pop(number)
        if self.on_disk and version not in (self.current.get(number), self._durable.get(number)):
            remove(self._file(number, version))

    def _sweep(self, keep: set[str], number: str = "[0-9]+") -> None:
        if self.directory is None or not self.directory.is_dir():
            return
        mine = re.compile(rf"{self.owner}-{number}-round-[0-9]+\.safetensors(\.tmp)?")
        for path in self.directory.iterdir():
            if mine.fullmatch(path.name) and path.name not in keep and is_regular(path):
                remove(path)

    def _file(self, number: int, version: int | None) -> Path:
        assert self.directory is not None
        return self.directory / f"{self.owner}-{number}-round-{version}.safetensors"

    def _write(self, number: int, state: State, version: int) -> None:
        assert self.directory is not None
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        content = frame(state, sender=f"{self.owner}-{number}", round=version)
        write_atomically(self._file(number, version), content, durable=False)

    def _load(self, number: int, version: int) -> State:
        path = self._file(number, version)
        tensors = unframe(read_bytes(path), str(path), sender=f"{self.owner}-{number}", round=version)
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

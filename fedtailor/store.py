"""The clients' private states and the run's checkpoints: safetensors files under one manifest.

Every file is written under a temporary name and renamed, a client's state under the round that made it. The manifest
names the files that belong together; what it does not name does not count. So a run can be killed at any instant, and
a state becomes current only together with the round that produced it. What a manifest names is on the disk itself
before the manifest is; other files need not be, and a round does not wait for them.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedtailor.errors import FedtailorError
from fedtailor.local.client import Message, State
from fedtailor.site.work import copied

MANIFEST = "manifest.json"
SERVER = "server"  # the key of the server's own state
AT_ONCE = 16  # files of a checkpoint on their way to the disk: it writes them together, many times as fast as in turn


def write_atomically(path: Path, content: bytes | str, lasting: bool = True) -> None:
    """Write a file so that it is there whole or not at all; after a power cut too if it is to be `lasting`."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        if lasting:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def make_last(path: Path) -> None:
    """Have the system write a file to the disk itself."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


class States:
    """Every client's state, in memory or on disk, and the checkpoint that holds them and the server's own.

    A state's key says whose it is: `client-3` is client 3's own, `server-3` what the server keeps of it. Without a
    directory there are no checkpoints. `versions` is the round in which each state was made.
    """

    def __init__(self, directory: Path | None, on_disk: bool = False, device: torch.device | str = "cpu") -> None:
        if on_disk and directory is None:
            raise FedtailorError("States on disk need a run directory: give --out (out= in Python).")
        self.directory, self.on_disk, self.device = directory, on_disk, device
        self.versions: dict[str, int] = {}
        self._memory: dict[str, State] = {}
        self._saved: dict[str, int] = {}  # the versions that the manifest names
        self._changed: set[str] = set()  # what has another version, or none there
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> State:
        """A state: empty before it was first put."""
        if key not in self.versions:
            return {}
        if not self.on_disk:
            return self._memory[key]
        return self._load(self._file(key, self.versions[key]))

    def put(self, key: str, state: State, round: int) -> None:
        """A new state. One that is and was empty leaves no trace."""
        if not state and key not in self.versions:
            return
        before = self.versions.get(key)
        self.versions[key] = round
        self._changed.add(key)
        if not self.on_disk:
            self._memory[key] = state
            return
        write_atomically(self._file(key, round), _bytes(state), lasting=False)
        if before not in (None, round, self._saved.get(key)):
            self._file(key, before).unlink(missing_ok=True)

    def checkpoint(self, round: int, server: Message) -> None:
        """Make the present states and the server's the ones to resume from."""
        if self.directory is None:
            return
        changed = {key: self._file(key, self.versions[key]) for key in self._changed}
        if not self.on_disk:
            for key, file in changed.items():
                write_atomically(file, _bytes(self._memory[key]), lasting=False)
        with ThreadPoolExecutor(AT_ONCE) as at_once:
            list(at_once.map(make_last, changed.values()))
        write_atomically(self._file(SERVER, round), _bytes(server))
        states = dict(sorted(self.versions.items()))
        write_atomically(self.directory / MANIFEST, json.dumps({"round": round, "states": states}) + "\n")
        now = {**self.versions, SERVER: round}
        for key in {*changed, SERVER} & self._saved.keys():
            if self._saved[key] != now[key]:
                self._file(key, self._saved[key]).unlink(missing_ok=True)
        self._saved, self._changed = now, set()

    def restore(self, sweep: bool = True) -> tuple[int, State]:
        """Go back to the last checkpoint: its round, and the server's state. Round 0: there is none yet."""
        assert self.directory is not None
        if not (self.directory / MANIFEST).exists():
            if sweep:
                self._sweep()
            return 0, {}
        try:
            manifest = json.loads((self.directory / MANIFEST).read_text())
            round, self.versions = manifest["round"], dict(manifest["states"])
        except (ValueError, KeyError, TypeError):
            raise FedtailorError(
                f"The checkpoint in {self.directory} is damaged: its manifest cannot be read."
            ) from None
        self._saved = {**self.versions, SERVER: round}
        server = self._load(self._file(SERVER, round))
        if not self.on_disk:
            self._memory = {key: self._load(self._file(key, version)) for key, version in self.versions.items()}
        if sweep:
            self._sweep()
        return round, server

    def _sweep(self) -> None:
        """Remove what a killed run left behind: everything that the manifest does not name."""
        assert self.directory is not None
        keep = {MANIFEST, *(self._file(key, version).name for key, version in self._saved.items())}
        for path in self.directory.iterdir():
            if path.name not in keep:
                path.unlink()

    def _file(self, key: str, version: int | None) -> Path:
        assert self.directory is not None
        return self.directory / f"{key}-round-{version}.safetensors"

    def _load(self, path: Path) -> State:
        try:
            tensors: dict[str, Tensor] = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise FedtailorError(f"The checkpoint file {path} cannot be read: {error}.") from None
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}


def of_client(number: int) -> str:
    """The key of a client's own state."""
    return f"client-{number}"


def _bytes(tensors: Message) -> bytes:
    return save(copied(tensors))

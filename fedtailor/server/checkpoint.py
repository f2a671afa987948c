"""The server's checkpoint: its state, what it keeps of clients, and the versions of the clients' own states.

The manifest names all of them and is written last, so it is the commit: what it does not name does not count. The
clients' states are at the sites; here are only their versions. Every file has a checksum of its own.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import (
    Count,
    is_regular,
    make_directory,
    read_bytes,
    read_sealed,
    remove,
    seal,
    write_atomically,
)
from fedtailor.messages import NEVER, Message, State, frame, unframe
from fedtailor.messages.store import Store
from fedtailor.server.records import Record

MANIFEST = "manifest.json"
MESSAGE = "sent before/"  # the beginning of the names of messages that trainings under way were sent
NOTHING: Message = {}
OURS = re.compile(r"(manifest\.json\.tmp|server-round-[0-9]+\.safetensors(\.tmp)?)")  # what a killed run may leave


@dataclass(kw_only=True)
class Begun(Record):
    """A training that is under way: its client, the round and the virtual second in which it began, and the number of
    the message that it was sent."""

    client: Count
    round: Count
    time: float
    message: Count


@dataclass(kw_only=True)
class Manifest(Record):
    """The round of a checkpoint, the versions of all states that belong to it, and what is under way."""

    round: Count
    clients: dict[Count, Count]  # of their own states, at the sites
    server: dict[Count, Count]  # of what the server keeps of them
    under_way: list[Begun] = field(default_factory=list)

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        record = super().from_json(line)
        if any(
            not NEVER < version <= record.round for of in (record.clients, record.server) for version in of.values()
        ):
            raise ValueError("it names states of rounds that it does not have")
        if any(begun.round > record.round for begun in record.under_way):
            raise ValueError("it names trainings of rounds that it does not have")
        return record


@dataclass
class Saved:
    """The content of a checkpoint."""

    round: int = 0  # 0: there is no checkpoint yet
    state: State = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # of the clients' states
    under_way: list[Begun] = field(default_factory=list)  # trainings
    messages: State = field(default_factory=dict)  # that these were sent, by their numbers


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest of a checkpoint directory; None if there is none yet."""
    path = directory / MANIFEST
    return read_sealed(path, Manifest.from_json) if path.exists() else None


def _as_json(versions: Mapping[int, int]) -> str:
    """Write versions in the order of the clients. There may be a million, for which a dictionary in this order, and
    `json`, take four times as long."""
    clients, rounds = (np.fromiter(of, np.int64, len(versions)) for of in (versions.keys(), versions.values()))
    order = clients.argsort()
    pairs = zip(clients[order].tolist(), rounds[order].tolist(), strict=True)
    return "{" + ", ".join([f'"{client}": {round}' for client, round in pairs]) + "}"


@dataclass
class Checkpoint:
    """Checkpoints in a directory, of so many clients; without a directory, nothing is saved."""

    directory: Path | None
    store: Store
    device: torch.device | str = "cpu"
    n_clients: int | None = None
    _round: int | None = None  # the round of the last one

    def write(
        self,
        round: int,
        state: Message,
        versions: dict[int, int],
        save: Callable[[], None],
        prune: Callable[[], None],
        under_way: Sequence[Begun] = (),
        messages: Message = NOTHING,
    ) -> None:
        """Save everything of a round. `save` makes the sites' states durable, `prune` lets go of the older ones."""
        if self.directory is None:
            return
        file = self._file(round)
        save()
        self.store.save()
        make_directory(self.directory)
        sent = {MESSAGE + name: tensor for name, tensor in messages.items()}
        write_atomically(file, frame({**state, **sent}, sender="server", round=round))
        named = f'{{"round": {round}, "clients": {_as_json(versions)}, "server": {_as_json(self.store.current)}'
        named += f', "under_way": {json.dumps([asdict(begun) for begun in under_way])}}}' if under_way else "}"
        write_atomically(self.directory / MANIFEST, seal(named))
        prune()
        self.store.prune()
        if self._round not in (None, round):
            remove(self._file(self._round))
        self._round = round

    def read(self, sweep: bool = True) -> Saved:
        """Go back to the last checkpoint. `sweep` removes what a killed run left behind."""
        assert self.directory is not None
        manifest = read_manifest(self.directory)
        if manifest is None:
            if sweep:
                self._sweep(None)
                self.store.restore({})
            return Saved()
        if self.n_clients is not None and max((*manifest.clients, *manifest.server, 0)) >= max(self.n_clients, 1):
            raise FedtailorError(
                f"The checkpoint in {self.directory} is of another run: it names clients that do not exist."
            )
        path = self._file(manifest.round)
        tensors = unframe(read_bytes(path), str(path), sender="server", round=manifest.round)
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        messages = {name: tensor for name, tensor in tensors.items() if name.startswith(MESSAGE)}
        self.store.restore(manifest.server, sweep)
        if sweep:
            self._sweep(manifest.round)
        self._round = manifest.round
        return Saved(
            manifest.round,
            {name: tensor for name, tensor in tensors.items() if name not in messages},
            dict(manifest.clients),
            manifest.under_way,
            {name.removeprefix(MESSAGE): tensor for name, tensor in messages.items()},
        )

    def _sweep(self, round: int | None) -> None:
        assert self.directory is not None
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if OURS.fullmatch(path.name) and path.name != self._file(round).name and is_regular(path):
                remove(path)

    def _file(self, round: int | None) -> Path:
        assert self.directory is not None
        return self.directory / f"server-round-{round}.safetensors"

"""The server's checkpoint: its state, what it keeps of clients, and the versions of the clients' own states.

The manifest names all of them and is written last, so it is the commit: what it does not name does not count. The
clients' states are at the sites; here are only their versions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedtailor.errors import FedtailorError
from fedtailor.files import write_atomically
from fedtailor.messages import Message, State, frame, unframe
from fedtailor.store import Store

MANIFEST = "manifest.json"


@dataclass
class Saved:
    """The content of a checkpoint."""

    round: int = 0  # 0: there is no checkpoint yet
    state: State = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # of the clients' states


class Checkpoint:
    """Checkpoints in a directory; without one, nothing is saved."""

    def __init__(self, directory: Path | None, store: Store, device: torch.device | str = "cpu") -> None:
        self.directory, self.store, self.device = directory, store, device
        self._round: int | None = None  # the round of the last one
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def write(
        self, round: int, state: Message, versions: dict[int, int], save: Callable[[], None], prune: Callable[[], None]
    ) -> None:
        """Save everything of a round. `save` makes the sites' states durable, `prune` lets go of the older ones."""
        if self.directory is None:
            return
        save()
        self.store.save()
        write_atomically(self._file(round), frame(state, sender="server", round=round))
        named = {
            "round": round,
            "clients": {str(client): versions[client] for client in sorted(versions)},
            "server": {str(client): self.store.current[client] for client in sorted(self.store.current)},
        }
        write_atomically(self.directory / MANIFEST, json.dumps(named) + "\n")
        prune()
        self.store.prune()
        if self._round not in (None, round):
            self._file(self._round).unlink(missing_ok=True)
        self._round = round

    def read(self, sweep: bool = True) -> Saved:
        """Go back to the last checkpoint. `sweep` removes what a killed run left behind."""
        assert self.directory is not None
        manifest = self.directory / MANIFEST
        if not manifest.exists():
            if sweep:
                self._sweep(None)
                self.store.restore({})
            return Saved()
        try:
            named = json.loads(manifest.read_text(encoding="utf-8"))
            round = int(named["round"])
            versions, kept = ({int(c): int(v) for c, v in named[whose].items()} for whose in ("clients", "server"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FedtailorError(
                f"The checkpoint in {self.directory} is damaged: its manifest cannot be read."
            ) from None
        path = self._file(round)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FedtailorError(f"The checkpoint file {path} cannot be read: {error.strerror}.") from None
        state = unframe(content, f"The checkpoint file {path}", sender="server", round=round)
        self.store.restore(kept, sweep)
        if sweep:
            self._sweep(round)
        self._round = round
        return Saved(round, {name: tensor.to(self.device) for name, tensor in state.items()}, versions)

    def _sweep(self, round: int | None) -> None:
        assert self.directory is not None
        keep = {MANIFEST, *([] if round is None else [self._file(round).name])}
        for path in self.directory.iterdir():
            mine = path.name.startswith((MANIFEST, "server-round-"))
            if mine and path.is_file() and path.name not in keep:
                path.unlink()

    def _file(self, round: int | None) -> Path:
        assert self.directory is not None
        return self.directory / f"server-round-{round}.safetensors"

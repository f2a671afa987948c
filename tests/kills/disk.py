"""What a power cut leaves of files: what was synced, and of the rest this or that."""

import os
import random
import shutil
from pathlib import Path
from typing import Any


class Disk:
    """What is on the disk itself: the content of files as of their last sync, and the names in directories as of
    theirs. All that is there at the beginning is."""

    def __init__(self, root: Path) -> None:
        self._content: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._open: dict[int, int] = {}  # by inode: as long as it is open, its number is nobody else's
        self._root = self._hold(root)
        for path in (root, *root.rglob("*")):
            self._synced(self._hold(path))

    def note(self, what: str, path: Path) -> None:
        """Follow an operation that was done."""
        if what == "fsync":
            self._synced(self._hold(path))
        elif path.exists():
            self._hold(path)

    def lose(self, rng: random.Random) -> None:
        """Leave what a power cut may leave: of all that was not synced, this or that, or nothing at all."""
        kept = rng.choice((0.0, 0.5))
        left = self._left(self._root, rng, kept)
        place = Path(os.readlink(f"/proc/self/fd/{self._open[self._root]}"))
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _lay(place, left)

    def _hold(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._open:
            self._open[number] = os.open(path, os.O_RDONLY)
        return number

    def _synced(self, number: int) -> None:
        place = Path(f"/proc/self/fd/{self._open[number]}")
        if place.is_dir():
            self._names[number] = self._listed(number)
        else:
            self._content[number] = place.read_bytes()

    def _listed(self, number: int) -> dict[str, int]:
        place = Path(f"/proc/self/fd/{self._open[number]}").resolve()
        return {path.name: self._hold(path) for path in place.iterdir()} if place.is_dir() else {}

    def _left(self, number: int, rng: random.Random, kept: float) -> bytes | dict[str, Any]:
        if not Path(f"/proc/self/fd/{self._open[number]}").is_dir():
            return self._left_of_file(number, rng, kept)
        now, then = self._listed(number), self._names.get(number, {})
        found = {name: (now if rng.random() < kept else then).get(name) for name in sorted({*now, *then})}
        return {name: self._left(inode, rng, kept) for name, inode in found.items() if inode is not None}

    def _left_of_file(self, number: int, rng: random.Random, kept: float) -> bytes:
        now, then = Path(f"/proc/self/fd/{self._open[number]}").read_bytes(), self._content.get(number, b"")
        if now == then or rng.random() >= kept:
            return then
        safe = len(then) if now.startswith(then) else min(len(now), len(then)) if then.startswith(now) else 0
        # The length may be on the disk before the bytes are: then they are zeros.
        return rng.choice((now, now[: rng.randint(safe, len(now))], now[:safe] + bytes(len(now) - safe)))


def _lay(place: Path, content: bytes | dict[str, Any]) -> None:
    if isinstance(content, bytes):
        place.write_bytes(content)
        return
    place.mkdir(exist_ok=True)
    for name, inside in content.items():
        _lay(place / name, inside)

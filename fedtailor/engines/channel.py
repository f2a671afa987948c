"""A channel carries letters to sites and their answers back. It reads none of them."""

from collections.abc import Iterator, Mapping
from typing import Protocol


class Answers(Protocol):
    """A site, as a channel sees it."""

    def answer(self, letter: bytes) -> bytes: ...


class Channel(Protocol):
    """The server's way to sites, by their names."""

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        """Send each site its letter; yield every site once, with its answer, or in words why there is none."""


class InMemory:
    """Sites in this process: all that real ones do, without a network between."""

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self._sites = sites

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        """Send each site its letter and yield its answer."""
        for name, letter in letters.items():
            yield name, self._sites[name].answer(letter) if name in self._sites else "it is not connected"

"""Participation in the rounds: drawn from the experiment's seed alone, so that all methods see the same clients."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from fedtailor._common.errors import FedtailorError
from fedtailor.training.streams import numpy_stream


@dataclass(frozen=True)
class Participation:
    """All clients, a fixed number, a fraction, a number drawn anew in every round, or each one independently by chance
    (then possibly nobody)."""

    kind: Literal["all", "count", "fraction", "range", "independent"]
    amount: float = 1
    most: int = 0  # of a range

    @classmethod
    def parse(cls, value: Any) -> Self:
        """From `all`, `6`, `0.25`, `25%`, `4-28` or `independent:0.2`. A whole number is a number of clients."""
        text = str(value).strip().lower()
        if text == "all":
            return cls("all")
        if (match := re.fullmatch(r"(\d+)-(\d+)", text)) and 1 <= int(match[1]) <= int(match[2]):
            return cls("range", int(match[1]), int(match[2]))
        if match := re.fullmatch(r"(independent:)?(\d*\.?\d+(?:e-?\d+)?)(%?)", text):
            by_chance, digits, percent = match.groups()
            if digits.isdigit() and not percent and not by_chance:
                if int(digits) < 1:
                    raise ValueError("at least one client")
                return cls("count", int(digits))
            share = float(digits) / 100 if percent else float(digits)
            if 0 < share <= 1:
                return cls("independent" if by_chance else "fraction", share)
        raise ValueError(
            "all, a number of clients (6), a fraction between 0 and 1 (0.25), a range (4-28) or independent:PROBABILITY"
        )

    def __str__(self) -> str:
        whole, share = f"{self.amount:.0f}", repr(float(self.amount))
        return {
            "all": "all",
            "count": whole,
            "fraction": share,
            "range": f"{whole}-{self.most}",
            "independent": f"independent:{share}",
        }[self.kind]

    def count(self, clients: int) -> int | None:
        """Count the participants of a round among so many clients; None where it is left to chance. A fraction is
        rounded down to at least one."""
        if self.kind == "independent":
            return None
        if self.kind in ("count", "range") and max(self.amount, self.most) > clients:
            most = max(int(self.amount), self.most)
            raise FedtailorError(f"{most} clients cannot take part in a round: there are only {clients}.")
        if self.kind in ("count", "range"):
            return None if self.kind == "range" else int(self.amount)
        return max(1, int(self.amount * clients + 1e-9))

    def mean(self, clients: int) -> float:
        """Count the participants of a round among so many clients, on average."""
        count = self.count(clients)
        if self.kind == "range":
            return (self.amount + self.most) / 2
        return self.amount * clients if count is None else count

    def most_of(self, clients: int) -> int:
        """Count the participants of a round among so many clients, at most."""
        count = self.count(clients)
        return (self.most or clients) if count is None else count

    def draw(self, clients: int, seed: int, round: int, among: Sequence[int] | None = None, busy: int = 0) -> list[int]:
        """Draw the participants of a round among so many clients, in the order of their numbers: a function of the
        seed and the round alone. Where not all can be called, it is `among` those that can; so many are `busy` with
        the work of an earlier round, and take the place of others."""
        stream, free = numpy_stream(seed, "participation", round), clients if among is None else len(among)
        if self.kind == "all":
            return list(range(clients) if among is None else among)
        count = self.count(clients)
        if self.kind == "range":
            count = int(stream.integers(int(self.amount), self.most + 1))
        if count is None:
            called: list[int] = (stream.random(clients) < self.amount).nonzero()[0].tolist()
            return called if among is None else sorted({*called} & {*among})
        drawn: list[int] = sorted(stream.choice(free, min(max(0, count - busy), free), replace=False).tolist())
        return drawn if among is None else [among[place] for place in drawn]

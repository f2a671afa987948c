"""Rules of aggregation as a setting of the experiment: the mean, and those that some hostile clients cannot move."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

Kind = Literal["mean", "median", "trimmed", "krum", "multi-krum", "geometric-median", "norm-bound"]
MOST = 10**9  # clients that anybody could ask for
GUARD = 100.0  # times as long as usual: a change that the mean leaves out
EXPECTED = (
    "mean, mean:inf (without its guard), median, trimmed:0.2 (without a fifth of the clients at either end), krum:2 "
    "(2 hostile clients), multi-krum:2,5 (the mean of the 5 best), geometric-median or norm-bound:1.0"
)


@dataclass(frozen=True)
class Rule:
    """A rule of aggregation with its numbers: a guard's, a trimmed share, f hostile and m selected clients, a norm."""

    kind: Kind = "mean"
    amount: float = 0.0  # mean: the guard; trimmed: the share at either end; krum: f; norm-bound: the largest norm
    selected: int = 1  # multi-krum: m

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read a rule; a wrong one is a ValueError that says what it must be."""
        text = str(value).strip().lower()
        if text == "mean":
            return cls("mean", GUARD)
        if text in ("median", "geometric-median"):
            return cls(text)  # type: ignore[arg-type]
        if match := re.fullmatch(r"krum:(\d{1,6})", text):
            return cls("krum", int(match[1]))
        if (match := re.fullmatch(r"multi-krum:(\d{1,6}),\s*(\d{1,6})", text)) and int(match[2]) > 0:
            return cls("multi-krum", int(match[1]), int(match[2]))
        kind, _, number = text.partition(":")
        try:
            amount = float(number)
        except ValueError:
            raise ValueError(EXPECTED) from None
        if kind == "mean" and amount >= 1:
            return cls("mean", amount)
        if kind == "trimmed" and 0 <= amount < 0.5:
            return cls("trimmed", amount)
        if kind == "norm-bound" and 0 < amount < math.inf:
            return cls("norm-bound", amount)
        raise ValueError(EXPECTED)

    @property
    def needs(self) -> int:
        """The number of clients in a round from which on the rule is what it promises.

        Krum needs 2f + 3, and m that are not hostile beside the f; a trimmed mean of fewer clients cuts nobody.
        """
        if self.kind in ("krum", "multi-krum"):
            return int(max(2 * self.amount + 3, self.amount + self.selected))
        if self.kind == "trimmed" and self.amount:
            return max(3, math.ceil(min(1 / self.amount, MOST) - 1e-9))
        return 1

    def __str__(self) -> str:
        return {
            "mean": "mean" if self.amount == GUARD else f"mean:{self.amount}",
            "trimmed": f"trimmed:{self.amount}",
            "krum": f"krum:{self.amount:.0f}",
            "multi-krum": f"multi-krum:{self.amount:.0f},{self.selected}",
            "norm-bound": f"norm-bound:{self.amount}",
        }.get(self.kind, self.kind)

"""Fairness as a setting of the experiment: weights of means that grow with the losses of the clients."""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

Kind = Literal["none", "q", "afl"]
EXPECTED = "none, q:1.0 (weights by losses to this power) or afl:0.1 (a mixture that climbs with this step)"
LOSS = "fairness/loss"  # what a client uploads beside what its method does


@dataclass(frozen=True)
class Fairness:
    """A rule with its number: the power q of the losses, or the step of the mixture's ascent."""

    kind: Kind = "none"
    amount: float = 0.0

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read a rule; a wrong one is a ValueError that says what it must be."""
        kind, _, number = str(value).strip().lower().partition(":")
        if kind == "none" and not number:
            return cls()
        try:
            amount = float(number)
        except ValueError:
            raise ValueError(EXPECTED) from None
        if kind not in ("q", "afl") or not 0 <= amount < math.inf:
            raise ValueError(EXPECTED)
        return cls(kind, amount)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.kind != "none"

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount}" if self else self.kind

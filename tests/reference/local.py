"""Local: every client goes on with its own model whenever it is called."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend


@dataclass
class SlowLocal:
    """`settings` are those of the steps: lr, momentum, weight_decay. Momentum is kept where `keep_momentum` says so."""

    problem: Problem
    settings: dict[str, Any]
    keep_momentum: bool = False
    own: dict[int, Tensor] = field(default_factory=dict)
    velocity: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def round(self, number: int, participants: list[int]) -> None:
        for i in participants:
            self.own[i] = self.descend(number, i, self.own.get(i, self.problem.initial))

    def descend(
        self, number: int, i: int, theta: Tensor, pull: float = 0.0, to: Tensor | None = None, name: str = "theta"
    ) -> Tensor:
        """A client's steps of one round on f_i(θ) + pull/2 ‖θ − to‖². `name` tells apart whose momentum is kept."""
        to = theta if to is None else to

        def slope(at: Tensor, batch: Tensor | None) -> Tensor:
            return self.problem.slope(i, at, batch)[1] + pull * (at - to)

        begin = self.velocity.get((name, i)) if self.keep_momentum else None
        batches = self.problem.order(number, i)
        end, self.velocity[name, i] = descend(slope, theta, batches, velocity=begin, **self.settings)
        return end

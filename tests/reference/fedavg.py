"""FedAvg, and FedProx with its pull towards the model that was received."""

from dataclasses import dataclass

from torch import Tensor

from tests.reference.local import SlowLocal
from tests.reference.sgd import mean


@dataclass
class SlowFedAvg(SlowLocal):
    """`glob` is the global model. With `mu` it is FedProx."""

    mu: float = 0.0

    def __post_init__(self) -> None:
        self.glob: Tensor = self.problem.initial.clone()

    def round(self, number: int, participants: list[int]) -> None:
        ends = [self.descend(number, i, self.glob, pull=self.mu) for i in participants]
        self.glob = mean(ends, [self.problem.samples[i] for i in participants])

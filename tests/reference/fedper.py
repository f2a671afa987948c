"""FedPer: the body is averaged, the head is each client's own; both are trained together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.local import SlowLocal
from tests.reference.sgd import mean


@dataclass
class SlowFedPer(SlowLocal):
    """The first `body` entries are the body. `own` has the heads."""

    body: int = 0

    def __post_init__(self) -> None:
        self.shared: Tensor = self.problem.initial[: self.body].clone()

    def round(self, number: int, participants: list[int]) -> None:
        ends = [self.descend(number, i, self.personal(i)) for i in participants]
        for i, end in zip(participants, ends, strict=True):
            self.own[i] = end[self.body :]
        self.shared = mean([end[: self.body] for end in ends], [self.problem.samples[i] for i in participants])

    def personal(self, i: int) -> Tensor:
        return torch.cat([self.shared, self.own.get(i, self.problem.initial[self.body :])])

"""Ditto: FedAvg, and beside it a model of each client's own that is pulled towards the one received."""

from dataclasses import dataclass

from tests.reference.fedavg import SlowFedAvg


@dataclass
class SlowDitto(SlowFedAvg):
    """`own` has the personal models."""

    lam: float = 1.0

    def round(self, number: int, participants: list[int]) -> None:
        for i in participants:
            begin = self.own.get(i, self.problem.initial)
            self.own[i] = self.descend(number, i, begin, pull=self.lam, to=self.glob, name="personal")
        super().round(number, participants)

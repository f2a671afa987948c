"""FedNova with the accumulation vector of every client, one entry for each gradient (Wang et al. 2020)."""

from dataclasses import dataclass

import torch

from tests.reference.fedavg import SlowFedAvg


@dataclass
class SlowFedNova(SlowFedAvg):
    """`tau` is τ_eff; by default the mean of ‖a_i‖₁."""

    tau: float | None = None

    def round(self, number: int, participants: list[int]) -> None:
        x, n = self.glob, sum(self.problem.samples[i] for i in participants)
        direction, tau = torch.zeros_like(x), 0.0
        for i in participants:
            p, y = self.problem.samples[i] / n, self.descend(number, i, x)
            a = sum(self.accumulation(len(self.problem.order(number, i))))
            direction, tau = direction + p * (x - y) / a, tau + p * a
        self.glob = x - (self.tau or tau) * direction

    def accumulation(self, steps: int) -> list[float]:
        """How often each gradient counts in x − y: in its own step, and by the velocity in all later ones."""
        m = self.settings.get("momentum", 0.0)
        return [sum(m ** (later - k) for later in range(k, steps)) for k in range(steps)]

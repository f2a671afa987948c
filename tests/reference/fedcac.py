"""FedCAC with sets of critical entries and loops over pairs of clients (Wu et al. 2023)."""

from dataclasses import dataclass, field

from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


def critical(start: Tensor, end: Tensor, layers: list[slice], tau: float) -> set[int]:
    """The entries with the largest |θ Δθ| of each layer."""
    found: set[int] = set()
    for layer in layers:
        entries = range(layer.start, layer.stop)
        importance = {k: abs(float(end[k]) * (float(end[k]) - float(start[k]))) for k in entries}
        best = sorted(entries, key=lambda k: -importance[k])[: int(tau * len(entries))]
        found |= {k for k in best if importance[k] > 0}
    return found


def overlap(one: set[int], other: set[int]) -> float:
    """1 − ‖m_i − m_j‖₁ / (2‖m_i‖₁)."""
    return 1 - len(one ^ other) / (2 * len(one)) if one and other else 0.0


@dataclass
class SlowFedCAC:
    """All rounds, with the last models and critical entries, and the start of every descent."""

    problem: Problem
    layers: list[slice]
    tau: float
    beta: float
    lr: float
    models: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, set[int]] = field(default_factory=dict)
    begun: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    helped: int = 0  # how often a client got critical entries of somebody else

    def run(self, rounds: list[list[int]]) -> Tensor:
        """Run the rounds with these participants, and return the last global model."""
        shared = self.problem.initial
        for number, participants in enumerate(rounds, 1):
            ends, masks = {}, {}
            for i in participants:

                def slope(at: Tensor, chosen: Tensor | None, i: int = i) -> Tensor:
                    return self.problem.slope(i, at, chosen)[1]

                start = self.begun[number, i] = self.customised(i, shared, number - 1)
                ends[i] = descend(slope, start, self.problem.order(number, i), lr=self.lr)[0]
                masks[i] = critical(start, ends[i], self.layers, self.tau)
            shared = mean([*ends.values()], [self.problem.samples[i] for i in participants])
            self.models |= ends
            self.masks |= masks
        return shared

    def helpers(self, i: int, after: int) -> list[int]:
        """Whose critical entries overlap those of client i enough."""
        pairs = {(a, b): overlap(self.masks[a], self.masks[b]) for a in self.masks for b in self.masks if a != b}
        if not pairs:
            return []
        average, most = sum(pairs.values()) / len(pairs), max(pairs.values())
        threshold = average + after / self.beta * (most - average)
        return [j for j in self.masks if j != i and pairs[i, j] >= threshold - 1e-12]

    def customised(self, i: int, shared: Tensor, after: int) -> Tensor:
        """The model with which a client begins."""
        if i not in self.models:
            return shared
        helpers = self.helpers(i, after)
        self.helped += bool(helpers)
        own = mean([self.models[j] for j in [i, *helpers]], [1.0] * (1 + len(helpers)))
        start = shared.clone()
        for k in self.masks[i]:
            start[k] = own[k]
        return start

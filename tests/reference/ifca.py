"""IFCA by loops: Ghosh et al. 2020, Algorithm 1, Option II, with weights by samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from tests.reference.sgd import descend, mean


@dataclass
class Round:
    """The outcome of a round: the clusters' models, their members in this round, and the last choice of each client."""

    models: list[Tensor]
    members: list[list[int]]
    chosen: list[int]


def ifca(
    risk: Callable[[int, Tensor], float],
    slope: Callable[[int, Tensor], Tensor],
    rounds: list[list[int]],
    samples: list[int],
    models: list[Tensor],
    *,
    lr: float,
    steps: int,
    momentum: float = 0.0,
) -> Iterator[Round]:
    """Run the rounds with these participants. Where momentum is kept, each cluster has its own at each client."""
    chosen = [-1] * len(samples)
    speeds: dict[tuple[int, int], Tensor] = {}
    models = list(models)
    for participants in rounds:
        members: list[list[int]] = [[] for _ in models]
        ends: list[list[Tensor]] = [[] for _ in models]
        for i in participants:
            j = nearest(lambda theta, i=i: risk(i, theta), models)
            end, speeds[i, j] = descend(
                lambda at, _, i=i: slope(i, at),
                models[j],
                [None] * steps,
                lr=lr,
                momentum=momentum,
                velocity=speeds.get((i, j)),
            )
            members[j].append(i)
            ends[j].append(end)
            chosen[i] = j
        for j in range(len(models)):
            if members[j]:
                models[j] = mean(ends[j], [samples[i] for i in members[j]])
        yield Round(list(models), members, list(chosen))


def nearest(risk: Callable[[Tensor], float], models: list[Tensor]) -> int:
    """The number of the model with the lowest risk; the first of equals."""
    risks = [risk(theta) for theta in models]
    return risks.index(min(risks))

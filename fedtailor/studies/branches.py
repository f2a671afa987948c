"""pFedMB's Figure 3: whether clients with the same classes come to use the same branch, and others another one."""

from torch import Tensor

from fedtailor.engines.result import RunResult
from fedtailor.server.records import Plain

SHOWN = (1, 2, 5, 10, 20, 50, 100)  # rounds, and the last one
CLEAR = 1e-6  # a client's largest α exceeds its second by more than this, or it has no branch yet


def shared_branches(alpha: Tensor) -> tuple[int, int]:
    """Count the pairs (clients 2k and 2k+1) with both clients on the same branch, and the different branches of these.

    `alpha` is clients × layers × branches. A client's branch is the one with its largest α, on average over layers.
    """
    own = [_branch(weights.tolist()) for weights in alpha.mean(1)]
    shared = [one for one, other in zip(own[::2], own[1::2], strict=True) if one is not None and one == other]
    return len(shared), len(set(shared))


def _branch(weights: list[float]) -> int | None:
    largest, *others = sorted(weights, reverse=True)
    return weights.index(largest) if not others or largest - others[0] > CLEAR else None


def alpha_over_rounds(result: RunResult) -> list[Plain]:
    """Return the α of all clients after a few rounds of a run, and what they come to."""
    recorded, last = result.observations.rounds(), result.rounds[-1].round
    found = []
    for number in (number for number in recorded if number in SHOWN or number == last):
        alpha = result.observed(number)["alpha"]
        pairs, branches = shared_branches(alpha)
        weights = [[round(value, 4) for value in own] for own in alpha.mean(1).tolist()]
        found.append({"round": number, "pairs": pairs, "branches": branches, "alpha": weights})
    return found

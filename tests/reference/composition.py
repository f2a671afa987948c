"""PGFed on the body that FedPer shares, by loops and plain formulas, on quadratic clients.

f_i(θ) = ½ (θ − c)ᵀ H (θ − c) with θ = (s, h): the body s is averaged, the head h stays. PGFed's estimates, and all
that it sends, are about s alone.
"""

import torch
from torch import Tensor


def run(
    centres: Tensor,
    curvatures: Tensor,
    n_samples: list[float],
    first: Tensor,
    body: int,
    rounds: list[list[int]],
    mu: float,
    alpha_lr: float,
    lr: float,
    steps: int,
) -> tuple[Tensor, dict[int, Tensor], list[list[float]]]:
    """Return the shared body, the clients' heads and the α_ij after all rounds."""
    N, M = len(centres), len(rounds[0])
    alpha = [[1 / M] * N for _ in range(N)]
    shared, heads = first[:body].clone(), {}
    before: dict[int, tuple[Tensor, Tensor]] = {}  # ∇_s f_j and g⁽¹⁾_j of the last round's participants
    for participants in rounds:
        now, ends = {}, {}
        for i in participants:
            s, h = shared.clone(), heads.get(i, first[body:].clone())
            new, bar = torch.zeros_like(s), torch.zeros_like(s)
            for j, (gradient, _) in before.items():
                new = new + mu * alpha[i][j] * gradient
                bar = bar + mu * gradient / len(before)
            for _ in range(steps):
                slope = curvatures[i] @ (torch.cat([s, h]) - centres[i])
                s, h = s - lr * (slope[:body] + new), h - lr * slope[body:]
                for j, (_, g1) in before.items():
                    alpha[i][j] = max(0.0, alpha[i][j] - alpha_lr * float(g1 + bar @ s))
            away = torch.cat([s, h]) - centres[i]
            gradient = (curvatures[i] @ away)[:body]
            now[i] = (gradient, mu * (0.5 * away @ curvatures[i] @ away - gradient @ s))
            ends[i], heads[i] = s, h
        total = sum(n_samples[i] for i in participants)
        shared = sum((n_samples[i] / total * ends[i] for i in participants), torch.zeros_like(shared))
        before = now
    return shared, heads, alpha

"""Fair means: a client's weight in every mean of a round is multiplied by a factor that follows from its loss.

q (after q-FFL, Li et al. 2020): F_k^q. AFL (Mohri et al. 2019): λ_k / (n_k / n), for a mean by samples the weight λ_k;
after the round λ climbs along the losses, and is projected onto the simplex. F_k is the training loss of the model that
client k would have predicted with, before it trained. Factors are kept relative to the largest one so far, so that a
mean stays one running sum, and no power overflows.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.fairness import LOSS, Fairness
from fedtailor.messages import Message
from fedtailor.method import Each, Method, Server

MIXTURE = "fairness/lambda"  # λ, in the server's state
LEAST = 1e-10  # is added to a loss before its power is taken, as the authors' code does


class FairFactors:
    """The factors of one round's clients, as they come."""

    def __init__(self, rule: Fairness, server: Server) -> None:
        self._rule, self._server = rule, server
        n = server.n_samples.cpu().double()
        self._start = n / n.sum()
        if rule.kind == "afl":
            self._mixture = self._known_mixture()
        self._losses: dict[int, float] = {}
        self._logs: dict[int, float] = {}
        self._largest = -math.inf

    def _known_mixture(self) -> Tensor:
        """Return λ: the clients' shares of all samples at first. Clients that joined since then bring theirs."""
        kept = self._server.state.get(MIXTURE, self._start)
        new = self._start[len(kept) :]
        return torch.cat([kept * (1 - new.sum()), new])

    def add(self, client: int, upload: Message) -> tuple[float, float]:
        """Take a client's loss. Return its factor and, as both are relative to the largest, that of all before it."""
        self._losses[client] = loss = float(upload[LOSS])
        if self._rule.kind == "q":
            log = self._rule.amount * math.log(loss + LEAST)
        else:
            share = float(self._mixture[client] / self._start[client])
            log = math.log(share) if share else -math.inf
        self._logs[client], before = log, self._largest
        self._largest = max(log, before)
        return self._relative(log), self._relative(before)

    def _relative(self, log: float) -> float:
        return math.exp(log - self._largest) if log > -math.inf else 0.0

    def mean(self, shares: Mapping[int, float]) -> float:
        """Average the factors by these shares: what sums with factors are divided by."""
        total = sum(shares[client] * self._relative(log) for client, log in self._logs.items())
        return total / sum(shares[client] for client in self._logs)

    @property
    def lacking(self) -> str:
        """Say why the round has no mean; nothing if it has one."""
        if not self._logs or self._largest > -math.inf:
            return ""
        return f"as fairness {self._rule} gives none of its clients any weight"

    def close(self) -> None:
        """Let λ climb: λ ← Π(λ + γ N/|S| Σ_{k in S} F_k e_k), S being the clients that replied, of N."""
        if self._rule.kind != "afl" or not self._losses:
            return
        climbed = self._mixture.clone()
        for client, loss in self._losses.items():
            climbed[client] += self._rule.amount * len(climbed) / len(self._losses) * loss
        self._server.state[MIXTURE] = on_simplex(climbed)


def on_simplex(point: Tensor) -> Tensor:
    """Project a point onto the simplex: the nearest one without negative numbers and with the sum 1."""
    falling = point.sort(descending=True).values
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(point) + 1)
    return (point - excess[falling > excess][-1]).clamp(min=0)


def without_loss(upload: Message) -> Message:
    """Check the loss that a client declares, and return the rest of its upload."""
    loss = upload.get(LOSS)
    if not isinstance(loss, Tensor) or (tuple(loss.shape), loss.dtype) != ((), torch.float64):
        raise ValueError("its upload lacks its loss, which fairness weights it by")
    if loss < 0:
        raise ValueError(f"its loss is {float(loss):g}, and fairness takes losses of at least 0 alone")
    return {name: tensor for name, tensor in upload.items() if name != LOSS}


def check_fairness(experiment: Experiment, method: Method) -> None:
    """Refuse fairness where nothing is weighted, or where clients' losses must not be known or believed."""
    title = type(method).__name__
    if single := [name for name, how in method.uploads.items() if isinstance(how, Each) and not how.record]:
        raise FedtailorError(
            f"Fairness weights means, and {title} needs every client's own {single[0]}: take a method whose uploads "
            "are means, like fedavg, or leave --fairness out."
        )
    if not method.means:
        raise FedtailorError(f"Fairness weights means, and {title} has none: leave --fairness out.")
    if experiment.secure or (experiment.privacy is not None and experiment.epsilon != "inf"):
        setting = "--secure" if experiment.secure else "--privacy"
        raise FedtailorError(
            f"Fairness needs each client's own loss at the server, which {setting} promises to hide: leave --fairness "
            f"or {setting} out."
        )
    if Rule.parse(experiment.aggregation).kind != "mean":
        raise FedtailorError(
            f"Fairness believes the losses that clients declare, and the rule {experiment.aggregation} is for clients "
            "that lie: leave --fairness or --aggregation out."
        )

"""pFedMB: every layer is a mix of shared branches, with weights of the client's own."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.errors import FedtailorError
from fedtailor.method import Client, Message, Method, Replies, Server


class PFedMB(Method):
    """Layer l of a client is Σ_b α_lb W_lb; the W are shared, the α its own (Mori et al.).

    A round is E epochs on α with W fixed (Eq. 3), then E epochs on W with α fixed (Eq. 4); the server averages each
    branch by samples and α (Eq. 5). The constraint α ≥ 0, Σ_b α_lb = 1 is kept by exact projection after each step.

    No special layers are needed: the mix θ runs through one ordinary pass, and ∂/∂α_lb = ⟨g_l, W_lb⟩, ∂/∂W_lb = α_lb
    g_l. As all branches of a layer move along the same g_l, Eq. 4 is a descent of θ alone with its steps scaled by
    Σ_b α_lb², from which the branches follow at the end: the cost hardly grows with their number. (Weight decay is
    that of the mix θ.)

    New clients: the equal mix of all branches. Limits: `branches=1` is FedAvg; equal, fixed α (`alpha_lr=0`) is FedAvg
    on each branch.
    """

    name: ClassVar[str] = "pfedmb"
    paper: ClassVar[str] = (
        "Mori, Yoshiyama, Furukawa, Teranishi, Personalized Federated Learning with Multi-branch Architecture"
    )
    shared_part: ClassVar[str] = "the branches of each layer"
    own_part: ClassVar[str] = "the weights α of the branches"

    branches: int = Field(5, ge=1, description="branches of each layer, B")
    alpha_lr: float = Field(0.2, ge=0, description="learning rate of the α, η_α")
    branch_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of the branches, η_W; by default lr × B: a branch's gradient has the factor α",
    )
    per_layer: bool = Field(True, description="weights of its own for each layer, or one set for all layers")
    alpha_weighted: bool = Field(True, description="average branches by samples and α (Eq. 5), or by samples (Eq. 6)")

    def start(self, server: Server) -> None:
        W = torch.stack([server.another_initial(branch) for branch in range(self.branches)])
        if self.branches > 1 and torch.equal(W[0], W[1]):
            raise FedtailorError("The branches begin equal: the network's layers have no reset_parameters.")
        server.state["W"] = W
        layers = len(server.layers) if self.per_layer else 1
        server.state["alpha"] = server.initial.new_full((server.clients, layers, self.branches), 1 / self.branches)

    def broadcast(self, server: Server) -> Message:
        return {"W": server.state["W"]}

    def train(self, client: Client, message: Message) -> Message:
        W, slices = message["W"], self._slices(client)
        alpha = client.state.get("alpha", W.new_full((len(slices), self.branches), 1 / self.branches))
        if self.branches > 1 and self.alpha_lr:
            alpha = alpha.clone()
            for batch in client.batches():  # line 19
                gradient = client.gradient(mix(alpha, W, slices), batch)
                pulled = torch.stack([W[:, layer] @ gradient[layer] for layer in slices])
                alpha.copy_(project(alpha - self.alpha_lr * pulled))  # Eq. 3
        client.state["alpha"] = alpha
        theta = mix(alpha, W, slices)
        squares = alpha.square().sum(1)
        rate = self.branch_lr or client.how.lr * self.branches
        trained = client.descend(theta, scale=spread(squares, slices), lr=rate)  # line 20, Eq. 4
        branches = W.clone()
        for share, square, layer in zip(alpha, squares, slices, strict=True):
            ratio = (share / square)[:, None]
            branches[:, layer].sub_(ratio * theta[layer]).add_(ratio * trained[layer])
        for place in client.network.statistics:  # the same for all branches: statistics are no weights
            branches[:, place] = trained[place]
        return {"W": branches, "alpha": alpha}

    def receive(self, server: Server, replies: Replies) -> None:
        W, alpha, slices = replies.stack("W"), replies.stack("alpha"), self._slices(server)
        weights = replies.samples.to(W)[:, None, None] * (alpha if self.alpha_weighted else torch.ones_like(alpha))
        total = weights.sum(0)
        averaged = server.state["W"].clone()
        for number, layer in enumerate(slices):
            used = total[number] > 0  # a branch that nobody uses keeps its value
            shares = (weights[:, number] / total[number].clamp(min=torch.finfo(W.dtype).tiny))[:, used]
            averaged[used, layer] = torch.einsum("mb,mbd->bd", shares, W[:, used, layer])  # Eq. 5
        known = server.state["alpha"].clone()
        known[list(replies)] = alpha
        server.state |= {"W": averaged, "alpha": known}

    def personal(self, client: Client, message: Message) -> Tensor:
        W, slices = message["W"], self._slices(client)
        return mix(client.state.get("alpha", W.new_full((len(slices), self.branches), 1 / self.branches)), W, slices)

    def _slices(self, side: Client | Server) -> list[slice]:
        return list(side.layers.values()) if self.per_layer else [slice(0, len(side.initial))]

    def observe(self, server: Server) -> Message:
        return {"alpha": server.state["alpha"]}


def mix(alpha: Tensor, W: Tensor, slices: list[slice]) -> Tensor:
    """θ_l = Σ_b α_lb W_lb for all layers (Eq. 1)."""
    return torch.cat([share @ W[:, layer] for share, layer in zip(alpha, slices, strict=True)])


def spread(values: Tensor, slices: list[slice]) -> Tensor:
    """One value a layer, for each of its entries."""
    return torch.cat([value.expand(layer.stop - layer.start) for value, layer in zip(values, slices, strict=True)])


def project(rows: Tensor) -> Tensor:
    """The nearest point of the simplex for each row (Euclidean)."""
    rows = rows - rows.amax(1, keepdim=True)  # the same point, without large numbers
    ordered = rows.sort(dim=1, descending=True).values
    excess = ordered.cumsum(1) - 1
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    support = (ordered * count > excess).sum(1, keepdim=True)
    return (rows - excess.gather(1, support - 1) / support).clamp(min=0)

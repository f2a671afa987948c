"""pFedMB: every layer is a mix of shared branches, with weights of the client's own."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.method import Client, Each, Mean, Message, Method, Search, Server, Total, Uploads


class PFedMB(Method):
    """Every layer of a client mixes shared branches, Σ_b α_lb W_lb, by weights α of its own (Mori et al.).

    A round is E epochs on α with W fixed (Eq. 3), then E epochs on W with α fixed (Eq. 4); the server averages each
    branch by samples and α (Eq. 5). The constraint α ≥ 0, Σ_b α_lb = 1 is kept by exact projection after each step.
    The weights n_i α_lb of Eq. 5 are an upload, of which the server sees the sum alone.

    No special layers are needed: the mix θ runs through one ordinary pass, and ∂/∂α_lb = ⟨g_l, W_lb⟩, ∂/∂W_lb = α_lb
    g_l. As all branches of a layer move along the same g_l, Eq. 4 is a descent of θ alone with the rate η_W Σ_b α_lb²,
    from which the branches follow at the end: the cost hardly grows with their number. By default η_W is lr / Σ_b
    α_lb², so that θ descends with the experiment's lr whatever α is. (Weight decay is that of the mix θ.)

    New clients: the equal mix of all branches. Limits: `branches=1` is FedAvg; equal, fixed α (`alpha_lr=0`) is FedAvg
    on each branch.
    """

    name: ClassVar[str] = "pfedmb"
    title: ClassVar[str] = "pFedMB"
    paper: ClassVar[str] = (
        "Mori, Yoshiyama, Furukawa, Teranishi, Personalized Federated Learning with Multi-branch Architecture"
    )
    shared_part: ClassVar[str] = "the branches of each layer"
    own_part: ClassVar[str] = "the weights α of the branches"

    # Eq. 5: a client weighs its branches by n_i α_lb.
    uploads: ClassVar[Uploads] = {"W": Mean("weight"), "alpha": Each(record=True)}

    branches: int = Field(5, ge=1, description="branches of each layer, B")
    alpha_lr: float = Field(0.2, ge=0, description="learning rate of the α, η_α")
    branch_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of the branches, η_W; by default lr / Σ_b α_lb²: their mix then has the rate lr",
    )
    per_layer: bool = Field(True, description="weights of its own for each layer, or one set for all layers")
    alpha_weighted: bool = Field(True, description="average branches by samples and α (Eq. 5), or by samples (Eq. 6)")
    search: ClassVar[Search] = {"branches": "2..10", "alpha_lr": "0.01..1:log"}

    def start(self, server: Server) -> None:
        W = torch.stack([server.initial_for(branch) for branch in range(self.branches)])
        if self.branches > 1 and torch.equal(W[0], W[1]):
            raise FedtailorError(
                "The branches begin equal: the network's layers have no reset_parameters, or are pretrained."
            )
        server.state["W"] = W
        layers = len(server.layout.layers) if self.per_layer else 1
        server.state["alpha"] = server.initial.new_full((server.n_clients, layers, self.branches), 1 / self.branches)

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
        if self.branch_lr is None:
            trained = client.descend(theta)  # line 20, Eq. 4 with η_W = lr / Σ_b α_lb²
        else:
            trained = client.descend(theta, scale=client.layout.spread(squares), lr=self.branch_lr)
        branches = W.clone()
        for share, square, layer in zip(alpha, squares, slices, strict=True):
            ratio = (share / square)[:, None]
            branches[:, layer].sub_(ratio * theta[layer]).add_(ratio * trained[layer])
        client.layout.copy_buffers(branches, trained)  # the same for all branches: buffers are no weights
        weight = client.n_samples * (alpha.T if self.alpha_weighted else torch.ones_like(alpha.T))
        return {"W": branches, "weight": weight, "alpha": alpha}

    def upload_like(self, server: Server, client: int) -> Message:
        alpha = server.state["alpha"][client]
        return {"alpha": alpha, "weight": alpha.T}

    def receive(self, server: Server, total: Total) -> None:
        used = server.layout.spread(total.weight("W")) > 0  # a branch that nobody uses keeps its value
        server.state["W"] = torch.where(used, total["W"], server.state["W"])
        server.note(total, "alpha")

    def personal_model(self, client: Client, message: Message) -> Tensor:
        W, slices = message["W"], self._slices(client)
        return mix(client.state.get("alpha", W.new_full((len(slices), self.branches), 1 / self.branches)), W, slices)

    def _slices(self, side: Client | Server) -> list[slice]:
        return list(side.layout.layers.values()) if self.per_layer else [slice(0, len(side.initial))]

    def observe(self, server: Server) -> Message:
        return {"alpha": server.state["alpha"]}


def mix(alpha: Tensor, W: Tensor, slices: list[slice]) -> Tensor:
    """Compute θ_l = Σ_b α_lb W_lb for all layers (Eq. 1)."""
    return torch.cat([share @ W[:, layer] for share, layer in zip(alpha, slices, strict=True)])


def project(rows: Tensor) -> Tensor:
    """Project each row onto the simplex: the nearest point of it (Euclidean)."""
    rows = rows - rows.amax(1, keepdim=True)  # the same point, without large numbers
    ordered = rows.sort(dim=1, descending=True).values
    excess = ordered.cumsum(1) - 1
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    support = (ordered * count > excess).sum(1, keepdim=True)
    return (rows - excess.gather(1, support - 1) / support).clamp(min=0)

"""FedAMP: similar clients attract each other's models."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Each, Message, Method, Server, Total, Uploads


class FedAMP(Method):
    """Each client minimises f_i(w) + λ/(2α_k) ‖w − u_i‖² around its own mix u_i of all models (Huang et al. 2021).

    u_i = Σ_j ξ_ij w_j over the clients' last models, ξ_ij = α_k A'(‖w_i − w_j‖²) for j ≠ i and ξ_ii = 1 − Σ_{j≠i} ξ_ij,
    with the attention function A(x) = 1 − exp(−x/σ): the nearer two models are, the more they attract each other. The
    descent begins at the client's own w_i, which is also its personal model. A client that was not called yet counts
    with the initial vector, w⁰.

    Limits: `lam=0` is Local. One client alone, or a σ so small that exp(−‖w_i − w_j‖²/σ) is 0, makes u_i = w_i:
    FedProx with μ = λ/α_k around the client's own model. A σ far above all distances with α_k = σ/N makes every u_i
    the plain mean of all models. `server_step` → 0 is not Local: the pull λ/α_k grows, and clients stay where they are.

    New clients: the plain mean of all clients' last models.

    Deviations: the paper has α_k small enough for ξ_ii ≥ 0, which α_k ≤ σ/(N−1) ensures for any models. Where it is
    larger and Σ_{j≠i} ξ_ij > 1, the others' weights are divided by that sum and ξ_ii = 0, so that u_i remains a mean.
    α_k is the same in all rounds, and w_i is what the experiment's local descent makes of the argmin.
    """

    name: ClassVar[str] = "fedamp"
    paper: ClassVar[str] = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    shared_part: ClassVar[str] = "a mix of all models for each client"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"w": Each()}
    keeps_model: ClassVar[bool] = True

    lam: float = Field(0.1, ge=0, description="weight of the attraction between models, λ")
    server_step: float = Field(0.5, gt=0, description="step of the server towards similar models, α_k")
    sigma: float = Field(10.0, gt=0, description="squared distance over which attention falls to 1/e, σ")

    def start(self, server: Server) -> None:
        server.state["D"] = server.initial.new_zeros(server.n_clients, server.n_clients)  # ‖w_i − w_j‖²
        server.state["mean"] = server.initial

    def broadcast(self, server: Server) -> Message:
        return {"mean": server.state["mean"]}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        mixes = server.mixed(self.weights(server.state["D"], server.participants), "w")
        return {client: {"u": u} for client, u in zip(server.participants, mixes, strict=True)}

    def weights(self, D: Tensor, clients: list[int]) -> Tensor:
        """Compute ξ of these clients (rows) for all models, from the squared distances between them."""
        xi = self.server_step / self.sigma * torch.exp(-D[clients] / self.sigma)  # α_k A'
        own = range(len(clients)), clients
        xi[own] = 0.0
        xi /= xi.sum(1, keepdim=True).clamp(min=1.0)
        xi[own] = (1 - xi.sum(1)).clamp(min=0)
        return xi

    def train(self, client: Client, message: Message) -> Message:
        u, pull = message["u"], self.lam / self.server_step
        w = client.state.get("w", client.initial)
        client.state["w"] = client.descend(w, correction=lambda w: pull * (w - u))
        return {"w": client.state["w"]}

    def receive(self, server: Server, total: Total) -> None:
        for client, w in total.each("w").items():
            server.keep(client, {"w": w})
        changed, D, models_sum = total.clients, server.state["D"].clone(), torch.zeros_like(server.initial)
        new = server.layout.without_buffers(total.rows("w").sub_(server.initial))
        for clients, models in server.kept("w"):  # only rows that changed
            models_sum += models.sum(0)
            moved = server.layout.without_buffers(models.sub_(server.initial))
            D[changed, clients.start : clients.stop] = squared_distances(new, moved)
        D[:, changed] = D[changed].T
        server.state |= {"D": D.fill_diagonal_(0.0), "mean": models_sum / server.n_clients}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["w"] if "w" in client.state else message["mean"]

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        return {"weights": self.weights(server.state["D"], [*range(server.n_clients)])}


def squared_distances(rows: Tensor, columns: Tensor) -> Tensor:
    """Compute ‖a − b‖² of all pairs by one matrix product.

    It is exact enough where the vectors are no longer than their distances. So the caller subtracts the initial vector.
    """
    squares = _squared_lengths(rows)[:, None] + _squared_lengths(columns)
    return squares.sub_(rows @ columns.T, alpha=2).clamp_(min=0)


def _squared_lengths(rows: Tensor) -> Tensor:
    """Compute ‖row‖² row by row: the squares of all rows need fresh memory, which costs more than computing them."""
    return torch.stack([row.square().sum() for row in rows])

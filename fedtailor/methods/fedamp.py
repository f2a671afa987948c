"""FedAMP: similar clients attract each other's models."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Each, Message, Method, Search, Server, Total, Uploads

PULL = 0.05  # λ/α_k by default


class FedAMP(Method):
    """Each client minimises f_i(w) + λ/(2α_k) ‖w − u_i‖² around its own mix u_i of all models (Huang et al. 2021).

    u_i = Σ_j ξ_ij w_j over the clients' last models, ξ_ij = α_k A'(‖w_i − w_j‖²) for j ≠ i and ξ_ii = 1 − Σ_{j≠i} ξ_ij,
    with the attention function A(x) = 1 − exp(−x/σ): the nearer two models are, the more they attract each other. The
    descent begins at the client's own w_i, which is also its personal model. A client that was not called yet counts
    with the initial vector, w⁰.

    By default α_k = σ/N: then ξ_ii is never below 1/N, and equal models have equal weights. λ is α_k/20 by default, so
    the pull towards u_i is λ/α_k = 0.05 however many clients there are.

    Limits: `lam=0` is Local. One client alone, or a σ so small that exp(−‖w_i − w_j‖²/σ) is 0, makes u_i = w_i:
    FedProx with μ = λ/α_k around the client's own model. A σ far above all distances with the default α_k makes every
    u_i the plain mean of all models. With λ given, `server_step` → 0 is not Local: the pull λ/α_k grows, and clients
    stay where they are.

    New clients: the plain mean of all clients' last models.

    Deviations: the paper has α_k small enough for ξ_ii ≥ 0, which α_k ≤ σ/(N−1) ensures for any models. Where it is
    larger and Σ_{j≠i} ξ_ij > 1, the others' weights are divided by that sum and ξ_ii = 0, so that u_i remains a mean; a
    warning says so. α_k is the same in all rounds, and w_i is what the experiment's local descent makes of the argmin.
    """

    name: ClassVar[str] = "fedamp"
    paper: ClassVar[str] = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    shared_part: ClassVar[str] = "a mix of all models for each client"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"w": Each()}
    keeps_model: ClassVar[bool] = True

    lam: float | None = Field(None, ge=0, description="weight of the attraction between models, λ [0.05 α_k]")
    server_step: float | None = Field(
        None, gt=0, description="step of the server towards similar models, α_k [σ over the number of clients]"
    )
    sigma: float = Field(10.0, gt=0, description="squared distance over which attention falls to 1/e, σ")
    search: ClassVar[Search] = {"sigma": "0.1..1000:log"}

    def start(self, server: Server) -> None:
        server.state["D"] = server.pairs()  # ‖w_i − w_j‖²
        server.state["mean"] = server.initial

    def broadcast(self, server: Server) -> Message:
        return {"mean": server.state["mean"]}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        pull = PULL if self.lam is None else self.lam / self.step(server)  # λ/α_k
        mixes = server.mixed(self.weights(server, server.participants), "w")
        return {
            client: {"u": u, "pull": u.new_tensor(pull)} for client, u in zip(server.participants, mixes, strict=True)
        }

    def step(self, server: Server) -> float:
        """Return α_k: by default σ/N, so that no models can make ξ_ii negative."""
        return self.sigma / server.n_clients if self.server_step is None else self.server_step

    def weights(self, server: Server, clients: list[int]) -> Tensor:
        """Compute ξ of these clients (rows) for all models, from the squared distances between them."""
        distances, own = server.state["D"][clients], (range(len(clients)), clients)
        xi = self.step(server) / self.sigma * torch.exp(-distances / self.sigma)  # α_k A'
        xi[own] = 0.0
        others = xi.sum(1, keepdim=True)
        if (others > 1.001).any() and distances.any():  # beyond rounding; equal models have one mean, whatever ξ is
            server.warn("self-weight", self._too_large(server))
        xi /= others.clamp(min=1.0)
        xi[own] = (1 - xi.sum(1)).clamp(min=0)
        return xi

    def _too_large(self, server: Server) -> str:
        return (
            "FedAMP: the weights of other clients' models add up to more than 1, so a client's own model counts for "
            f"nothing in its mix: server_step {self.step(server):g} is too large for {server.n_clients} clients "
            f"(at most {self.sigma / (server.n_clients - 1):.3g} is safe)."
        )

    def train(self, client: Client, message: Message) -> Message:
        u, pull = message["u"], message["pull"]
        w = client.state.get("w", client.initial)
        client.state["w"] = client.descend(w, correction=lambda w: pull * (w - u))
        return {"w": client.state["w"]}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor:
        return message["u"]  # to which the model is drawn; it began at the client's own

    def receive(self, server: Server, total: Total) -> None:
        for client, w in total.each("w").items():
            server.keep(client, {"w": w})
        self._compare(server, total.clients, server.layout.without_buffers(total.rows("w").sub_(server.initial)))

    def join(self, server: Server, before: int) -> None:
        """New clients count with the initial vector, as those that were not called yet."""
        super().join(server, before)
        joining = [*range(before, server.n_clients)]
        self._compare(server, joining, server.initial.new_zeros(len(joining), len(server.initial)))

    def _compare(self, server: Server, changed: list[int], new: Tensor) -> None:
        """Renew the distances of these clients, whose models have moved so far from the initial vector, and the
        mean."""
        D, models_sum = server.state["D"].clone(), torch.zeros_like(server.initial)
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
        return {"weights": self.weights(server, [*range(server.n_clients)])}


def squared_distances(rows: Tensor, columns: Tensor) -> Tensor:
    """Compute ‖a − b‖² of all pairs by one matrix product.

    It is exact enough where the vectors are no longer than their distances. So the caller subtracts the initial vector.
    """
    squares = _squared_lengths(rows)[:, None] + _squared_lengths(columns)
    return squares.sub_(rows @ columns.T, alpha=2).clamp_(min=0)


def _squared_lengths(rows: Tensor) -> Tensor:
    """Compute ‖row‖² row by row: the squares of all rows need fresh memory, which costs more than computing them."""
    return torch.stack([row.square().sum() for row in rows])

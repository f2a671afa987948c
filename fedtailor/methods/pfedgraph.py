"""pFedGraph: every client begins with a mix of models by a collaboration graph, which the server infers."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.method import Client, Each, Message, Method, Search, Server, Total, Uploads


class PFedGraph(Method):
    """A mix of models for each client, by how alike their changes are and how many samples they have (Ye et al. 2023).

    s_ij is the cosine between the ways that the last models of i and j have gone from the initial vector. The weights
    a_i of client i's mix minimise −Σ_j a_ij s_ij + α‖a_i − p‖² on the simplex, p_j = n_j / Σ n: they are the projection
    of p + s_i / (2α). A participant begins with the mix θ̄_i = Σ_j a_ij θ_j and minimises f_i(θ) − λ cos(θ, θ̄_i).
    Clients that have not trained are in no mix.

    Limits: `lam=0` with an α far above all similarities is FedAvg where all take part; with an α near 0, every client
    takes from the most similar model alone, its own: Local. Clients with equal similarities begin with the mean of all
    by samples. New clients: that mean, with which those who have not trained yet begin, too.

    Deviations: the mix is of the last models of all clients that have trained, the release's of the round's
    participants; it counts similarities above 0.9 as 1. The release adds λ cos, which turns models away from their
    mixes: `lam=-0.01`.
    """

    name: ClassVar[str] = "pfedgraph"
    title: ClassVar[str] = "pFedGraph"
    paper: ClassVar[str] = "Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs, ICML 2023"
    shared_part: ClassVar[str] = "a mix of similar models for each client"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"theta": Each()}
    keeps_model: ClassVar[bool] = True

    alpha: float = Field(0.8, gt=0, description="how much mixes keep to the numbers of samples, α")
    lam: float = Field(0.01, description="pull of the cosine towards the mix, λ (negative: away from it, as released)")
    search: ClassVar[Search] = {"alpha": "0.1..10:log"}

    def start(self, server: Server) -> None:
        server.state["theta"] = server.initial  # the mean of all models by samples
        server.state["S"] = server.pairs(double=True).fill_diagonal_(1.0)
        server.state["trained"] = torch.zeros(server.n_clients, dtype=torch.bool, device="cpu")

    def broadcast(self, server: Server) -> Message:
        return {"theta": server.state["theta"]}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        if not server.state["trained"].any():
            return {client: self.broadcast(server) for client in server.participants}
        mixes = server.mixed(self.weights(server, server.participants).to(server.initial), "theta")
        return {client: {"theta": mix} for client, mix in zip(server.participants, mixes, strict=True)}

    def weights(self, server: Server, clients: list[int]) -> Tensor:
        """Compute the weights a_ij of these clients (rows) for the models of all; zeros if nobody has trained."""
        S, trained = server.state["S"], server.state["trained"]
        a = torch.zeros_like(S[clients])
        if trained.any():
            a[:, trained] = onto_simplex(self.shares(server)[trained] + S[clients][:, trained] / (2 * self.alpha))
        return a

    def shares(self, server: Server) -> Tensor:
        """Compute the share of every client in the samples of those that have trained, p."""
        n = server.n_samples.cpu() * server.state["trained"]
        return n.double() / n.sum().clamp(min=1)

    def train(self, client: Client, message: Message) -> Message:
        mix, layout = message["theta"], client.layout
        pulled = client.round > 1 and self.lam  # at first there is nobody to be pulled to

        def pull(theta: Tensor) -> Tensor:  # −λ ∇cos(θ, θ̄)
            return -self.lam * cosine_gradient(*map(layout.without_buffers, (theta, mix)))

        client.state["theta"] = client.descend(mix, correction=pull if pulled else None)
        return {"theta": client.state["theta"]}

    def receive(self, server: Server, total: Total) -> None:
        for client, theta in total.each("theta").items():
            server.keep(client, {"theta": theta})
        S, trained = server.state["S"].clone(), server.state["trained"].clone()
        new = ways(server, total.rows("theta"))
        for clients, models in server.kept("theta"):  # only rows that changed
            S[total.clients, clients] = (new @ ways(server, models).T).cpu().double()
        S[:, total.clients] = S[total.clients].T
        trained[total.clients] = True
        server.state |= {"S": S.fill_diagonal_(1.0), "trained": trained}
        server.state["theta"] = server.mixed(self.shares(server)[None].to(server.initial), "theta")[0]

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        """Record the similarities, and the weights that they give for all clients."""
        return {"S": server.state["S"], "weights": self.weights(server, [*range(server.n_clients)])}


def onto_simplex(points: Tensor) -> Tensor:
    """Project each row onto the simplex: take off what is the same for all entries, so that the positive ones add up
    to 1."""
    highest = points.sort(dim=1, descending=True).values
    counts = torch.arange(1, points.shape[1] + 1, device=points.device)
    excess = (highest.cumsum(1) - 1) / counts  # of the k highest, for each of them
    last = (highest > excess).sum(1, keepdim=True) - 1
    return (points - excess.gather(1, last)).clamp(min=0)


def ways(server: Server, models: Tensor) -> Tensor:
    """Compute the directions in which models have gone from the initial vector."""
    return normalize(server.layout.without_buffers(models - server.initial), dim=1)


def cosine_gradient(theta: Tensor, other: Tensor) -> Tensor:
    """Compute the gradient of cos(θ, other) by θ."""
    length, along = theta.norm().clamp(min=1e-12), normalize(other, dim=0)
    gradient: Tensor = (along - theta * (theta @ along) / length.square()) / length
    return gradient

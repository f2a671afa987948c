"""FedACS: every client begins with a mix of the models most similar to its own."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Each, Message, Method, Search, Server, Total, Uploads
from fedtailor.training.schedule import Schedule, value_at


class FedACS(Method):
    """Each participant begins with a mix of the clients' last models by their cosine similarity (Chen et al.).

    Only similarities above the p-quantile δ of all of them count (Eq. 4), and only positive ones: with a low p, δ can
    be negative, and a model that points the other way never helps. Where nothing is above δ (ties at 1), a client keeps
    its own model. A client that has never trained counts with the network's initial vector, unless `trained_only`: with
    few participants in a round the first rounds are Local's, as the initial vectors are most of S.

    New clients: the network's initial vector, as with Local. Limits: `server_step=0`, or δ at least every similarity to
    others, is Local; equal models give their mean, FedAvg with equal weights.
    """

    name: ClassVar[str] = "fedacs"
    paper: ClassVar[str] = "Chen, Li, Shen, Personalized Federated Learning with Attention-Based Client Selection"
    shared_part: ClassVar[str] = "a mix of similar models for each client"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"w": Each()}

    quantile: float = Field(0.5, ge=0, le=1, description="quantile of the similarities that is the threshold, p")
    server_step: Schedule = Field(1.0, description="step of the server towards the mix, α_k (Eq. 3; 1 is Eq. 4)")
    client_step: Schedule | None = Field(None, description="step of the clients, β_k; by default the experiment's lr")
    trained_only: bool = Field(False, description="compare and mix the models of clients that have trained alone")
    search: ClassVar[Search] = {"quantile": "0.1..0.9"}

    def start(self, server: Server) -> None:
        server.state["S"] = server.pairs(1.0, double=True)  # all begin with the same model
        server.state["trained"] = torch.zeros(server.n_clients, dtype=torch.bool, device="cpu")

    def send_all(self, server: Server) -> Mapping[int, Message]:
        step = value_at(self.server_step, server.round)
        weights = self.weights(server, server.participants) * step  # Eq. 4 (Eq. 3 with its step)
        for row, client in enumerate(server.participants):
            weights[row, client] += 1 - step
        mixes = server.mixed(weights.to(server.initial), "w")
        return {client: {"u": u} for client, u in zip(server.participants, mixes, strict=True)}

    def weights(self, server: Server, clients: list[int]) -> Tensor:
        """Compute the thresholded, normalised scores ŝ_ij of these clients (rows) for all models."""
        S = server.state["S"][clients]
        apart = 1 - S
        rounding = 32 * torch.finfo(server.initial.dtype).eps  # equal similarities differ in the last bits of 1 − s
        margin = (1 - self.threshold(server)) * (1 - rounding)
        scores = S.where((apart < margin) & (S > 0) & self.counted(server), S.new_zeros(()))
        for row, client in enumerate(clients):
            if not scores[row].any():
                scores[row, client] = 1.0
        return scores / scores.sum(1, keepdim=True)

    def threshold(self, server: Server) -> float:
        """Compute δ, the p-quantile of all similarities; 1 if there are none yet."""
        counted = self.counted(server)
        S = server.state["S"][counted][:, counted].numpy()
        return float(np.quantile(S, self.quantile)) if S.size else 1.0

    def counted(self, server: Server) -> Tensor:
        """Say of each client whether its model counts."""
        return server.state["trained"] | (not self.trained_only)

    def train(self, client: Client, message: Message) -> Message:
        lr = client.optimizer.lr if self.client_step is None else value_at(self.client_step, client.round)
        client.state["w"] = client.descend(message["u"], lr=lr)  # Eq. 5
        return {"w": client.state["w"]}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor:
        return message["u"]

    def receive(self, server: Server, total: Total) -> None:
        for client, w in total.each("w").items():
            server.keep(client, {"w": w})
        trained = server.state["trained"].clone()
        trained[total.clients] = True
        server.state |= {"S": self.compared(server, total.clients, total.rows("w")), "trained": trained}

    def join(self, server: Server, before: int) -> None:
        """New clients count with the initial vector, as those that have not trained yet."""
        super().join(server, before)
        joining = [*range(before, server.n_clients)]
        server.state["S"] = self.compared(server, joining, server.initial.repeat(len(joining), 1))

    def compared(self, server: Server, changed: list[int], models: Tensor) -> Tensor:
        """Compute the similarities anew for these clients, whose models these are."""
        S = server.state["S"].clone()
        new, lengths = directions(server.layout.without_buffers(models))
        centre = new.mean(0)
        new.sub_(centre)
        for clients, vectors in server.kept("w"):  # only rows that changed
            others, other_lengths = directions(server.layout.without_buffers(vectors))
            found = cosines(new, others.sub_(centre))
            known = (lengths * other_lengths.T > 0).cpu()  # a model of zeros is similar to nothing else
            S[changed, clients.start : clients.stop] = found.where(known, 0.0)
        S[:, changed] = S[changed].T
        return S.fill_diagonal_(1.0)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state.get("w", client.initial)

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        """Record the similarities, δ, and the weights ŝ that they give for all clients."""
        S, everybody = server.state["S"], [*range(server.n_clients)]
        delta = S.new_tensor(self.threshold(server))
        return {"S": S, "threshold": delta, "weights": self.weights(server, everybody)}


def directions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Divide vectors by their lengths, in place; return both."""
    lengths = vectors.norm(dim=1, keepdim=True)
    return vectors.div_(lengths.clamp(min=1e-12)), lengths


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Compute the cosines between directions from what is left of them without a common centre.

    1 − cos = ½‖x − y‖², whatever the centre. So 1 − cos has the relative precision of the vectors' type, however near 1
    the cosine is; a product of the directions themselves has that of the cosine.
    """
    lengths, others, products = (part.cpu().double() for part in (one.norm(dim=1), other.norm(dim=1), one @ other.T))
    return 1 - (lengths.square()[:, None] + others.square() - 2 * products).clamp(min=0) / 2

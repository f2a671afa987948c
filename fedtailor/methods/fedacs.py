"""FedACS: every client begins with a mix of the models most similar to its own."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.method import Client, Each, Message, Method, Server, Total, Uploads


class FedACS(Method):
    """Each participant begins with a mix of the clients' last models by their cosine similarity (Chen et al.).

    Only similarities above the p-quantile δ of all of them count (Eq. 4), and only positive ones: with a low p, δ can
    be negative, and a model that points the other way never helps. Where nothing is above δ (ties at 1), a client keeps
    its own model.

    New clients: the network's initial vector, as with Local. Limits: `server_step=0`, or δ at least every similarity to
    others, is Local; equal models give their mean, FedAvg with equal weights.
    """

    name: ClassVar[str] = "fedacs"
    paper: ClassVar[str] = "Chen, Li, Shen, Personalized Federated Learning with Attention-Based Client Selection"
    shared_part: ClassVar[str] = "a mix of similar models for each client"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"w": Each()}

    quantile: float = Field(0.5, ge=0, le=1, description="quantile of the similarities that is the threshold, p")
    server_step: float = Field(1.0, ge=0, description="step of the server towards the mix, α_k (Eq. 3; 1 is Eq. 4)")

    def start(self, server: Server) -> None:
        server.state["S"] = server.initial.new_ones(server.n_clients, server.n_clients)  # all begin with the same model

    def send_all(self, server: Server) -> Mapping[int, Message]:
        weights = self.weights(server.state["S"], server.participants) * self.server_step  # Eq. 4 (Eq. 3 with its step)
        for row, client in enumerate(server.participants):
            weights[row, client] += 1 - self.server_step
        mixes = server.mixed(weights, "w")
        return {client: {"u": u} for client, u in zip(server.participants, mixes, strict=True)}

    def weights(self, S: Tensor, clients: list[int]) -> Tensor:
        """Compute the thresholded, normalised scores ŝ_ij of these clients (rows) for all models."""
        delta, scores = self.threshold(S), S[clients]
        rounding = 32 * torch.finfo(scores.dtype).eps  # equal similarities differ in their last bits
        scores = scores.where((scores > delta + rounding) & (scores > 0), scores.new_zeros(()))
        for row, client in enumerate(clients):
            if not scores[row].any():
                scores[row, client] = 1.0
        return scores / scores.sum(1, keepdim=True)

    def threshold(self, S: Tensor) -> float:
        """Compute δ, the p-quantile of all similarities."""
        return float(np.quantile(S.cpu().numpy(), self.quantile))

    def train(self, client: Client, message: Message) -> Message:
        client.state["w"] = client.descend(message["u"])  # Eq. 5
        return {"w": client.state["w"]}

    def receive(self, server: Server, total: Total) -> None:
        for client, w in total.each("w").items():
            server.keep(client, {"w": w})
        changed, S = total.clients, server.state["S"].clone()
        new = server.layout.without_buffers(total.rows("w"))
        normalize(new, out=new)
        for clients, vectors in server.kept("w"):  # only rows that changed
            vectors = server.layout.without_buffers(vectors)
            S[changed, clients.start : clients.stop] = new @ vectors.T / vectors.norm(dim=1).clamp(min=1e-12)
        S[:, changed] = S[changed].T
        server.state["S"] = S.fill_diagonal_(1.0)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state.get("w", client.initial)

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        """Record the similarities, δ, and the weights ŝ that they give for all clients."""
        S = server.state["S"]
        return {"S": S, "threshold": S.new_tensor(self.threshold(S)), "weights": self.weights(S, [*range(len(S))])}

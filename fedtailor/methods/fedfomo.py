"""FedFomo: each client weighs other clients' models by what they do for its own validation loss."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Each, Message, Method, Search, Server, Total, Uploads


class FedFomo(Method):
    """Each participant gets M other clients' models and mixes those that lower its validation loss (Zhang et al. 2021).

    θ is the model with which a client began its last round, θ_i what its training made of it, θ_j the others' last
    models. Every θ_n of them (its own θ_i too) has the weight w_n = (F(θ) − F(θ_n)) / ‖θ_n − θ‖ with F the loss on the
    client's validation samples (on its training samples if it has none). The client goes on from θ + Σ_n w̄_n (θ_n − θ)
    with w̄_n = max(w_n, 0) / Σ max(w, 0), from θ itself if no weight is positive, and descends. The server sends the
    models with the largest affinity P_ij, with probability ε a random one in place of the best, and adds the uploaded
    w_n to P_i. Only clients that have uploaded are sent; distances are between parameters (no BatchNorm buffers).

    Limit: `models=0` is Local that takes back a round which did not lower its validation loss; it is Local if all do.

    New clients: the plain mean of all clients' last models.
    """

    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = (
        "Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021"
    )
    shared_part: ClassVar[str] = "other clients' models"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"theta": Each(), "weights": Each(), "clients": Each()}
    keeps_model: ClassVar[bool] = True

    models: int = Field(5, ge=0, description="other clients' models that a participant gets, M")
    exploration: float = Field(0.3, ge=0, le=1, description="probability of a random model for the best one, ε")
    exploration_decay: float = Field(0.05, ge=0, description="by how much ε falls each round, down to 0")
    search: ClassVar[Search] = {"models": "1..10"}

    def start(self, server: Server) -> None:
        server.state["P"] = server.pairs().fill_diagonal_(1.0)
        server.state["uploaded"] = torch.zeros(server.n_clients, dtype=torch.bool, device=server.initial.device)

    def broadcast(self, server: Server) -> Message:
        uploaded = server.state["uploaded"]
        if not uploaded.any():
            return {"theta": server.initial}
        weights, mean = uploaded.to(server.initial) / uploaded.sum(), torch.zeros_like(server.initial)
        for clients, vectors in server.kept("theta"):
            mean += weights[clients] @ vectors
        return {"theta": mean}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        chosen = self._choose(server)
        needed = sorted(set().union(*chosen.values()))  # a model that is on disk is read once
        models = dict(zip(needed, server.kept_of(needed, "theta"), strict=True))
        none = server.initial.new_empty(0, len(server.initial))
        return {
            client: {
                "clients": torch.tensor(others, dtype=torch.int64, device=none.device),
                "models": torch.cat([none, *(models[other][None] for other in others)]),
            }
            for client, others in chosen.items()
        }

    def _choose(self, server: Server) -> dict[int, list[int]]:
        """Choose whose models go to each participant, ε-greedily by P."""
        epsilon = self.exploration - self.exploration_decay * (server.round - 1)
        P, uploaded = server.state["P"].cpu(), server.state["uploaded"].cpu()
        chosen: dict[int, list[int]] = {client: [] for client in server.participants}
        for client in server.participants:
            known = torch.randperm(server.n_clients, generator=server.random, device="cpu")  # so that ties are shuffled
            known = known[uploaded[known] & (known != client)]
            others = known[P[client, known].argsort(descending=True, stable=True)].tolist()
            for _ in range(min(self.models, len(others))):
                explore = float(torch.rand((), generator=server.random, device="cpu")) < epsilon
                pick = int(torch.randint(len(others), (), generator=server.random, device="cpu")) if explore else 0
                chosen[client].append(others.pop(pick))
        return chosen

    def train(self, client: Client, message: Message) -> Message:
        theta = client.state.get("start", client.initial)
        own = client.state.get("theta", client.initial)
        candidates = torch.cat([own[None], message["models"]])
        weights = self.weights(client, theta, candidates)
        useful = weights.clamp(min=0)
        if useful.any():
            theta = useful / useful.sum() @ candidates  # the weights add up to 1
        client.state |= {"start": theta, "theta": client.descend(theta)}
        return {"theta": client.state["theta"], "weights": weights, "clients": message["clients"]}

    def weights(self, client: Client, theta: Tensor, candidates: Tensor) -> Tensor:
        """Compute w_n = (F(θ) − F(θ_n)) / ‖θ_n − θ‖; 0 for a model that is θ."""
        data = client.validation_data if len(client.validation_data[1]) else client.train_data
        gains = client.loss(theta, data) - torch.stack([client.loss(other, data) for other in candidates])
        away = client.layout.without_buffers(candidates - theta)
        return (gains / away.square().sum(1).sqrt()).nan_to_num(0, 0, 0)

    def upload_like(self, server: Server, client: int) -> Message:
        known = server.state["uploaded"]
        models = min(self.models, int(known.sum()) - int(known[client]))
        numbers = torch.empty(models, dtype=torch.int64, device=server.initial.device)
        return {"weights": server.initial.new_empty(models + 1), "clients": numbers}

    def receive(self, server: Server, total: Total) -> None:
        P, uploaded = server.state["P"].clone(), server.state["uploaded"].clone()
        for client, theta in total.each("theta").items():
            server.keep(client, {"theta": theta})
            P[client, [client, *total.each("clients")[client].tolist()]] += total.each("weights")[client]
            uploaded[client] = True
        server.state |= {"P": P, "uploaded": uploaded}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        return {"P": server.state["P"]}

"""PGFed, PGFedMo and PGFed-CE: each client's own global objective, by first-order estimates of the others' risks."""

from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.method import Client, Message, Method, Replies, Server


class PGFed(Method):
    """Each client minimises f_i(θ) + μ Σ_j α_ij f_j(θ) with learned α_ij (Luo et al. 2023).

    The others' risks are first-order estimates from the last round's participants (Eq. 7), so a round costs five
    vectors a participant. Line numbers are Algorithm 1's. The personal model is the client's own last trained vector.

    `beta > 0` is PGFedMo. `efficient` is PGFed-CE, which the paper names and defines in an appendix that we do not
    have; it is our reading: the server sends the scalar ḡᵀθ in place of ḡ and, in place of the gradient that a client
    would upload, takes the mean gradient along its path, which it can form from the two models. Three vectors.

    New clients: the global model. Limits: `mu=0` is FedAvg's training; `beta=0` in PGFedMo is PGFed; round 1 is always
    FedAvg's.
    """

    name: ClassVar[str] = "pgfed"
    paper: ClassVar[str] = (
        "Luo et al., PGFed: Personalize Each Client's Global Objective for Federated Learning, ICCV 2023"
    )
    shared_part: ClassVar[str] = "the global model and sums of gradients"
    own_part: ClassVar[str] = "the last trained model"

    mu: float = Field(0.1, ge=0, description="weight of the others' risks, μ")
    alpha_lr: float = Field(0.01, ge=0, description="learning rate of the α_ij, η₂")
    beta: float = Field(0.0, ge=0, lt=1, description="momentum of the auxiliary gradient, β (PGFedMo: 0.5)")
    efficient: bool = Field(False, description="send less (PGFed-CE)")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.efficient and self.beta:
            raise ValueError("with efficient, beta must be 0, as the server has to know the auxiliary gradient")
        return self

    def start(self, server: Server) -> None:
        super().start(server)
        N, M = server.clients, server.per_round
        server.state["A"] = server.initial.new_full((N, N), 1 / M)  # lines 1-2
        server.state["last"] = torch.zeros(0, dtype=torch.int64, device=server.initial.device)  # last round's clients

    def send(self, server: Server, client: int) -> Message:
        message = dict(self.broadcast(server))
        if not len(server.state["last"]):
            return message  # round 1: FedAvg (line 8)
        mean = server.once("mean", lambda: self.mu * server.state["gradients"].mean(0))  # line 11
        auxiliary = self._auxiliary(server)[server.participants.index(client)]
        message |= {"auxiliary": auxiliary, "risks": server.state["risks"]}
        message["alpha"] = server.state["A"][client, server.state["last"]]
        return {**message, "slope": mean @ message["theta"]} if self.efficient else {**message, "mean": mean}

    def _auxiliary(self, server: Server) -> Tensor:
        """Line 10 for all participants at once: μ Σ_j α_ij ∇f_j(θ_j) over last round's j, as the rows of a matrix."""
        A, last, gradients = server.state["A"], server.state["last"], server.state["gradients"]
        return server.once("auxiliary", lambda: self.mu * A[server.participants][:, last] @ gradients)

    def train(self, client: Client, message: Message) -> Message:
        warm = "momentum/theta" in client.state
        if "auxiliary" not in message:
            theta, alpha = client.descend(message["theta"]), client.initial.new_empty(0)  # ClientUpdate, line 2
        else:
            theta, alpha = self._update(client, message)
        client.state["theta"] = theta
        reply = {"theta": theta, "alpha": alpha}
        if self.efficient:
            return {**reply, "loss": client.loss(theta), "path": theta.new_tensor(client.path(warm))}
        loss, gradient = client.loss_and_gradient(theta)
        return {**reply, "gradient": gradient, "risk": self.mu * (loss - gradient @ theta)}  # line 13

    def _update(self, client: Client, message: Message) -> tuple[Tensor, Tensor]:
        """ClientUpdate, lines 4-11."""
        auxiliary, alpha = message["auxiliary"], message["alpha"].clone()
        if self.beta:
            auxiliary = (1 - self.beta) * auxiliary + self.beta * client.state.get("auxiliary", auxiliary)  # line 6
            client.state["auxiliary"] = auxiliary

        def step(theta: Tensor) -> None:  # lines 9-10, after each step of line 8
            slope = message["slope"] if self.efficient else message["mean"] @ theta
            alpha.sub_(self.alpha_lr * (message["risks"] + slope)).clamp_(min=0)

        return client.descend(message["theta"], correction=auxiliary, each_step=step), alpha

    def receive(self, server: Server, replies: Replies) -> None:
        A, last = server.state["A"].clone(), server.state["last"]
        for client, reply in replies.items():  # line 16
            A[client, last] = reply["alpha"]
        kept = self._gradients(server, replies)
        theta, last = replies.mean("theta"), torch.tensor(list(replies), device=last.device)  # line 17
        server.state |= {**kept, "A": A, "last": last, "theta": theta}

    def _gradients(self, server: Server, replies: Replies) -> Message:
        """∇f_j and g⁽¹⁾_j as uploaded. PGFed-CE: what the server makes of the models alone, as (θ_glob − θ_i) / path is
        the mean of ∇f_i + g̃_i."""
        if not self.efficient:
            return {"gradients": replies.stack("gradient"), "risks": replies.stack("risk")}
        thetas, path = replies.stack("theta"), replies.stack("path")[:, None]
        gradients = server.parameters_of((server.state["theta"] - thetas) / path)
        if len(server.state["last"]):
            gradients -= self._auxiliary(server)[[server.participants.index(client) for client in replies]]
        return {"gradients": gradients, "risks": self.mu * (replies.stack("loss") - (gradients * thetas).sum(1))}

    def personal(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]

    def observe(self, server: Server) -> Message:
        """A, its change, and how the change of its columns (help given) and rows (help needed) goes with the clients'
        training samples (Figure 3)."""
        change = server.state["A"] - 1 / server.per_round
        rows = torch.stack([server.samples.to(change), change.mean(0), change.mean(1)])
        rows = normalize(rows - rows.mean(1, keepdim=True))
        return {"A": server.state["A"], "change": change, "correlation": rows[1:] @ rows[0]}

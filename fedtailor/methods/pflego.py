"""PFLEGO: exact stochastic gradient descent on a shared body and personal heads."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import OWN_STEP, Client, Mean, Message, Method, Search, Server, Total, Uploads
from fedtailor.training.client import HeadStart
from fedtailor.training.schedule import Schedule, value_at


class PFLEGO(Method):
    """Participants fit their heads, then one joint gradient moves heads and body (Nikoloutsopoulos et al. 2023).

    The first τ−1 steps touch the head alone and run on features that are computed once, so a round costs two passes
    over the data whatever τ is. θ is the body, W_i the head.

    New clients: the shared body under an initial head. Limits: `inner_steps=1` with all clients is a step of gradient
    descent on the joint loss for the body, and on each client's own loss for its head (Eq. 3 has no a_i, unlike Eq. 5);
    averaged over all sets of participants, an update is the full one (Proposition 1).

    The authors' release divides by the samples of the participants where Eq. 4 has those of all clients, and uses Adam
    at the server, under which that makes no difference: `released_weights`, `server_optimizer="adam"`.

    Privacy: the head never leaves, and of whole clients needs no noise. Of single samples it has noise too: the body's
    gradient depends on a head that one sample has moved. All τ gradients are by all samples: sampling gains nothing.
    """

    name: ClassVar[str] = "pflego"
    paper: ClassVar[str] = (
        "Nikoloutsopoulos et al., Personalized Federated Learning with Exact Distributed Stochastic Gradient Descent "
        "Updates, ALA 2023"
    )
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head"
    personal_head: ClassVar[bool] = True
    uploads: ClassVar[Uploads] = {"gradient": Mean("samples")}
    refuses: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("optimizer", "clip"), "its steps are its own, along exact gradients"),
        **OWN_STEP,
        **dict.fromkeys(("schedule", "step_schedule"), "head_lr and joint_lr are schedules of its own"),
    }

    inner_steps: int = Field(50, ge=1, description="gradient steps of a participant, τ")
    head_lr: Schedule = Field(0.1, description="learning rate of the first τ−1 steps, β (release: 0.007)")
    joint_lr: Schedule = Field(0.1, description="learning rate of the joint step, ρ_t (release: 0.003, with Adam)")
    server_optimizer: Literal["sgd", "adam"] = Field(
        "sgd", description="the server's optimiser: Eq. 4, or the release's Adam"
    )
    released_weights: bool = Field(False, description="weigh by the participants' samples, as the release does")
    head_start: HeadStart = Field(
        "network", description="a head's initial values: the network's, or uniform in [0, 1) as in the release"
    )
    search: ClassVar[Search] = {"lr": None, "head_lr": "0.001..3:log", "joint_lr": "0.001..3:log"}

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def broadcast(self, server: Server) -> Message:
        return {"body": server.state["body"]}

    def train(self, client: Client, message: Message) -> Message:
        theta = self.personal_model(client, message)
        if self.inner_steps > 1:  # W_i ← W_i − β ∇ℓ_i, on cached features
            steps, lr = self.inner_steps - 1, value_at(self.head_lr, client.round)
            theta = client.descend(
                theta, part=client.head, steps=steps, lr=lr, batch=None, momentum=0.0, weight_decay=0.0
            )
        gradient = client.gradient(theta)
        rate = value_at(self.joint_lr, client.round) / client.participation
        client.state["head"] = theta[client.head] - rate * gradient[client.head]  # Eq. 3
        return {"gradient": gradient[client.body]}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"gradient": server.state["body"]}

    def receive(self, server: Server, total: Total) -> None:
        # The mean is over the participants' samples, Eq. 4 over those of all clients.
        share = 1.0 if self.released_weights else total.share(server, "samples")
        gradient = server.n_clients / server.per_round * share * total["gradient"]
        server.step("body", gradient, value_at(self.joint_lr, server.round), self.server_optimizer)  # Eq. 4

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return torch.cat([message["body"], client.own_head(self.head_start)])

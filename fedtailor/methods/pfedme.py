"""pFedMe: personal models on the Moreau envelopes of the clients' risks."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Search, Server, Total, Uploads


class PFedMe(Method):
    """A client's model θ̃_i minimises f_i(θ) + λ/2 ‖θ − w_i‖² near its copy w_i of the global one (T. Dinh et al. 2020).

    Algorithm 1: w_i begins at w; on each batch θ̃ takes K gradient steps (line 7), then w_i ← w_i − ηλ (w_i − θ̃)
    (line 8); the server makes w ← (1−β) w + β · the plain mean of the participants' w_i. The personal model is the last
    θ̃_i, never w_i. The K steps take the experiment's rate, momentum and weight decay, η is `outer_lr`. They begin at w
    in a round's first batch and at the last θ̃ in the others, as in the authors' release. In the paper all clients work
    in every round and the sampled ones upload; here only those work that are called.

    Limits: with `lam=0`, `outer_lr=0` or `beta=0`, w stays; with `lam=0` and `prox_steps=1`, θ̃_i is a plain local
    descent from it. With `prox_steps=1`, `outer_lr · lam = 1` and `beta=1`, w is FedAvg's with equal weights. With many
    steps on a quadratic, θ̃_i = (H + λI)⁻¹ (Hc + λ w_i).

    The defaults are ours and flatter it; the authors have λ = 15, η = 0.005, a personal rate of 0.09 and K = 5.

    Privacy of single samples: each of the K gradients has noise and a Poisson batch of its own, as w_i depends on them.

    New clients: K steps towards the prox point around w, on all their training samples (no momentum, no weight decay).
    """

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    paper: ClassVar[str] = "T. Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    shared_part: ClassVar[str] = "the global model w"
    own_part: ClassVar[str] = "the model θ̃_i, held near it"

    uploads: ClassVar[Uploads] = {"theta": Mean("equal")}
    keeps_model: ClassVar[bool] = True

    lam: float = Field(1.0, ge=0, description="pull of the personal model towards w_i, λ")
    prox_steps: int = Field(5, ge=1, description="gradient steps towards the prox point on each batch, K")
    outer_lr: float = Field(0.5, ge=0, description="learning rate of w_i, η (with λ: its share ηλ of the way to θ̃)")
    beta: float = Field(1.0, ge=0, description="step of the server towards the mean of the w_i, β")
    search: ClassVar[Search] = {"lam": "0.1..15:log", "outer_lr": "0.005..1:log"}

    def train(self, client: Client, message: Message) -> Message:
        w = theta = message["theta"]
        for batch in client.batches():
            for _ in range(self.prox_steps):  # line 7
                theta = client.step(theta, client.gradient(theta, batch) + self.lam * (theta - w), name="personal")
            w = client.layout.copy_buffers(w.lerp(theta, self.outer_lr * self.lam), theta)  # line 8
        client.state["personal"] = theta
        return {"theta": w}

    def receive(self, server: Server, total: Total) -> None:
        w, mean = server.state["theta"], total["theta"]
        # Buffers are the mean's: beyond it (β > 1) a variance could be negative.
        server.state["theta"] = server.layout.copy_buffers(w.lerp(mean, self.beta), mean)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        if "personal" in client.state:
            return client.state["personal"]
        w = theta = message["theta"]
        new = client.fresh()
        new.optimizer = replace(new.optimizer, momentum=0.0, weight_decay=0.0)
        for _ in range(self.prox_steps):
            theta = new.step(theta, new.gradient(theta) + self.lam * (theta - w))
        return theta

"""FedRoD: a generic head, balanced over classes, and a personal one on top that knows how often each one occurs."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear

from fedtailor.method import Batch, Client, Message, Method, Search
from fedtailor.training.optimizer import optimizer_step


class FedRoD(Method):
    """Body and generic head learn by a balanced softmax, a personal head on top by the plain loss (Chen & Chao 2022).

    Body θ and generic head ψ are trained with logits + γ log N_c, N_c the client's samples of class c, and averaged. A
    class that a client lacks takes no part in its softmax (N_c^γ counts as the smallest positive number). In the same
    steps the personal head φ, which never leaves, learns by the plain loss of the sum of both heads' logits, through
    which nothing flows back into θ and ψ. Both heads are linear: the personal model is θ with the one head ψ + φ.

    Limits: `gamma=0` is FedAvg for θ and ψ; so is, but for rounding, a federation whose clients have as many samples
    of each class. New clients: φ = 0, the generic model.

    The paper's `linear` variant; its hypernetwork that makes φ from the class distribution is not here. φ begins at
    zero, so that the personal model begins as the generic one (public code begins at a copy of ψ, or at random).
    """

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = (
        "Chen & Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022"
    )
    shared_part: ClassVar[str] = "the body and a generic head"
    own_part: ClassVar[str] = "a personal head, added to it"

    refuses: ClassVar[Mapping[str, str]] = {
        "label_smoothing": "it would ask for classes that a client lacks, which its balanced softmax leaves out"
    }

    gamma: float = Field(1.0, ge=0, description="power of the class sizes in the balanced softmax, γ (0: plain loss)")
    search: ClassVar[Search] = {"gamma": "0..1"}

    def train(self, client: Client, message: Message) -> Message:
        client.layout.linear_head(self.title)  # no other head can be added to
        prior = self._prior(client)
        zero = torch.zeros_like(client.initial[client.head])
        phi = client.state.get("phi", zero).clone().requires_grad_()
        moments, factors = client.moments("phi", zero), client.optimizer.factors(client.n_steps)

        def objective(batch: Batch) -> Tensor:
            features, generic = batch.features, batch.outputs
            both = generic.detach() + linear(features.detach(), *client.layout.head_weights(phi))
            return batch.loss_function(generic + prior, batch.y) + batch.loss_function(both, batch.y)

        def step(_: Tensor) -> None:  # φ, by the gradient of the same pass
            assert phi.grad is not None
            optimizer_step(phi, phi.grad, moments, client.optimizer, next(factors))
            phi.grad = None

        theta = client.descend(message["theta"], objective=objective, each_step=step)
        client.state["phi"] = phi.detach()
        return {"theta": theta}

    def _prior(self, client: Client) -> Tensor:
        """Compute γ log N_c for every class."""
        sizes = client.class_counts**self.gamma
        return sizes.clamp(min=torch.finfo(sizes.dtype).tiny).log()

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta = message["theta"]
        if "phi" in client.state:
            theta = torch.cat([theta[client.body], theta[client.head] + client.state["phi"]])
        return theta

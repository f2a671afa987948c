"""Per-FedAvg: a global model from which one step adapts to any client."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Batch, Client, Message, Method, Search


class PerFedAvg(Method):
    """Learn the global model that is best after one gradient step on each client's own data (Fallah et al. 2020).

    Algorithm 1: a local step is θ ← θ − β (I − α∇²f(θ; D″)) ∇f(θ − α∇f(θ; D); D′) with three independent batches. By
    default the Hessian is left out (FO in the paper); `first_order=False` takes its exact product, for twice the work,
    and wants a small α on small batches. β is the experiment's rate, α is `inner_lr`. The personal model is
    θ − α∇f_i(θ), one step over all of the client's training samples. The average is weighted by samples, as FedAvg's;
    the paper's is plain.

    Limit: `inner_lr=0` is FedAvg, with or without the Hessian.

    New clients: the same step on their own data, for which the method is made.
    """

    name: ClassVar[str] = "per-fedavg"
    title: ClassVar[str] = "Per-FedAvg"
    paper: ClassVar[str] = (
        "Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic "
        "Meta-Learning Approach, NeurIPS 2020"
    )
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "one gradient step from it"

    inner_lr: float = Field(0.1, ge=0, description="learning rate of the adaptation step, α")
    first_order: bool = Field(True, description="leave the Hessian out of the meta-gradient, FO")
    search: ClassVar[Search] = {"inner_lr": "0.001..0.5:log"}

    def train(self, client: Client, message: Message) -> Message:
        theta = message["theta"]
        inner, curvature = client.batches(purpose="inner"), client.batches(purpose="curvature")
        for D, D3, D2 in zip(inner, curvature, client.batches(), strict=True):  # D, D″ and D′: FedAvg's own batches
            theta = client.step(theta, self.meta_gradient(client, theta, D, D2, D3))
        return {"theta": theta}

    def meta_gradient(self, client: Client, theta: Tensor, D: Batch, D2: Batch, D3: Batch) -> Tensor:
        """Compute (I − α∇²f(θ; D″)) ∇f(θ − α∇f(θ; D); D′)."""
        if not self.inner_lr:
            return client.gradient(theta, D2)
        adapted = theta - self.inner_lr * client.gradient(theta, D)
        gradient = client.gradient(adapted, D2)
        if self.first_order:
            return gradient
        return gradient - self.inner_lr * client.hessian_product(theta, gradient, D3)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return message["theta"] - self.inner_lr * client.gradient(message["theta"])

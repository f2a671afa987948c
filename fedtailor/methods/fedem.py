"""FedEM: every client's data are a mixture of common components, with weights of its own."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.method import Batch, Client, Message, Method, Search, Server
from fedtailor.training.inputs import Inputs


class FedEM(Method):
    """Several common models, mixed by each client in proportions of its own, by expectation-maximisation (Marfoq et al.
    2021).

    The samples of client i come from M components in the proportions π_i, which it keeps. In a round it computes how
    probable each component is for each of its samples, q_km ∝ π_im exp(−ℓ(θ_m; x_k, y_k)), takes the mean of q_k for
    its π_i, and descends from every θ_m on the loss (1/n) Σ_k q_km ℓ(θ_m; x_k, y_k). The server averages each component
    by samples. The prediction is Σ_m π_im softmax(f_m).

    Limits: `components=1` is FedAvg. New clients: the same prediction, with the π that their own samples give from
    equal ones in `fitting` steps.

    Deviations: the losses in q are those of the received models in evaluation mode. `personal_model` is the component
    that counts most, for what takes one network alone.
    """

    name: ClassVar[str] = "fedem"
    title: ClassVar[str] = "FedEM"
    paper: ClassVar[str] = "Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021"
    shared_part: ClassVar[str] = "the components of the mixture"
    own_part: ClassVar[str] = "the proportions π of the components"
    refuses: ClassVar[Mapping[str, str]] = {"class_weights": "it weighs each sample by its own probabilities"}

    components: int = Field(2, ge=1, description="number of components, M (paper: 3)")
    fitting: int = Field(10, ge=1, description="steps of expectation-maximisation for the π of a new client")
    search: ClassVar[Search] = {"components": "2..5"}

    def start(self, server: Server) -> None:
        theta = torch.stack([server.initial_for(m) for m in range(self.components)])
        if self.components > 1 and torch.equal(theta[0], theta[1]):
            raise FedtailorError(
                "The components begin equal: the network's layers have no reset_parameters, or are pretrained."
            )
        server.state["theta"] = theta

    def train(self, client: Client, message: Message) -> Message:
        theta = message["theta"]
        losses = self.losses(client, theta)
        q = posterior(losses, client.state.get("pi", self.equal(theta)))
        client.state["pi"] = q.mean(0)

        def of(m: int) -> Tensor:
            def objective(batch: Batch) -> Tensor:
                weights = q[:, m] if batch.indices is None else q[batch.indices, m]
                return (weights * each_loss(client, batch.outputs, batch.y)).mean()

            own = None if self.components == 1 else objective
            return client.descend(theta[m], objective=own, name=f"component-{m}")

        return {"theta": torch.stack([of(m) for m in range(self.components)])}

    def losses(self, client: Client, theta: Tensor) -> Tensor:
        """Compute the loss of each training sample (rows) under each component (columns)."""
        assert len(client.class_counts)  # which refuses targets that are no classes
        y = client.train_data[1]
        return torch.stack([each_loss(client, client.outputs(vector), y) for vector in theta], 1)

    def equal(self, theta: Tensor) -> Tensor:
        """Return the proportions that a client begins with."""
        return theta.new_full((self.components,), 1 / self.components)

    def proportions(self, client: Client, theta: Tensor) -> Tensor:
        """Return π of a client: the last one, or what its samples give if it never took part."""
        if "pi" in client.state:
            return client.state["pi"]
        losses, pi = self.losses(client, theta), self.equal(theta)
        for _ in range(self.fitting):
            pi = posterior(losses, pi).mean(0)
        return pi

    def predict(self, client: Client, message: Message, x: Inputs) -> Tensor:
        theta = message["theta"]
        pi = self.proportions(client, theta)
        mixture = sum(share * client.outputs(vector, x).softmax(1) for share, vector in zip(pi, theta, strict=True))
        assert isinstance(mixture, Tensor)
        return mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()

    def personal_model(self, client: Client, message: Message) -> Tensor:
        most: Tensor = message["theta"][self.proportions(client, message["theta"]).argmax()]
        return most

    def global_model(self, server: Server) -> None:
        return None


def posterior(losses: Tensor, pi: Tensor) -> Tensor:
    """Compute q_km, how probable component m is for sample k."""
    return (pi.clamp(min=torch.finfo(pi.dtype).tiny).log() - losses).softmax(1)


def each_loss(client: Client, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the loss of each sample for itself."""
    found: Tensor = torch.func.vmap(lambda f, label: client.loss_function(f[None], label[None]))(outputs, y)
    return found

"""FedAS: a received body is first aligned with the client's last one, and well-trained bodies weigh more."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Batch, Client, Mean, Message, Method, Search, Server, Total, Uploads
from fedtailor.training.private_gradients import squared_norms


class FedAS(Method):
    """A shared body, aligned by each client and averaged by Fisher traces, and personal heads (Yang et al. 2024).

    Parameter alignment: the received body φ descends for an epoch on Σ_c MSE(φ(x_c), μ_c), where the μ_c are the means
    of each class's features under the body that the client itself had trained last. Then φ and the client's own head
    are trained together. Client synchronisation: the server's mean weighs each body by tr F_i, F_i the empirical Fisher
    information of the trained model.

    Limits: `align_epochs=0` with `weighting="samples"` trains as FedPer does. A head that is the whole
    network is Local. New clients: the shared body under an initial head.

    Deviations: tr F_i is the mean of the single samples' squared gradients; the release adds up those of whole batches,
    which grows with their number and shrinks with their size (`weighting="batches"`). A client without a model of its
    own aligns nothing; the release takes the initial model for it. The heads stay at the clients; the release averages
    them too, and no client uses the mean.
    """

    name: ClassVar[str] = "fedas"
    paper: ClassVar[str] = (
        "Yang, Huang & Ye, FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024"
    )
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head, and a body that is aligned with its last one"
    personal_head: ClassVar[bool] = True
    keeps_model: ClassVar[bool] = True

    align_epochs: int = Field(1, ge=0, description="epochs of the alignment (0: none)")
    align_lr: float = Field(0.01, gt=0, description="learning rate of the alignment")
    weighting: Literal["fisher", "batches", "samples"] = Field(
        "fisher",
        description="weights of the mean: tr F_i; as released, by the gradients of batches; or the numbers of samples",
    )
    search: ClassVar[Search] = {"align_lr": "0.001..1:log"}

    @property
    def uploads(self) -> Uploads:  # type: ignore[override]
        return {"body": Mean("samples" if self.weighting == "samples" else "fisher")}

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(self.aligned(client, torch.cat([message["body"], own_head(client)])))
        client.state["theta"] = theta
        if self.align_epochs and client.body.stop:
            client.state["means"] = client.class_means(client.flat_features(theta))
        upload = {"body": theta[client.body]}
        return upload if self.weighting == "samples" else {**upload, "fisher": self.fisher_trace(client, theta)}

    def aligned(self, client: Client, theta: Tensor) -> Tensor:
        """Draw the features of the received body to the class means μ_c under the client's last one."""
        if "means" not in client.state or not self.align_epochs:
            return theta
        mu = client.state["means"]

        def objective(batch: Batch) -> Tensor:  # Σ_c MSE(φ(x_c), μ_c) over the classes of the batch
            errors = (batch.features.flatten(1) - mu[batch.y]).square().mean(1)
            return (errors / batch.y.bincount()[batch.y]).sum()

        return client.descend(
            theta,
            objective=objective,
            name="alignment",
            purpose="alignment",
            lr=self.align_lr,
            epochs=self.align_epochs,
            steps=None,
            momentum=0.0,
            weight_decay=0.0,
        )

    def fisher_trace(self, client: Client, theta: Tensor) -> Tensor:
        """Compute tr F_i = 1/n Σ_k ‖∇ℓ_k(θ)‖², or the release's Σ_b ‖∇ f_b(θ)‖² over batches b."""
        if self.weighting == "fisher":
            return squared_gradients(client, theta).mean()
        batches = client.batches(purpose="fisher", epochs=1, steps=None)
        return torch.stack([client.gradient(theta, batch).square().sum() for batch in batches]).sum()

    def receive(self, server: Server, total: Total) -> None:
        if self.weighting == "samples" or total.weight("body") > 0:  # else nobody has a gradient left
            super().receive(server, total)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else torch.cat([message["body"], own_head(client)])


def own_head(client: Client) -> Tensor:
    """Return the head of the client's last model, or else the initial one."""
    return client.state.get("theta", client.initial)[client.head]


def squared_gradients(client: Client, theta: Tensor) -> Tensor:
    """Compute ‖∇ℓ_k(θ)‖² of every training sample k, in evaluation mode."""
    client.network.vector.copy_(theta)
    client.network.module.eval()
    return squared_norms(client.network, *client.train_data, client.loss_function)

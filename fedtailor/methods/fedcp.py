"""FedCP: a policy splits each sample's features between a personal and a generic head."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, normalize

from fedtailor.method import Batch, Client, Layout, Mean, Message, Method, Search, Server, State, Uploads
from fedtailor.training.inputs import Inputs

WIDTHS = (10, 15, 20, 50)  # of the kernels in the distance between features, as released


class FedCP(Method):
    """A shared body whose features a conditional policy splits between two heads, for each sample (Zhang et al. 2023).

    r = policy(z ⊙ v/‖v‖) has a number in (0, 1) for each of a sample's features z; v, the sum of the rows of the
    client's own head, is fixed in a round. The logits are ψ_i(r ⊙ z) + ψ((1 − r) ⊙ z). Body, policy and own head ψ_i
    are trained together by the loss plus λ MMD(z, z_φ); the generic head ψ and the features z_φ of the received body
    are fixed. The server averages bodies, policies and (ψ_i + ψ)/2 by samples.

    Limits: as long as ψ_i = ψ, r has no effect: the logits are those of the network with twice its biases, and the
    policy has no gradient. New clients: this, with the generic head for their own.

    Deviations: predictions are with r itself; the released code draws Gumbel noise for them, too. All clients have the
    last policy and generic head; there, those who do not take part keep older ones. v is of the initial head at first;
    there, it is random.
    """

    name: ClassVar[str] = "fedcp"
    paper: ClassVar[str] = (
        "Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via Conditional "
        "Policy, KDD 2023"
    )
    shared_part: ClassVar[str] = "the body, a generic head, and the policy that splits features between heads"
    own_part: ClassVar[str] = "a personal head"

    uploads: ClassVar[Uploads] = {"body": Mean(), "head": Mean(), "policy": Mean()}

    lam: float = Field(1.0, ge=0, description="weight of the distance to the received body's features, λ (0: none)")
    noise: bool = Field(True, description="draw Gumbel noise in the policy while it is trained, as released")
    search: ClassVar[Search] = {"lam": "0.1..10:log"}

    def extra_tensors(self, layout: Layout) -> State:
        m = layout.linear_head(self.title)[1]
        layer = nn.Linear(m, 2 * m)
        return {"W": layer.weight, "b": layer.bias, "gain": torch.ones(2 * m), "shift": torch.zeros(2 * m)}

    def start(self, server: Server) -> None:
        theta = server.initial
        server.state |= {"body": theta[server.body], "head": theta[server.head], "policy": theta[server.head.stop :]}

    def train(self, client: Client, message: Message) -> Message:
        theta, generic = self.personal_model(client, message), client.layout.head_weights(message["head"])
        z_received, context, stream = client.flat_features(theta), own_context(client, theta), client.stream("policy")

        def objective(batch: Batch) -> Tensor:
            z, chosen = batch.features.flatten(1), slice(None) if batch.indices is None else batch.indices
            drawn = torch.rand(z.shape, generator=stream, dtype=z.dtype, device="cpu").to(z.device)
            r = policy(batch.extra, z * context, drawn.logit() if self.noise else 0.0)
            batch.features = r * z  # what the own head sees
            batch.outputs = batch.outputs + linear((1 - r) * z, *generic)
            return batch.loss + self.lam * discrepancy(z, z_received[chosen])

        theta = client.descend(theta, objective=objective)
        client.state["head"] = theta[client.head].clone()
        between = (theta[client.head] + message["head"]) / 2
        return {"body": theta[client.body], "head": between, "policy": theta[client.head.stop :]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return torch.cat([message["body"], client.state.get("head", message["head"]), message["policy"]])

    def predict(self, client: Client, message: Message, x: Inputs) -> Tensor:
        theta, heads = self.personal_model(client, message), client.layout.head_weights
        z = client.flat_features(theta, x)
        r = policy(client.extra(theta), z * own_context(client, theta))
        return linear(r * z, *heads(theta[client.head])) + linear((1 - r) * z, *heads(message["head"]))


def own_context(client: Client, theta: Tensor) -> Tensor:
    """Compute v/‖v‖, v the sum of the rows of the head's weights."""
    return normalize(client.layout.head_weights(theta[client.head])[0].sum(0), dim=0)


def policy(tensors: Mapping[str, Tensor], x: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Compute r, the share of each feature that is the personal head's. The difference of two draws of Gumbel noise is
    the logit of a uniform number."""
    a = linear(x, tensors["W"], tensors["b"])
    personal, generic = layer_norm(a, a.shape[1:], tensors["gain"], tensors["shift"]).relu().chunk(2, dim=1)
    return (personal - generic + noise).sigmoid()


def discrepancy(z: Tensor, other: Tensor) -> Tensor:
    """Compute the squared maximum mean discrepancy between the rows, by the sum of Gaussian kernels."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        away = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
        return torch.stack([(-away / (2 * width)).exp() for width in WIDTHS]).sum(0).mean()

    return kernel(z, z) + kernel(other, other) - 2 * kernel(z, other)

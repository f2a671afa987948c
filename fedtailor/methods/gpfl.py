"""GPFL: features are led by common embeddings of the classes, and by each client's own task."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, normalize

from fedtailor.method import Batch, Client, Layout, Mean, Message, Method, Search, Server, State, Uploads
from fedtailor.training.inputs import Inputs


class GPFL(Method):
    """A shared body whose features a conditional valve makes generic and personal ones of (Zhang et al. 2023).

    The valve is V(z, c) = ReLU((1 + γ(c)) ⊙ z + β(c)), with γ and β each a linear layer, ReLU and layer normalisation;
    E has an embedding of each class. With g = mean_c E_c and p = Σ_c π_c E_c, π the client's class frequencies, of the
    received E, a client's loss is that of its own head's ψ(V(z, p)), plus that of the cosines of V(z, g) with each E_c
    taken for logits, plus λ times the distance ‖V(z, g) − E_y‖ to the received embedding, plus μ/2 times the squared
    length of valve and E. Body, valve and E are averaged by samples; the head never leaves.

    Limits: where a client has as many samples of each class, p = g. New clients: the shared body and valve under an
    initial head, with the p of their own samples.

    Deviations: the distance is the mean over a batch's samples; the released code takes the length of the whole batch's
    difference, which grows with √B. There, g and p are of the E that the client has trained last, before it receives
    the common one, and 0 in the first round (`own_embeddings`).
    """

    name: ClassVar[str] = "gpfl"
    paper: ClassVar[str] = (
        "Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized "
        "Federated Learning, ICCV 2023"
    )
    shared_part: ClassVar[str] = "the body, the conditional valve and the embeddings of the classes"
    own_part: ClassVar[str] = "the head"

    uploads: ClassVar[Uploads] = {"body": Mean(), "guide": Mean()}
    refuses: ClassVar[Mapping[str, str]] = {
        "labels": "the clients share embeddings of classes, and have none in common where every client numbers its own"
    }

    lam: float = Field(0.01, ge=0, description="weight of the distance to the embeddings, λ")
    mu: float = Field(0.1, ge=0, description="weight decay of valve and embeddings, μ")
    own_embeddings: bool = Field(False, description="as released: g and p are of the E that the client has trained")
    search: ClassVar[Search] = {"lam": "0.0001..1:log", "mu": "0.001..1:log"}

    def extra_tensors(self, layout: Layout) -> State:
        classes, m = layout.linear_head(self.title)
        tensors: State = {"E": torch.randn(classes, m)}
        for name in ("gamma", "beta"):
            layer = nn.Linear(m, m)
            tensors |= {f"{name}_W": layer.weight, f"{name}_b": layer.bias}
            tensors |= {f"{name}_gain": torch.ones(m), f"{name}_shift": torch.zeros(m)}
        return tensors

    def start(self, server: Server) -> None:
        server.state |= {"body": server.initial[server.body], "guide": server.initial[server.head.stop :]}

    def train(self, client: Client, message: Message) -> Message:
        theta = self.personal_model(client, message)
        E, (g, p) = client.extra(theta)["E"], self.conditions(client, theta)

        def objective(batch: Batch) -> Tensor:
            z, extra = batch.features.flatten(1), batch.extra
            generic, batch.features = valve(extra, z, g), valve(extra, z, p)  # the latter is what the head sees
            angles = batch.loss_function(normalize(generic) @ normalize(extra["E"]).T, batch.y)
            away: Tensor = torch.linalg.vector_norm(generic - E[batch.y], dim=1).mean()
            decay = sum(tensor.square().sum() for tensor in extra.values())
            return batch.loss + angles + self.lam * away + self.mu / 2 * decay

        theta = client.descend(theta, objective=objective)
        client.state["head"] = theta[client.head].clone()
        if self.own_embeddings:
            client.state["E"] = client.extra(theta)["E"].clone()
        return {"body": theta[client.body], "guide": theta[client.head.stop :]}

    def conditions(self, client: Client, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute g and p: the mean of all embeddings, and that by the client's class frequencies."""
        E = client.extra(theta)["E"]
        if self.own_embeddings:
            E = client.state.get("E", torch.zeros_like(E))
        return E.mean(0), client.class_counts / client.n_samples @ E

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return torch.cat([message["body"], client.own_head(), message["guide"]])

    def predict(self, client: Client, message: Message, x: Inputs) -> Tensor:
        theta = self.personal_model(client, message)
        z = valve(client.extra(theta), client.flat_features(theta, x), self.conditions(client, theta)[1])
        return linear(z, *client.layout.head_weights(theta[client.head]))


def valve(tensors: Mapping[str, Tensor], z: Tensor, c: Tensor) -> Tensor:
    """Compute V(z, c)."""

    def conditional(name: str) -> Tensor:
        W, b, gain, shift = (tensors[f"{name}_{part}"] for part in ("W", "b", "gain", "shift"))
        return layer_norm(linear(c, W, b).relu(), c.shape, gain, shift)

    return ((1 + conditional("gamma")) * z + conditional("beta")).relu()

"""MOON: local features that stay near the global model's and leave the client's last ones."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedtailor.method import Batch, Client, Message, Method, Search


class MOON(Method):
    """FedAvg with a loss that draws features to the global model's, away from the last local one's (Li et al. 2021).

    z, z_glob and z_prev are the features of a sample under the present, the received and the client's last trained
    model; the loss of the sample is ℓ_sup + μ ℓ_con with ℓ_con = −log(e^p / (e^p + e^n)), p = cos(z, z_glob)/τ and
    n = cos(z, z_prev)/τ. The two fixed models see all samples once a round, in evaluation mode.

    Limits: `mu=0` is FedAvg. So is a client's first round (up to rounding): the global model then stands for the last
    local one, z_prev = z_glob, and ℓ_con has no gradient.

    New clients: the global model. Deviation: no projection head is added to the network; it can have one of its own.
    So z comes after a ReLU in most networks, all cosines are positive, and μ must be small: the default is 0.1, where
    the authors, with such a head, have 1 or 5.
    """

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021"
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "only a memory of its last model"

    mu: float = Field(0.1, ge=0, description="weight of the contrastive loss, μ")
    temperature: float = Field(0.5, gt=0, description="temperature of the contrastive loss, τ")
    search: ClassVar[Search] = {"mu": "0.1..10:log"}

    def train(self, client: Client, message: Message) -> Message:
        w = message["theta"]
        if not self.mu:
            return {"theta": client.descend(w)}
        z_glob, z_prev = client.flat_features(w), client.flat_features(client.state.get("theta", w))

        def objective(batch: Batch) -> Tensor:
            z, chosen = batch.features.flatten(1), slice(None) if batch.indices is None else batch.indices
            p, n = cosine_similarity(z, z_glob[chosen]), cosine_similarity(z, z_prev[chosen])
            return batch.loss + self.mu * softplus((n - p) / self.temperature).mean()  # −log(e^p / (e^p + e^n))

        client.state["theta"] = client.descend(w, objective=objective)
        return {"theta": client.state["theta"]}

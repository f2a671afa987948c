"""IFCA: clients find their clusters, and each cluster learns a model."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.method import Client, Each, Mean, Message, Method, Search, Server, Total, Uploads


class IFCA(Method):
    """Each participant trains the cluster model that has the lowest loss on its samples (Ghosh et al. 2020).

    Algorithm 1 with model averaging (Option II). All k models θ_j go down; the client's cluster is argmin_j f_i(θ_j)
    over its training samples, found anew in every round. A cluster without participants keeps its model. The initial
    models must differ, or nothing separates the clusters: θ_1 is the network's initial vector, the others are those of
    other seeds.

    Limits: `clusters=1` is FedAvg; where all participants choose one cluster, it is FedAvg on that cluster's model.

    New clients: the cluster model with the lowest loss on the client's own training samples, as for all others.

    Deviations: the paper averages a cluster's models with equal weights, here they are n_i / Σ n over the cluster's
    participants, as in FedAvg. Gradient averaging (Option I) and the layers that clusters may share are left out.
    """

    name: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020"
    shared_part: ClassVar[str] = "a model for each cluster"
    own_part: ClassVar[str] = "the choice of the cluster"

    # θ_j is the mean over the cluster's members: each weighs its model by n_i in its own cluster, and by 0 elsewhere.
    uploads: ClassVar[Uploads] = {"theta": Mean("member"), "cluster": Each(record=True)}

    clusters: int = Field(2, ge=1, description="number of clusters, k")
    search: ClassVar[Search] = {"clusters": "2..5"}

    def start(self, server: Server) -> None:
        theta = torch.stack([server.initial_for(j) for j in range(self.clusters)])
        if self.clusters > 1 and torch.equal(theta[0], theta[1]):
            raise FedtailorError(
                "The clusters begin equal: the network's layers have no reset_parameters, or are pretrained."
            )
        nobody = torch.full((server.n_clients,), -1, device=theta.device)
        server.state |= {"theta": theta, "cluster": nobody}

    def train(self, client: Client, message: Message) -> Message:
        cluster = nearest(client, message["theta"])
        theta = client.descend(message["theta"][cluster], name=f"cluster-{int(cluster)}")
        member = theta.new_zeros(self.clusters, 1)
        member[cluster] = client.n_samples
        return {"theta": theta, "member": member, "cluster": cluster}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"theta": server.initial, "member": server.state["theta"][:, :1], "cluster": server.state["cluster"][0]}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor | None:
        """Return the cluster's model that is nearest to the upload: which one the client chose, it may say or not."""
        if name != "theta":
            return None
        nearest_one: Tensor = message["theta"][(message["theta"] - like).square().sum(1).argmin()]
        return nearest_one

    def receive(self, server: Server, total: Total) -> None:
        chosen = total.weight("theta") > 0  # the other clusters keep their models
        server.state["theta"] = torch.where(chosen, total["theta"], server.state["theta"])
        server.note(total, "cluster")

    def personal_model(self, client: Client, message: Message) -> Tensor:
        models = torch.atleast_2d(message["theta"])  # right after its local work, a client has its own result alone
        best: Tensor = models[nearest(client, models)]
        return best

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        return {"cluster": server.state["cluster"]}


def nearest(client: Client, models: Tensor) -> Tensor:
    """Find the model with the lowest training loss, and return its number; the first of equals."""
    return torch.stack([client.loss(theta) for theta in models]).argmin()

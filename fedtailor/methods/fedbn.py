"""FedBN: FedAvg on everything but the normalisation layers."""

from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Server, Uploads


class FedBN(Method):
    """Normalisation layers stay at the client, their buffers too; all else is averaged (Li et al. 2021).

    Everything is trained together. What stays are the layers in `layout.norm_layers`: BatchNorm's γ, β, running mean
    and variance, and likewise LayerNorm, GroupNorm and InstanceNorm. Only the other entries of the vector travel.

    Limits: a network without such layers makes it FedAvg; one with nothing else, Local.

    New clients: the shared entries with the normalisation layers' initial values, whose buffers fit no data: such a
    client needs fine-tuning (`evaluation={"fine_tune": 5}`) before its model is of use.
    """

    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = (
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    )
    shared_part: ClassVar[str] = "all but the normalisation layers"
    own_part: ClassVar[str] = "the normalisation layers and their buffers"

    uploads: ClassVar[Uploads] = {"shared": Mean("samples")}

    def start(self, server: Server) -> None:
        if not server.layout.norm_layers:
            server.warn("normalisation", "The network has no normalisation layers: FedBN is FedAvg here.")
        server.state["shared"] = server.initial[travels(server)]

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(self.personal_model(client, message))
        client.state["norms"] = theta[~travels(client)]
        return {"shared": theta[travels(client)]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta, shared = client.initial.clone(), travels(client)
        theta[shared] = message["shared"]
        if "norms" in client.state:
            theta[~shared] = client.state["norms"]
        return theta


def travels(side: Client | Server) -> Tensor:
    """Mark the entries of the vector that are shared: those outside the normalisation layers."""
    shared = torch.ones_like(side.initial, dtype=torch.bool)
    for place in side.layout.norm_layers:
        shared[place] = False
    return shared

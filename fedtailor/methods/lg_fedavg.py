"""LG-FedAvg: a personal body, a shared head."""

from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Server, Uploads


class LGFedAvg(Method):
    """Body and head are trained together; the head is averaged, the body never leaves (Liang et al. 2020).

    FedPer the other way round: local representations under a global model. The weights are n_i / Σ n over the
    participants. The authors' release begins with a model that FedAvg has trained; here all begin with the network's
    initial vector.

    Limits: an empty head (`head=0`) is Local; a head that is the whole network is FedAvg. New clients: the shared head
    on the network's first body, which says little before it is trained.
    """

    name: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, "
        "arXiv:2001.01523, 2020"
    )
    shared_part: ClassVar[str] = "the head"
    own_part: ClassVar[str] = "the body"

    uploads: ClassVar[Uploads] = {"head": Mean("samples")}

    def start(self, server: Server) -> None:
        server.state["head"] = server.initial[server.head]

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(self.personal_model(client, message))
        client.state["body"] = theta[client.body]
        return {"head": theta[client.head]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return torch.cat([client.state.get("body", client.initial[client.body]), message["head"]])

"""FedPer: a shared body, a personal head."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Server, Uploads
from fedtailor.training.client import HeadStart


class FedPer(Method):
    """Body and head are trained together; the body is averaged, the head never leaves (Arivazhagan et al. 2019).

    New clients: the shared body under an initial head. Limits: an empty head (`head=0`) is FedAvg; a head
    that is the whole network is Local.

    Privacy: the head never leaves, and of whole clients needs no noise. Of single samples it has noise too: all of the
    body's gradients depend on a head that one sample has moved.
    """

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head"
    personal_head: ClassVar[bool] = True
    uploads: ClassVar[Uploads] = {"body": Mean("samples")}

    head_start: HeadStart = Field("network", description="a head's initial values: the network's, or uniform in [0, 1)")

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(self.personal_model(client, message))
        client.state["head"] = theta[client.head]
        return {"body": theta[client.body]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return torch.cat([message["body"], client.own_head(self.head_start)])

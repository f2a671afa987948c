"""FedPer: a shared body, a personal head."""

from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.method import Client, Message, Method, Replies, Server


class FedPer(Method):
    """Body and head are trained together; the body is averaged, the head never leaves (Arivazhagan et al. 2019).

    New clients: the shared body under the network's first head. Limits: an empty head (`head=0`) is FedAvg; a head that
    is the whole network is Local.
    """

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head"
    personal_head: ClassVar[bool] = True

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def broadcast(self, server: Server) -> Message:
        return {"body": server.state["body"]}

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(self.personal(client, message))
        client.state["head"] = theta[client.head]
        return {"body": theta[client.body]}

    def receive(self, server: Server, replies: Replies) -> None:
        server.state["body"] = replies.mean("body")

    def personal(self, client: Client, message: Message) -> Tensor:
        return torch.cat([message["body"], client.state.get("head", client.initial[client.head])])

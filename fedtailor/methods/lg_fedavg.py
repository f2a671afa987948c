"""LG-FedAvg: a personal body, a shared head, after some rounds of FedAvg."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Layout, Mean, Message, Method, Search, Server, Total, Uploads


class LGFedAvg(Method):
    """Body and head are trained together; the head is averaged, the body never leaves (Liang et al. 2020).

    FedPer the other way round: local representations under a global model. The weights are n_i / Σ n over the
    participants. As in the authors' release, clients do not begin from scratch: the first `warm_rounds` rounds are
    FedAvg's, and the model that they lead to is where every client's own body begins, whenever it is called.

    Limits: a head that is the whole network is FedAvg, and so are as many rounds as are warm. An empty head (`head=0`)
    is Local, from FedAvg's model on; with `warm_rounds=0`, the method from scratch, it is Local. New clients: the
    shared head on the body of the warm rounds (with `warm_rounds=0` on the network's first one, which says little
    before it is trained).
    """

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"
    paper: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, "
        "arXiv:2001.01523, 2020"
    )
    shared_part: ClassVar[str] = "the head (in the warm rounds the model)"
    own_part: ClassVar[str] = "the body"

    uploads: ClassVar[Uploads] = {"shared": Mean("samples")}  # the model in warm rounds, then the head

    warm_rounds: int = Field(5, ge=0, description="rounds of FedAvg at the beginning")
    search: ClassVar[Search] = {"warm_rounds": "0..10"}

    def start(self, server: Server) -> None:
        server.state["theta"] = server.initial  # the last body of the warm rounds, and the shared head
        none = torch.zeros(server.n_clients, dtype=torch.bool, device=server.initial.device)
        server.state["own"] = none  # who has a body of its own

    def shared_slice(self, layout: Layout) -> slice:
        return layout.head

    def broadcast(self, server: Server) -> Message:
        return {"shared": server.state["theta"]}

    def send(self, server: Server, client: int) -> Message:
        """The model goes to whoever has no body yet; from scratch, everybody can make the first one."""
        needs_body = self.warm_rounds > 0 and not server.state["own"][client]
        return {"shared": server.state["theta"][slice(None) if needs_body else server.head]}

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(self.personal_model(client, message))
        if client.round <= self.warm_rounds:
            return {"shared": theta}
        client.state["body"] = theta[client.body]
        return {"shared": theta[client.head]}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"shared": server.initial if server.round <= self.warm_rounds else server.initial[server.head]}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor:
        return message[name][len(message[name]) - len(like) :]  # the head, where the whole model was sent

    def receive(self, server: Server, total: Total) -> None:
        theta, shared, own = server.state["theta"], total["shared"], server.state["own"].clone()
        own[total.clients] = server.round > self.warm_rounds
        server.state |= {"theta": torch.cat([theta[: len(theta) - len(shared)], shared]), "own": own}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        """Put the client's own body, or else the first one, in the place of what is missing or not its own."""
        shared = message["shared"]
        if len(shared) == client.layout.size and "body" not in client.state:
            return shared
        head = shared[len(shared) - len(client.initial[client.head]) :]
        return torch.cat([client.state.get("body", client.initial[client.body]), head])

    def global_model(self, server: Server) -> None:
        return None

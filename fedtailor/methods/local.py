"""Local training: every client for itself, the yardstick of every personalized method."""

from typing import ClassVar

from torch import Tensor

from fedtailor.method import Client, Message, Method, Server, Uploads


class Local(Method):
    """Every client trains its own model when it takes part; nothing is sent.

    All clients begin with the same vector. Nothing leaves, so privacy needs no noise. New clients: the network's
    initial vector. Limit: with one client, it is FedAvg.
    """

    name: ClassVar[str] = "local"
    shared_part: ClassVar[str] = "nothing"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {}

    def start(self, server: Server) -> None:
        """Keep nothing."""

    def train(self, client: Client, message: Message) -> Message:
        client.state["theta"] = client.descend(self.personal_model(client, message), stays=True)
        return {}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state.get("theta", client.initial)

"""Local training: every client for itself, the yardstick of every personalized method."""

from typing import ClassVar

from torch import Tensor

from fedtailor.method import Client, Message, Method, Replies, Server


class Local(Method):
    """No collaboration: each client trains its own model whenever it is called, and nothing is sent.

    All clients begin with the same vector, which is also what new clients get. Limit: with one client, it is FedAvg.
    """

    name: ClassVar[str] = "local"
    shared_part: ClassVar[str] = "nothing"
    own_part: ClassVar[str] = "the model"

    def start(self, server: Server) -> None:
        """The server keeps nothing."""

    def broadcast(self, server: Server) -> Message:
        return {}

    def train(self, client: Client, message: Message) -> Message:
        client.state["theta"] = client.descend(self.personal(client, message))
        return {}

    def receive(self, server: Server, replies: Replies) -> None:
        """Nothing came."""

    def personal(self, client: Client, message: Message) -> Tensor:
        return client.state.get("theta", client.initial)

"""A method that keeps something everywhere, and is interrupted where a test says so."""

from typing import ClassVar

import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.method import Uploads

armed: set[tuple[str, int]] = set()  # where and in which round the next interruption comes


def perhaps(where: str, round: int) -> None:
    """Ctrl-C, once."""
    if (where, round) in armed:
        armed.remove((where, round))
        raise KeyboardInterrupt


class Diary(ft.Method):
    """FedAvg in which all sides count: every model depends on how often each function was called before.

    `in_place` changes the server's count in place; `keeping` changes what it keeps of its clients when it sends.
    """

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples"), "count": ft.Each()}

    in_place: bool = False
    keeping: bool = False

    def start(self, server: ft.Server) -> None:
        server.state |= {"theta": server.initial, "sent": torch.zeros(()), "received": torch.zeros(())}

    def broadcast(self, server: ft.Server) -> ft.Message:
        return {"theta": server.state["theta"], "received": server.state["received"]}

    def send_all(self, server: ft.Server) -> dict[int, ft.Message]:
        if self.in_place:
            server.state["sent"] += 1
        else:
            server.state["sent"] = server.state["sent"] + 1
        if self.keeping:
            for client in server.participants:
                server.keep(client, {"n": self._kept(server, client) + 1})
        perhaps("send", server.round)
        sent = server.state["sent"]
        return {
            client: {**self.broadcast(server), "sent": sent + self._kept(server, client).sum()}
            for client in server.participants
        }

    def _kept(self, server: ft.Server, client: int) -> Tensor:
        return server.store.get(client).get("n", torch.zeros(()))

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        client.state["rounds"] = client.state.get("rounds", torch.zeros(())) + 1
        if client.id == 2:
            perhaps("train", client.round)
        theta = client.descend(message["theta"]) * (1 - 0.01 * message["sent"]) + 0.001 * client.state["rounds"]
        client.state["theta"] = theta
        return {"theta": theta, "count": client.state["rounds"]}

    def upload_like(self, server: ft.Server, client: int) -> ft.Message:
        return {"count": server.initial[0]}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        super().receive(server, total)
        if self.in_place:
            server.state["received"] += total.rows("count").sum()
        else:
            server.state["received"] = server.state["received"] + total.rows("count").sum()
        for client, count in total.each("count").items():
            server.keep(client, {"n": self._kept(server, client) + count})
        perhaps("receive", server.round)

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        if client.id == 2:
            perhaps("evaluation", client.round)
        own = client.state.get("theta", message["theta"])
        return 0.5 * own + 0.5 * message["theta"] + 0.001 * message["received"]

    def observe(self, server: ft.Server) -> ft.Message:
        perhaps("observe", server.round)
        return {"sent": server.state["sent"].clone(), "received": server.state["received"].clone()}

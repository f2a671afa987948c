"""A method whose clients fail in a chosen way."""

import torch

import fedtailor as ft


class Fragile(ft.Method):
    """FedAvg in which client 2, or another one and all behind it, fails from round 2 on."""

    name = "fragile"
    how: str = "raise"
    who: int = 2

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        client.state["rounds"] = client.state.get("rounds", torch.zeros(())) + 1
        if client.id >= self.who and client.round >= 2:
            if self.how == "raise":
                raise RuntimeError("no disk left")
            if self.how == "state":
                client.state["note"] = "not a tensor"  # type: ignore[assignment]
            return {"theta": theta * float(self.how) if self.how in ("nan", "inf") else theta}
        return {"theta": theta}

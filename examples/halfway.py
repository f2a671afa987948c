"""A method of your own, complete: each client predicts with a mix of its own model and the global one.

    fedtailor run examples.halfway:Halfway --set own=0.7 --data digits

Everything else comes for free: engines, bytes, evaluation, checkpoints, resuming.
"""

from pydantic import Field
from torch import Tensor

import fedtailor as ft


class Halfway(ft.Method):
    """FedAvg, and a personal model between the global one and the client's last local one."""

    own: float = Field(0.5, ge=0, le=1, description="share of the client's own model in its mix")

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])  # the experiment's epochs, batches, learning rate
        client.state["local"] = theta  # stays with the client, from round to round
        return {"theta": theta}  # goes up; the server sees the mean by samples alone

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        shared = message["theta"]
        return self.own * client.state.get("local", shared) + (1 - self.own) * shared

"""Ditto: a global model, and a personal one that is held near it."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Message, Method, Search


class Ditto(Method):
    """Two models: w as in FedAvg, and v_i that minimises f_i(v) + λ/2 ‖v − w‖² and never leaves (Li et al. 2021).

    Algorithm 1 with FedAvg as the solver of the global objective; w is the one received in this round. New clients: w.
    Limit: `lam=0` is Local for the personal model; the global one is FedAvg's whatever λ is.

    Privacy protects w, of single samples and of whole clients alike. v_i has no noise: no upload depends on it.
    """

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    shared_part: ClassVar[str] = "the global model"
    own_part: ClassVar[str] = "a second model, held near it"

    keeps_model: ClassVar[bool] = True

    lam: float = Field(0.5, ge=0, description="pull of the personal model towards the global one, λ")
    search: ClassVar[Search] = {"lam": "0.01..2:log"}

    def train(self, client: Client, message: Message) -> Message:
        w, v = message["theta"], client.state.get("personal", client.initial)
        client.state["personal"] = client.descend(
            v, correction=lambda v: self.lam * (v - w), name="personal", stays=True
        )
        return {"theta": client.descend(w)}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["personal"] if "personal" in client.state else message["theta"]

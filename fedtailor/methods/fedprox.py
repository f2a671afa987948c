"""FedProx: FedAvg with local models held near the global one."""

from typing import ClassVar

from pydantic import Field

from fedtailor.method import Client, Message, Method, Search


class FedProx(Method):
    """Every participant minimises f_i(θ) + μ/2 ‖θ − w‖² around the global model w (Li et al. 2020).

    New clients: the global model. Limit: `mu=0` is FedAvg.
    """

    name: ClassVar[str] = "fedprox"
    corrects: ClassVar[bool] = True
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = Field(0.1, ge=0, description="weight of the proximal term, μ")
    search: ClassVar[Search] = {"mu": "0.001..1:log"}

    def train(self, client: Client, message: Message) -> Message:
        w = message["theta"]
        return {"theta": client.descend(w, correction=lambda theta: self.mu * (theta - w))}

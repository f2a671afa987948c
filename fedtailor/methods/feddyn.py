"""FedDyn: local objectives that are re-shaped every round, so that their minima agree with the global one."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from fedtailor.method import OWN_STEP, Client, Mean, Message, Method, Search, Server, Total, Uploads


class FedDyn(Method):
    """Each participant minimises f_i(θ) − ⟨∇_i, θ⟩ + α/2 ‖θ − w‖², ∇_i its last local gradient (Acar et al. 2021).

    w is the global model that was received, and the minimisation is the experiment's local descent from it. Where that
    is exact, the client's state ∇_i is ∇f_i(θ_i), and a w at which nothing moves any more is an optimum of the mean of
    all f_i. The server's h is the mean of all ∇_i. All means are plain: no client counts for more with more samples.

    Limits: `alpha=0` leaves both terms and h/α out and is FedAvg with equal weights. Small α do not come near it: h/α
    does not depend on the scale of α, so clients train as in FedAvg, but the server adds up the steps of all rounds.

    New clients: the global model. Deviations: BatchNorm's buffers are averaged without h/α. The authors' release
    divides α by the client's relative size n_i N/n; here it is the same for all clients, as in the paper.
    """

    name: ClassVar[str] = "feddyn"
    corrects: ClassVar[bool] = True
    paper: ClassVar[str] = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "only its last local gradient"

    uploads: ClassVar[Uploads] = {"theta": Mean("equal")}
    refuses: ClassVar[Mapping[str, str]] = OWN_STEP

    alpha: float = Field(0.1, ge=0, description="weight of the dynamic regulariser, α")
    search: ClassVar[Search] = {"alpha": "0.001..0.1:log"}

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["h"] = torch.zeros_like(server.initial)

    def train(self, client: Client, message: Message) -> Message:
        w, linear = message["theta"], client.state.get("gradient", torch.zeros_like(message["theta"]))
        theta = client.descend(w, correction=lambda theta: self.alpha * (theta - w) - linear)
        client.state["gradient"] = linear - self.alpha * (theta - w)  # ∇_i
        return {"theta": theta}

    def receive(self, server: Server, total: Total) -> None:
        mean = total["theta"]
        moved = total.share(server, "equal") * server.layout.without_buffers(mean - server.state["theta"])
        h = server.state["h"] - self.alpha * moved
        server.state |= {"h": h, "theta": mean - h / self.alpha if self.alpha else mean}

    def join(self, server: Server, before: int) -> None:
        server.state["h"] = (
            before / server.n_clients * server.state["h"]
        )  # the mean of all ∇_i, of which new ones are 0

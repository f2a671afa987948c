"""SCAFFOLD: local steps corrected by the difference between the client's gradients and the global ones."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import OWN_STEP, PATH_OF_SGD, Client, Mean, Message, Method, Search, Server, Total, Uploads


class SCAFFOLD(Method):
    """Every local step is corrected by c − c_i, estimates of the global and the own gradient (Karimireddy et al. 2020).

    x is the global model and y_i the client's. The variate c_i is renewed by option II, c_i − c + (x − y_i) / (K η_l),
    which is the mean of the gradients along the path (with momentum too, see `mean_gradient`; weight decay is a part of
    f_i), or by option I, ∇f_i(x). c is the mean of all c_i. All means are plain, as f is the mean of all f_i.

    Limits, with `server_lr=1`: round 1 is FedAvg's with equal weights. So is every round in which identical clients all
    take part with full batches, as their variates cancel, or in which all clients take one full-batch step, as their
    corrections sum to zero (both up to rounding).

    New clients: the global model. Deviations: y_i is sent in place of y_i − x; BatchNorm's buffers have no variate,
    and their plain mean is taken whatever η_g is.
    """

    name: ClassVar[str] = "scaffold"
    corrects: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    )
    shared_part: ClassVar[str] = "the model and the control variate c"
    own_part: ClassVar[str] = "only its control variate c_i"

    uploads: ClassVar[Uploads] = {"theta": Mean("equal"), "change": Mean("equal")}

    server_lr: float = Field(1.0, gt=0, description="the server's step, η_g")
    full_gradient: bool = Field(False, description="c_i is the gradient at the global model: option I in place of II")
    search: ClassVar[Search] = {"server_lr": "0.1..1:log"}

    @property
    def refuses(self) -> Mapping[str, str]:  # type: ignore[override]
        return OWN_STEP if self.full_gradient else {**OWN_STEP, **PATH_OF_SGD}

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["c"] = torch.zeros_like(server.initial)

    def send(self, server: Server, client: int) -> Message:
        return {"theta": server.state["theta"], "c": server.state["c"]}

    def train(self, client: Client, message: Message) -> Message:
        x, c = message["theta"], message["c"]
        own = client.state.get("c", torch.zeros_like(c))
        velocity = client.state.get("momentum/theta", torch.zeros_like(x)).clone()
        y = client.descend(x, correction=c - own)
        if self.full_gradient:
            client.state["c"] = client.gradient(x)  # option I
        else:
            client.state["c"] = own - c + mean_gradient(client, x - y, velocity)  # option II
        return {"theta": y, "change": client.state["c"] - own}

    def receive(self, server: Server, total: Total) -> None:
        x, mean = server.state["theta"], total["theta"]
        server.state["theta"] = mean + (self.server_lr - 1) * server.layout.without_buffers(mean - x)  # x + η_g Δx
        server.state["c"] = server.state["c"] + total.share(server, "equal") * total["change"]

    def join(self, server: Server, before: int) -> None:
        server.state["c"] = (
            before / server.n_clients * server.state["c"]
        )  # the mean of all c_i, of which new ones are 0


def mean_gradient(client: Client, moved: Tensor, velocity: Tensor) -> Tensor:
    """Compute the mean of the corrected gradients of a descent from x to y, from x − y alone.

    Without momentum it is (x − y) / Σ η_k, K η at a constant rate. With momentum m, the part v Σ η_k m^k, k = 1 … K,
    of x − y comes from the velocity v of the last round.
    """
    return client.layout.without_buffers((moved - client.carried_length() * velocity) / client.path_length())

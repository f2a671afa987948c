"""FedProto: clients share the mean features of each class, and nothing of their models."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import BY_CLASS, Batch, Client, Mean, Message, Method, Search, Server, Total, Uploads

UNKNOWN = -1e30  # the score of a class that nobody has had: no prototype is farther away


class FedProto(Method):
    """Local models whose features are drawn to common prototypes, the means of each class (Tan et al. 2022).

    A client's loss is ℓ_sup + λ MSE(z, P̄_y), z the features of a sample of class y. After its local work it uploads
    the mean features P_ic of each class that it has; the server's prototypes P̄_c are their means over the clients of
    a round that have the class, and stay as they are where none has it. A sample is of the class with the nearest
    prototype: as ‖z − P̄_c‖² is ‖z‖² − (2⟨P̄_c, z⟩ − ‖P̄_c‖²), this is a linear head, so the personal model is one
    vector, the client's body under that head.

    Limits: `lam=0` with `own_head` is Local; `lam=0` trains as Local does. A class that nobody has had is never
    predicted. New clients: the prototypes on the network's initial body, which says little before it is trained.

    Deviations: P_ic is the mean under the trained model, in evaluation mode; the authors' release takes the mean over
    the batches of the last epoch, while the model moves. Its prototypes are plain means over clients: `weighting`. It
    looks for the nearest prototype among the classes of the client alone.
    """

    name: ClassVar[str] = "fedproto"
    paper: ClassVar[str] = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    shared_part: ClassVar[str] = "the mean features of each class"
    own_part: ClassVar[str] = "the model"

    uploads: ClassVar[Uploads] = {"prototypes": Mean("counts")}
    refuses: ClassVar[Mapping[str, str]] = BY_CLASS

    lam: float = Field(1.0, ge=0, description="weight of the distance to the prototypes, λ (0: plain loss)")
    weighting: Literal["samples", "clients"] = Field(
        "samples", description="what a client's prototype counts by: its samples of the class or, as released, alike"
    )
    own_head: bool = Field(False, description="predict with the client's own head in place of the nearest prototype")
    search: ClassVar[Search] = {"lam": "0.1..30:log"}

    def start(self, server: Server) -> None:
        shape = server.layout.linear_head(self.title, bias=True)
        server.state["prototypes"] = server.initial.new_zeros(shape)
        server.state["known"] = server.initial.new_zeros(shape[0], 1)  # 1: somebody has had this class

    def broadcast(self, server: Server) -> Message:
        return {name: server.state[name] for name in ("prototypes", "known")}

    def train(self, client: Client, message: Message) -> Message:
        counts, P, known = client.class_counts[:, None], message["prototypes"], message["known"]

        def objective(batch: Batch) -> Tensor:
            away = (batch.features.flatten(1) - P[batch.y]) * known[batch.y]
            return batch.loss + self.lam * away.square().mean()

        theta = client.state.get("theta", client.initial)
        theta = client.state["theta"] = client.descend(theta, objective=objective if self.lam else None)
        weights = counts if self.weighting == "samples" else (counts > 0).to(counts)
        return {"prototypes": client.class_means(client.flat_features(theta)), "counts": weights}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"counts": server.state["known"]}

    def receive(self, server: Server, total: Total) -> None:
        P, known, seen = server.state["prototypes"], server.state["known"], total.weight("prototypes") > 0
        server.state |= {
            "prototypes": torch.where(seen, total["prototypes"], P),
            "known": torch.where(seen, 1.0, known),
        }

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta, P, known = client.state.get("theta", client.initial).clone(), message["prototypes"], message["known"]
        if not self.own_head:
            bias = torch.where(known > 0, -P.square().sum(1, keepdim=True), UNKNOWN)
            theta[client.head] = torch.cat([2 * P.flatten(), bias.flatten()])
        return theta

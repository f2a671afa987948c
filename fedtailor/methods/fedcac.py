"""FedCAC: critical parameters are shared with clients whose critical ones are the same, all others with everybody."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Each, Layout, Message, Method, Search, Server, Total, Uploads

ROUNDING = 1e-12  # by which overlaps that are equal may differ from their mean


class FedCAC(Method):
    """Parameters that are sensitive to a client's data are averaged with few clients, others with all (Wu et al. 2023).

    A client's critical parameters are the τ of each layer with the largest |θ Δθ|, Δθ their change in the local work.
    The mask m_i marks them, and O_ij = 1 − ‖m_i − m_j‖₁ / (2‖m_i‖₁) is how far those of two clients overlap. After t
    rounds, client j helps i if O_ij is at least avg O + t/β (max O − avg O) over all pairs. A participant begins with
    the plain mean of its helpers' models and its own for its critical parameters, and with the global model for others.

    Limits: `tau=0` trains as FedAvg does. After more than β rounds nobody helps (but where all overlaps are equal), and
    a client's critical parameters are its own: with `tau=1`, all that its training moves. New clients: the global
    model.

    Deviations: overlaps and means are of the last models of all who have trained; in the release all clients must take
    part. τ is the share of a layer, in the release that of each tensor.
    """

    name: ClassVar[str] = "fedcac"
    paper: ClassVar[str] = (
        "Wu et al., Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through Cautiously "
        "Aggressive Collaboration, ICCV 2023"
    )
    shared_part: ClassVar[str] = "a global model, and critical parameters with similar clients"
    own_part: ClassVar[str] = "the model, and which of its parameters are critical"

    uploads: ClassVar[Uploads] = {"theta": Each(), "mask": Each()}
    keeps_model: ClassVar[bool] = True

    tau: float = Field(0.5, ge=0, le=1, description="share of a layer's parameters that are critical, τ")
    beta: float = Field(100.0, gt=0, description="rounds after which no critical parameters are shared, β")
    search: ClassVar[Search] = {"tau": "0.1..0.9", "beta": "5..200:log"}

    def start(self, server: Server) -> None:
        server.state["theta"] = server.initial
        server.state["common"] = server.pairs(double=True)  # ⟨m_i, m_j⟩
        server.state["trained"] = torch.zeros(server.n_clients, dtype=torch.bool, device="cpu")

    def broadcast(self, server: Server) -> Message:
        return {"theta": server.state["theta"]}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        called, theta = server.participants, server.state["theta"]
        mixes = server.mixed(self.weights(server, called, server.round - 1).to(theta), "theta")
        kept = zip(called, mixes, server.kept_of(called, "theta"), server.kept_of(called, "mask"), strict=True)
        down = {}
        for client, mix, own, mask in kept:
            down[client] = {"theta": theta}
            if server.state["trained"][client]:
                begin = torch.where(mask > 0, mix, theta)
                down[client]["theta"] = server.layout.copy_buffers(begin, own)
        return down

    def weights(self, server: Server, clients: list[int], t: int) -> Tensor:
        """Compute the weights of all models in these clients' means (rows) after t rounds: equal ones for all who help
        and for their own."""
        trained, overlaps = server.state["trained"], self.overlaps(server)
        pairs = trained[:, None] & trained & ~torch.eye(len(trained), dtype=torch.bool, device="cpu")
        helps = torch.eye(len(trained), dtype=torch.float64, device="cpu")
        if pairs.any():
            mean, most = overlaps[pairs].mean(), overlaps[pairs].max()
            threshold = mean + t / self.beta * (most - mean)
            helps[pairs & (overlaps >= threshold - ROUNDING)] = 1.0
        return (helps / helps.sum(1, keepdim=True))[clients]

    def overlaps(self, server: Server) -> Tensor:
        """Compute O_ij = 1 − ‖m_i − m_j‖₁ / (2‖m_i‖₁); 0 with a client that has no critical parameters."""
        common = server.state["common"]
        sizes = common.diag()
        apart = sizes[:, None] + sizes - 2 * common
        return (1 - apart / (2 * sizes[:, None])).where((sizes[:, None] > 0) & (sizes > 0), 0.0)

    def train(self, client: Client, message: Message) -> Message:
        theta = client.state["theta"] = client.descend(message["theta"])
        return {"theta": theta, "mask": self.critical(client.layout, theta, theta - message["theta"])}

    def critical(self, layout: Layout, theta: Tensor, change: Tensor) -> Tensor:
        """Mark the τ of each layer with the largest |θ Δθ|; never buffers, nor what has not moved."""
        sensitivity, parameters = map(layout.without_buffers, ((theta * change).abs(), torch.ones_like(theta)))
        mask = torch.zeros_like(theta, dtype=torch.bool)
        for layer in layout.layers.values():
            if count := int(self.tau * parameters[layer].sum()):
                mask[layer] = sensitivity[layer] >= sensitivity[layer].topk(count).values[-1]
        return mask & (sensitivity > 0)

    def upload_like(self, server: Server, client: int) -> Message:
        return {"mask": torch.zeros_like(server.initial, dtype=torch.bool)}

    def receive(self, server: Server, total: Total) -> None:
        for client in total.clients:
            theta = total.each("theta")[client]
            server.keep(client, {"theta": theta, "mask": total.each("mask")[client].to(theta)})
        common, trained = server.state["common"].clone(), server.state["trained"].clone()
        new = total.rows("mask").to(server.initial)
        trained[total.clients] = True
        for clients, masks in server.kept("mask"):  # only rows that changed
            common[total.clients, clients] = (new @ masks.T).cpu().double() * trained[clients]  # others have no mask
        common[:, total.clients] = common[total.clients].T
        server.state |= {"theta": total["theta"], "common": common, "trained": trained}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]

    def observe(self, server: Server) -> Message:
        """Record the overlaps, and the weights that they give for all clients."""
        weights = self.weights(server, [*range(server.n_clients)], server.round)
        return {"overlaps": self.overlaps(server), "weights": weights}

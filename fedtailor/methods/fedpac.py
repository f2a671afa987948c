"""FedPAC: features that are aligned with common class means, and heads mixed by how alike the clients' classes are."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import BY_CLASS, Batch, Client, Each, Mean, Message, Method, Search, Server, Total, Uploads


class FedPAC(Method):
    """A shared body, trained towards common class means, and a mix of heads for each client (Xu et al. 2023).

    A participant fits its head ψ_i to the received body φ for `head_epochs` at `head_speed` times the experiment's
    rate. Then φ takes the local steps under this head, by the loss plus λ MSE(z, P̄_y), z the features of a sample of
    class y and P̄_c the mean features of a class over all clients. Bodies and P̄ are averaged by samples. Each
    participant's head becomes Σ_j α_ij ψ_j over those who replied, with α_i = argmin αᵀ(diag(v) + A_i)α in the simplex:
    v_j is the variance of j's mean feature, and A_i has the inner products of h_i − h_j, h_ic = p_i(c) μ_ic, the class
    means under the received body by their frequency. A client predicts with what it has trained last.

    Limits: one participant a round mixes with nobody, and with `lam=0` is then trained as by FedRep with
    `released_weights`, `refit=False` and these epochs. Clients with equal samples mix their heads equally. New clients:
    the shared body under the initial head.

    Deviations: the program for α is solved exactly, where the authors' release drops eigenvalues below 0.01 if there
    are negative ones, and weights below 0.001. The head's rate is ten times the experiment's, as the release has 0.1
    beside 0.01.
    """

    name: ClassVar[str] = "fedpac"
    paper: ClassVar[str] = (
        "Xu, Tong & Huang, Personalized Federated Learning with Feature Alignment and Classifier Collaboration, "
        "ICLR 2023"
    )
    shared_part: ClassVar[str] = "the body, the mean features of each class, and mixes of the heads"
    own_part: ClassVar[str] = "the head, and what training makes of the body"
    keeps_model: ClassVar[bool] = True

    uploads: ClassVar[Uploads] = {
        "body": Mean("samples"), "prototypes": Mean("counts"), "head": Each(), "h": Each(), "v": Each(),
    }  # fmt: skip
    refuses: ClassVar[Mapping[str, str]] = BY_CLASS

    lam: float = Field(1.0, ge=0, description="weight of the distance to the class means, λ (0: plain loss)")
    head_epochs: int = Field(1, ge=0, description="epochs of the head on the received body")
    head_speed: float = Field(10.0, gt=0, description="the head's learning rate, in times the experiment's")
    search: ClassVar[Search] = {"lam": "0.1..10:log", "head_epochs": "1..10", "head_speed": "1..30:log"}

    def start(self, server: Server) -> None:
        shape = server.layout.linear_head(self.title)
        server.state["body"] = server.initial[server.body]
        server.state["prototypes"] = server.initial.new_zeros(shape)
        server.state["known"] = server.initial.new_zeros(shape[0], 1)  # 1: somebody has had this class
        server.state["alpha"] = server.pairs(double=True)

    def broadcast(self, server: Server) -> Message:
        return {name: server.state[name] for name in ("body", "prototypes", "known")}

    def send(self, server: Server, client: int) -> Message:
        (head,) = server.kept_of([client], "head", server.initial[server.head])
        return {**self.broadcast(server), "head": head}

    def train(self, client: Client, message: Message) -> Message:
        theta, counts, known = torch.cat([message["body"], message["head"]]), client.class_counts, message["known"]
        z = client.flat_features(theta)
        mu = client.class_means(z)
        h = (counts / client.n_samples)[:, None] * mu
        v = (z.square().sum(1).mean() - h.square().sum()) / client.n_samples
        P = torch.where(known > 0, message["prototypes"], mu)

        def objective(batch: Batch) -> Tensor:
            return batch.loss + self.lam * (batch.features.flatten(1) - P[batch.y]).square().mean()

        lr, aligned = self.head_speed * client.optimizer.lr, self.lam and known.any()
        theta = client.descend(theta, part=client.head, epochs=self.head_epochs, steps=None, lr=lr)
        theta = client.descend(theta, part=client.body, objective=objective if aligned else None)
        client.state["theta"] = theta
        means = {"prototypes": client.class_means(client.flat_features(theta)), "counts": counts[:, None]}
        return {"body": theta[client.body], "head": theta[client.head], "h": h, "v": v, **means}

    def upload_like(self, server: Server, client: int) -> Message:
        known, means = server.state["known"], server.state["prototypes"]
        return {"counts": known, "head": server.initial[server.head], "h": means, "v": server.initial[0]}

    def receive(self, server: Server, total: Total) -> None:
        seen, heads, here = total.weight("prototypes") > 0, total.rows("head"), total.index.cpu()
        h, v = (total.rows(name).cpu().double() for name in ("h", "v"))
        h, v, alpha = h.flatten(1), v.clamp(min=0), server.state["alpha"].clone()  # a hostile client's v may be less
        found = torch.stack([minimum_in_simplex((h_i - h) @ (h_i - h).T + v.diag()) for h_i in h])
        for client, head in zip(total.clients, found.to(heads) @ heads, strict=True):
            server.keep(client, {"head": head})
        alpha[here] = 0.0
        alpha[here[:, None], here] = found
        server.state |= {
            "body": total["body"],
            "prototypes": torch.where(seen, total["prototypes"], server.state["prototypes"]),
            "known": torch.where(seen, 1.0, server.state["known"]),
            "alpha": alpha,
        }

    def personal_model(self, client: Client, message: Message) -> Tensor:
        if "theta" in client.state:
            return client.state["theta"]
        return torch.cat([message["body"], client.initial[client.head]])

    def observe(self, server: Server) -> Message:
        """Record the weights of the last mix of each client's head."""
        return {"alpha": server.state["alpha"]}


def minimum_in_simplex(P: Tensor) -> Tensor:
    """Find argmin αᵀPα over α ≥ 0, Σ α = 1, for a positive semidefinite P.

    α is u / Σ u with u = argmin ½ uᵀPu − Σ u over u ≥ 0: both have the same conditions. The entries that are 0 are
    found by principal pivoting: those that break a condition change sides, in the end one by one (Murty 1974). Rounding
    may keep that from ending: then the last u counts.
    """
    eye = torch.eye(len(P), dtype=P.dtype, device=P.device)
    P = P / P.diagonal().max().clamp(min=1e-30) + 1e-12 * eye  # of some that are alike, all have the same
    u, free, turns = torch.zeros_like(P[0]), torch.zeros_like(P[0], dtype=torch.bool), 0
    while (wrong := torch.where(free, u < -1e-12 * u.sum(), P @ u < 1 - 1e-9 * (1 + u.sum()))).any():
        if turns > 1000 * len(P):
            break
        if turns > len(P):  # all at once might go on for ever
            wrong[: int(wrong.nonzero()[-1])] = False
        u, free, turns = torch.zeros_like(u), free ^ wrong, turns + 1
        u[free] = torch.linalg.solve(P[free][:, free], torch.ones_like(u[free]))
    return u.clamp(min=0) / u.clamp(min=0).sum()

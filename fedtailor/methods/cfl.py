"""CFL: a cluster of clients that pull in different directions is split in two, again and again."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from fedtailor.method import Client, Each, Message, Method, Search, Server, State, Total, Uploads
from fedtailor.training.client import NotPrivate

LEAST = 3  # members that a cluster must have to be split


class CFL(Method):
    """FedAvg in clusters, each split in two once it stands still while its clients do not (Sattler et al. 2020).

    All clients begin as one cluster. Where its mean change is short, ‖avg Δ_i‖ < ε₁, but not that of every client,
    max ‖Δ_i‖ > ε₂, no model fits all: it is split into the two parts with the least similarity across, α_cross, the
    largest of the cos(Δ_i, Δ_j) between them; if √((1 − α_cross) / 2) > γ. Each part goes on from the cluster's model
    with its own mean. The clusters are the leaves of a tree, whose inner nodes keep the model at which they were split
    and the directions of both parts: a client that was not there descends from this model and follows the part to which
    its own change points.

    Limits: a cluster that is never split is FedAvg, up to rounding. New clients: the cluster at which they arrive in
    the tree, by descents on their own training samples.

    Deviations: ε₁ and ε₂ are shares of the longest mean change that the cluster and those that it came from have had;
    `relative=False` takes them as lengths. A client's place is found by the mean direction of each part, in the paper
    by all its members' changes. The release joins parts by complete linkage, which does not find the least α_cross
    (`linkage="complete"`), takes plain means (`weighting="equal"`), and has no γ.
    """

    name: ClassVar[str] = "cfl"
    paper: ClassVar[str] = (
        "Sattler, Müller & Samek, Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization "
        "under Privacy Constraints, TNNLS 2020"
    )
    shared_part: ClassVar[str] = "a model for each cluster"
    own_part: ClassVar[str] = "the place in the tree of clusters"

    uploads: ClassVar[Uploads] = {"theta": Each(), "leaf": Each()}

    eps_1: float = Field(0.6, gt=0, description="mean change below which a cluster stands still, ε₁")
    eps_2: float = Field(1.6, ge=0, description="change of a client above which it does not, ε₂")
    gamma: float = Field(0.0, ge=0, le=1, description="how far apart two parts must point, γ")
    relative: bool = Field(True, description="ε₁ and ε₂ are shares of the longest mean change (False: lengths)")
    weighting: Literal["samples", "equal"] = Field("samples", description="weights of means (equal: as released)")
    linkage: Literal["single", "complete"] = Field("single", description="how parts are found (complete: as released)")
    search: ClassVar[Search] = {"eps_1": "0.1..1:log", "eps_2": "0.5..3"}

    def start(self, server: Server) -> None:
        initial = server.initial[None]
        server.state |= {  # of each node of the tree:
            "theta": initial,  # its model; where it was split, that of before
            "way": torch.zeros_like(initial),  # the mean direction of its clients when it came to be
            "children": torch.full((1, 2), -1, device=initial.device),
            "peak": initial.new_zeros(1),  # the longest mean change so far
            "norms": initial.new_zeros(1, 2),  # the last mean change, and the longest change of a client
            "place": torch.zeros(server.n_clients, dtype=torch.int64, device=initial.device),  # the node of each client
        }

    def broadcast(self, server: Server) -> Message:
        return {name: server.state[name] for name in ("theta", "way", "children", "place")}

    def send(self, server: Server, client: int) -> Message:
        leaf = server.state["place"][client]
        if server.state["children"][leaf, 0] >= 0:  # split while the client was not there
            return self.broadcast(server)
        return {"theta": server.state["theta"][leaf], "leaf": leaf}

    def train(self, client: Client, message: Message) -> Message:
        if client.private is not None:
            raise NotPrivate("descents whose number depends on the samples", self.title)
        leaf, theta = self.arrived(client, message)
        return {"theta": client.descend(theta), "leaf": leaf}

    def arrived(self, client: Client, message: Message) -> tuple[Tensor, Tensor]:
        """Go down the tree from the client's node. Return the leaf and its model."""
        if message["theta"].dim() == 1:  # the server knows the leaf, or it is the client's own result
            return message["leaf"], message["theta"]
        theta, place = message["theta"], message["place"]
        node = place[client.id] if client.id < len(place) else torch.zeros_like(place[0])
        while (children := message["children"][node])[0] >= 0:
            change = client.layout.without_buffers(client.fresh().descend(theta[node]) - theta[node])
            node = children[cosine_similarity(change, message["way"][children]).argmax()]
        return node, theta[node]

    def upload_like(self, server: Server, client: int) -> Message:
        return {"theta": server.initial, "leaf": server.state["place"][0]}

    def sent(self, message: Message, name: str, like: Tensor) -> Tensor | None:
        """Return the model that is nearest to the upload, of those that the client was sent."""
        if name != "theta":
            return None
        models = torch.atleast_2d(message["theta"])
        nearest: Tensor = models[(models - like).square().sum(1).argmin()]
        return nearest

    def receive(self, server: Server, total: Total) -> None:
        tree = {name: tensor.clone() for name, tensor in server.state.items()}
        leaves, models = torch.stack([*total.each("leaf").values()]), total.rows("theta")
        for leaf in (tree["children"][:, 0] < 0).nonzero()[:, 0].tolist():
            members = leaves == leaf
            if members.any():
                self.grow(server, tree, leaf, total.index[members], models[members])
        server.state |= tree

    def grow(self, server: Server, tree: State, leaf: int, clients: Tensor, models: Tensor) -> None:
        """Move a cluster along its clients' mean change; or split it, and move its parts along theirs."""
        theta, without = tree["theta"][leaf].clone(), server.layout.without_buffers
        n = server.n_samples[clients].to(theta) if self.weighting == "samples" else theta.new_ones(len(clients))
        changes = models - theta
        mean, directions = n @ changes / n.sum(), normalize(without(changes), dim=1)
        norms = torch.stack([without(mean).norm(), without(changes).norm(dim=1).max()])
        peak = torch.maximum(tree["peak"][leaf], norms[0])
        tree["place"][clients], tree["norms"][leaf], tree["peak"][leaf] = leaf, norms, peak
        parts = self.parts(norms / (peak if self.relative else 1.0), directions)
        if parts is None:
            tree["theta"][leaf] = theta + mean
            return
        for side in (0, 1):
            part = parts == side
            tree["place"][clients[part]] = tree["children"][leaf, side] = len(tree["theta"])
            node = {
                "theta": theta + n[part] @ changes[part] / n[part].sum(),
                "way": directions[part].mean(0),
                "children": torch.full_like(tree["children"][leaf], -1),
                "norms": torch.zeros_like(norms),
                "peak": peak,
            }
            tree |= {name: torch.cat([tree[name], row[None]]) for name, row in node.items()}

    def parts(self, norms: Tensor, directions: Tensor) -> Tensor | None:
        """Find the two parts of a cluster that is to be split, 0 or 1 for each client; None if it is not."""
        if len(directions) < LEAST or norms[0] >= self.eps_1 or norms[1] <= self.eps_2:
            return None
        similar = (directions @ directions.T).double().cpu()
        parts = bipartition(similar, self.linkage)
        across = similar[parts == 0][:, parts == 1].max().clamp(-1, 1)
        return parts.to(directions.device) if ((1 - across) / 2).sqrt() > self.gamma else None

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return self.arrived(client, message)[1]

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        """Record each client's node, and of each node the mean change, the longest one, and the peak of the means."""
        return {name: server.state[name] for name in ("place", "norms", "peak")}


def bipartition(similar: Tensor, linkage: str) -> Tensor:
    """Join the most similar, and those that are similar to them, until there are two parts; 0 or 1 for each.

    Single linkage compares parts by their most similar members. So no two parts have a lower similarity across."""
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as joined
    from scipy.spatial.distance import squareform

    tree = joined(squareform((1 - similar).numpy(), checks=False), linkage)
    return torch.from_numpy(cut_tree(tree, 2)[:, 0])

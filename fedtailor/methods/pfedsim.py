"""pFedSim: bodies are mixed by the similarity of the clients' classifiers."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedtailor.method import Client, Each, Message, Method, Search, Server, Total, Uploads

OWN = 0.9999  # what a client's similarity to itself counts as, and the most that another's does: 1 would be ∞ in w


class PFedSim(Method):
    """After rounds of FedAvg, every client's body is a mix by the similarity of classifiers (Tan et al. 2023).

    In the first `warm_rounds` rounds, all is FedAvg's, and the last global model is where every client begins. From
    then on a participant gets Σ_j w_ij φ_j for its body, w_ij ∝ −log(1 − s_ij), with its own head, and uploads what it
    trained. s_ij is the mean over the classes of the cosines between the rows of the two heads' weights, at least 0. It
    is computed anew for every two clients that took part in a round; before they met, it is 0.

    Limits: as many rounds as are warm are FedAvg's. `warm_rounds=0` with one participant a round is Local. Clients with
    equal classifiers get the plain mean of their bodies. New clients: the global model of the warm rounds.

    Deviations: the paper warms up for a share of the rounds, half of them; here it is their number, as a run may be
    continued. Similarities above 0.9999, the value that FL-bench gives a client's own, count as that.
    """

    name: ClassVar[str] = "pfedsim"
    title: ClassVar[str] = "pFedSim"
    paper: ClassVar[str] = (
        "Tan et al., pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning, "
        "arXiv:2305.15706, 2023"
    )
    shared_part: ClassVar[str] = "a mix of similar clients' bodies for each client (in the warm rounds the model)"
    own_part: ClassVar[str] = "the head, and what training makes of the body"

    uploads: ClassVar[Uploads] = {"theta": Each()}

    warm_rounds: int = Field(10, ge=0, description="rounds of FedAvg at the beginning")
    search: ClassVar[Search] = {"warm_rounds": "0..20"}

    def start(self, server: Server) -> None:
        server.layout.linear_head(self.title)  # whose rows it compares
        server.state["theta"] = server.initial  # the global model of the warm rounds
        server.state["S"] = server.pairs(double=True).fill_diagonal_(1.0)
        server.state["trained"] = torch.zeros(server.n_clients, dtype=torch.bool, device="cpu")  # since then

    def broadcast(self, server: Server) -> Message:
        return {"theta": server.state["theta"]}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        called = server.participants
        if server.round <= self.warm_rounds:
            return {client: self.broadcast(server) for client in called}
        mixes = server.mixed(self.weights(server, called).to(server.initial), "theta")
        for mix, own, client in zip(mixes, server.kept_of(called, "theta"), called, strict=True):
            mix[server.head] = own[server.head]
            if not server.state["trained"][client]:
                mix.copy_(server.state["theta"])
        return {client: {"theta": mix} for client, mix in zip(called, mixes, strict=True)}

    def weights(self, server: Server, clients: list[int]) -> Tensor:
        """Compute w_ij of these clients (rows) for all bodies."""
        w = -(1 - server.state["S"][clients].clamp(max=OWN)).log()
        return w / w.sum(1, keepdim=True)

    def train(self, client: Client, message: Message) -> Message:
        theta = client.descend(message["theta"])
        if client.round > self.warm_rounds:
            client.state["theta"] = theta
        return {"theta": theta}

    def receive(self, server: Server, total: Total) -> None:
        if server.round <= self.warm_rounds:
            server.state["theta"] = total["theta"]
            return
        for client, theta in total.each("theta").items():
            server.keep(client, {"theta": theta})
        S, trained = server.state["S"].clone(), server.state["trained"].clone()
        met = torch.tensor(total.clients, device="cpu")
        shape = server.layout.linear_head(self.title)
        heads = total.rows("theta")[:, server.head][:, : shape.numel()].view(-1, *shape)
        psi = normalize(heads.double(), dim=2).cpu()
        S[met[:, None], met] = torch.einsum("icd,jcd->ij", psi, psi).div(psi.shape[1]).clamp(min=0)
        trained[met] = True
        server.state |= {"S": S.fill_diagonal_(1.0), "trained": trained}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state["theta"] if "theta" in client.state else message["theta"]

    def global_model(self, server: Server) -> None:
        return None

    def observe(self, server: Server) -> Message:
        """Record the similarities, and the weights that they give for all clients."""
        return {"S": server.state["S"], "weights": self.weights(server, [*range(server.n_clients)])}

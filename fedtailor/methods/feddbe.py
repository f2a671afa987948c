"""FedDBE: each client has a shift of the features of its own, so that those of the shared body can be alike."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Batch, Client, Layout, Mean, Message, Method, Search, Server, State, Total, Uploads


class FedDBE(Method):
    """FedAvg, with a memory of each client's bias in feature space and one mean of the features for all (Zhang et al.
    2023).

    The head sees z + m_i: z are the features, m_i the client's memory, trained with the model by the same loss, which
    never leaves. A second term, κ/2 times the mean squared entry of r̄ − r_g, draws the client's mean feature to a
    common one. r̄ ← (1 − μ) r̄ + μ · (the batch's mean of z) begins at 0 in each round; r_g is the mean over the clients
    of round 1 of their mean features, and stays as it is. As the head is linear, the personal model is one vector: the
    global model, to the biases of which W m_i is added.

    Limits: round 1 is FedAvg's. `kappa=0` has memories alone. New clients: the global model, m = 0.

    Deviations: r_g comes from the first round's participants under what they have trained. The authors' release trains
    all clients for a round beforehand, and takes what it has found of r̄; those models are then forgotten. The memory
    is trained as the experiment says, with momentum and weight decay if there are.
    """

    name: ClassVar[str] = "feddbe"
    paper: ClassVar[str] = (
        "Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space, NeurIPS 2023"
    )
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "a shift of the features"

    uploads: ClassVar[Uploads] = {"theta": Mean("samples"), "mean": Mean("samples")}

    kappa: float = Field(50.0, ge=0, description="weight of the distance to the common mean, κ (0: none)")
    mu: float = Field(0.1, gt=0, le=1, description="share of a batch in the client's mean, μ")
    search: ClassVar[Search] = {"kappa": "0.1..100:log", "mu": "0.05..1:log"}

    def extra_tensors(self, layout: Layout) -> State:
        return {"memory": torch.zeros(layout.linear_head(self.title, bias=True)[1])}  # m, at 0

    def broadcast(self, server: Server) -> Message:
        return {name: server.state[name] for name in ("theta", "consensus") if name in server.state}

    def train(self, client: Client, message: Message) -> Message:
        theta, place = message["theta"].clone(), client.layout.extra["memory"]
        if "consensus" not in message:
            theta = client.descend(theta)
            return {"theta": theta, "mean": client.flat_features(theta).mean(0)}
        theta[place] = client.state.get("memory", client.initial[place])
        mean = torch.zeros_like(theta[place])

        def objective(batch: Batch) -> Tensor:
            nonlocal mean
            present = mean.lerp(batch.features.mean(0), self.mu)  # r̄, through the present batch alone
            mean = present.detach()
            batch.features = batch.features + batch.extra["memory"]  # what the head sees
            return batch.loss + self.kappa / 2 * (present - message["consensus"]).square().mean()

        theta = client.descend(theta, objective=objective)
        client.state["memory"] = theta[place].clone()
        theta[place] = 0
        return {"theta": theta, "mean": mean}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"mean": server.initial[server.layout.extra["memory"]]}

    def receive(self, server: Server, total: Total) -> None:
        server.state["theta"] = total["theta"]
        server.state.setdefault("consensus", total["mean"])  # r_g

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta = message["theta"].clone()
        if "memory" in client.state:
            W, b = client.layout.head_weights(theta[client.head])  # views
            assert b is not None
            b += W @ client.state["memory"]
        return theta

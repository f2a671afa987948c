"""PGFed-CE: PGFed with less communication."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from fedtailor.method import PATH_OF_SGD, Client, Each, Message, Server, State, Total, Uploads
from fedtailor.methods.pgfed import PGFed


class PGFedCE(PGFed):
    """PGFed with three vectors a participant in place of five (Luo et al. 2023).

    The paper names PGFed-CE and defines it in an appendix that we do not have; this is our reading. The server sends
    the scalar ḡᵀθ in place of ḡ. In place of the gradient that a client would upload, it takes the mean gradient along
    the client's path, which it can form from the two models: (θ_glob − θ_i) / path is the mean of ∇f_i + g̃_i.

    New clients: the global model. Limits: `mu=0` is FedAvg's training; round 1 is always FedAvg's.
    """

    name: ClassVar[str] = "pgfed-ce"
    title: ClassVar[str] = "PGFed-CE"
    corrects: ClassVar[bool] = False  # its uploads are about the whole model
    shared_part: ClassVar[str] = "the global model and a sum of gradients"
    uploads: ClassVar[Uploads] = {"theta": Each(), "alpha": Each(), "loss": Each(), "path": Each()}

    refuses: ClassVar[Mapping[str, str]] = PATH_OF_SGD

    def broadcast(self, server: Server) -> Message:
        return {"theta": server.state["theta"]}

    def send_all(self, server: Server) -> Mapping[int, Message]:
        messages = super().send_all(server)
        if not len(server.state["last"]):
            return messages
        slope = self.mu * server.state["gradients"].mean(0) @ server.state["theta"]
        return {i: {**{n: t for n, t in m.items() if n != "g_bar"}, "slope": slope} for i, m in messages.items()}

    def train(self, client: Client, message: Message) -> Message:
        path = client.path_length(warm="momentum/theta" in client.state)  # which training changes
        theta, alpha = self.update(client, message)
        client.state["theta"] = theta
        return {"theta": theta, "alpha": alpha, "loss": client.loss(theta), "path": theta.new_tensor(path)}

    def g2(self, message: Message, theta: Tensor) -> Tensor:
        return message["slope"]

    def upload_like(self, server: Server, client: int) -> Message:
        return {**super().upload_like(server, client), "loss": server.initial[0], "path": server.initial[0]}

    def gradients(self, server: Server, total: Total) -> State:
        thetas, path = total.rows("theta"), total.rows("path")[:, None]
        gradients = server.layout.without_buffers((server.state["theta"] - thetas) / path)
        if len(server.state["last"]):
            gradients -= self.g_tilde(server, total.clients)
        return {"gradients": gradients, "g1": self.mu * (total.rows("loss") - (gradients * thetas).sum(1))}

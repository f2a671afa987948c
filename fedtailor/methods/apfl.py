"""APFL: the personal model is a learned mix of a local and the global one."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Each, Mean, Message, Method, Search, Server, Total, Uploads


class APFL(Method):
    """Clients predict with a learned mix of a local and the global model, α_i v_i + (1 − α_i) w (Deng et al. 2020).

    w is averaged, v_i never leaves, and the server gets α_i for the record alone.

    Algorithm 1, with v̄_i for the mix: on each batch w_i steps along ∇f(w_i), and v_i along α_i ∇f(v̄_i), the gradient
    of f(v̄_i) with respect to v_i, both from where they were before the batch. α_i has a step once a round, on its first
    batch: α_i ← α_i − η ⟨v_i − w, ∇f(v̄_i)⟩, clipped to [0, 1]. All rates are the experiment's. A client predicts with
    its own v_i and α_i and the present w; with its own w_i if it is evaluated right after its work (`model = "local"`
    in the evaluation). The average is weighted by samples, as FedAvg's; the paper's is plain.

    Limits: the global model is FedAvg's whatever the α are; with `adaptive=False`, `alpha=0` makes the personal models
    the global one, `alpha=1` Local's.

    Privacy protects w, of single samples and of whole clients alike. v_i and α_i have no noise: no w_i depends on
    them, and in a private run α_i stays at the client too.

    New clients: the global model.
    """

    name: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, arXiv:2003.13461, 2020"
    shared_part: ClassVar[str] = "the global model"
    own_part: ClassVar[str] = "a local model, and its share α in the mix"

    uploads: ClassVar[Uploads] = {"theta": Mean("samples"), "alpha": Each(record=True)}

    alpha: float = Field(0.5, ge=0, le=1, description="share of the local model in the mix, or its first value, α_i")
    adaptive: bool = Field(True, description="learn each client's α_i, or keep it fixed")
    search: ClassVar[Search] = {"alpha": "0.1..0.9"}

    def start(self, server: Server) -> None:
        super().start(server)
        server.state["alpha"] = server.initial.new_full((server.n_clients,), self.alpha)  # for the record

    def train(self, client: Client, message: Message) -> Message:
        w, v = message["theta"], client.state.get("v", client.initial)
        alpha = client.state.get("alpha", v.new_tensor(self.alpha))
        for number, batch in enumerate(client.batches()):
            away, share = v - w, alpha
            gradient = client.gradient(share * v + (1 - share) * w, batch, stays=True)  # ∇f(v̄)
            v = client.step(v, share * gradient, name="v")
            w = client.step(w, client.gradient(w, batch))
            if self.adaptive and number == 0:
                alpha = (alpha - client.lr * (away @ gradient)).clamp(0, 1)
        client.state |= {"v": v, "alpha": alpha}
        return {"theta": w, "alpha": alpha}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"alpha": server.state["alpha"][client]}

    def receive(self, server: Server, total: Total) -> None:
        super().receive(server, total)
        server.note(total, "alpha")

    def personal_model(self, client: Client, message: Message) -> Tensor:
        if "v" not in client.state:
            return message["theta"]
        alpha, v = client.state["alpha"], client.state["v"]
        return alpha * v + (1 - alpha) * message["theta"]

    def observe(self, server: Server) -> Message:
        return {"alpha": server.state["alpha"]}

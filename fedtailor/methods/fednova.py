"""FedNova: the mean of normalised changes, whatever number of steps each client takes."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import OWN_STEP, PATH_OF_SGD, Client, Mean, Message, Method, Server, Total, Uploads


class FedNova(Method):
    """Changes are divided by the steps that led to them before they are averaged (Wang et al. 2020).

    x ← x − τ_eff Σ p_i d_i with d_i = (x − y_i) / a_i, p_i = n_i / Σ n over the participants and τ_eff = Σ p_i a_i, or
    any other (`tau`). a_i is the sum of the accumulation vector, in which each gradient has the factor by which it
    counts in x − y_i: the number K of steps or, with momentum m, Σ (1 − m^k) / (1 − m) over k = 1 … K. So clients that
    take more steps, as they have more samples, do not pull the model to their own optima.

    Limits: where all clients take equally many steps it is FedAvg (up to rounding). New clients: the global model.
    Deviations: BatchNorm's buffers are FedAvg's. A velocity that is kept from round to round, which the paper does not
    do, counts as a part of the change.
    """

    name: ClassVar[str] = "fednova"
    paper: ClassVar[str] = (
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, "
        "NeurIPS 2020"
    )
    refuses: ClassVar[Mapping[str, str]] = {**OWN_STEP, **PATH_OF_SGD}
    shares_model: ClassVar[bool] = True  # all predict with x, but for local models

    tau: float | None = Field(None, gt=0, description="steps of the server, τ_eff [the mean of the clients' steps]")

    @property
    def uploads(self) -> Uploads:  # type: ignore[override]
        return {"d": Mean("samples"), **({"a": Mean("samples")} if self.tau is None else {})}

    def broadcast(self, server: Server) -> Message:
        return {"theta": server.state["theta"]}

    def train(self, client: Client, message: Message) -> Message:
        x, a = message["theta"], accumulated(client)
        moved = x - client.descend(x)
        upload = {"d": client.layout.copy_buffers(moved / a, moved)}
        return {**upload, "a": x.new_tensor(a)} if self.tau is None else upload

    def upload_like(self, server: Server, client: int) -> Message:
        return {"a": server.initial[0]}

    def receive(self, server: Server, total: Total) -> None:
        x, d = server.state["theta"], total["d"]
        tau = total["a"] if self.tau is None else self.tau
        server.state["theta"] = server.layout.copy_buffers(x - tau * d, x - d)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        if "d" not in message:
            return message["theta"]
        x, d = message["theta"], message["d"]  # right after local work: y_i
        return client.layout.copy_buffers(x - accumulated(client) * d, x - d)


def accumulated(client: Client) -> float:
    """Compute ‖a_i‖₁ of a descent; with a schedule of the steps, in steps of the rate that it begins with."""
    return client.path_length() / client.lr

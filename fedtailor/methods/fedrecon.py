"""FedRecon: clients without memory, which reconstruct their heads in every round."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import OWN_STEP, Client, Mean, Message, Method, Search, Server, Total, Uploads
from fedtailor.training.client import HeadStart
from fedtailor.training.inputs import select


class FedRecon(Method):
    """Heads are reconstructed in each round on some samples, the body trained on the rest (Singhal et al. 2021).

    g is the body, l_i the head, which begins at the network's initial head in every round and is not kept: a client has
    no state, and momentum that others keep from round to round begins anew. The head is fitted to the frozen body on
    the support part (on features that are computed once), then the body is trained under the frozen head on the query
    part; the server moves g along the mean of the clients' changes, weighted by their query samples. Each client's
    split is drawn once; a client with one sample uses it for both.

    PFLEGO's authors run it as block coordinate descent: the head is fitted from the client's last one (`keep_head`) on
    all samples (`support=1`), then one gradient of the body goes up, and the server takes the step (`body_update`). A
    client that has taken part then predicts with the head that it keeps, as it is.

    Limits, with `support=1`, `server_lr=1` and no kept momentum: an empty head (`head=0`) is FedAvg;
    `reconstruction_epochs=0` is FedBABU's training. A head that is the whole network shares nothing. New clients: as
    all others, the broadcast's body with a head reconstructed on all their training samples.
    """

    name: ClassVar[str] = "fedrecon"
    paper: ClassVar[str] = "Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021"
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head, reconstructed in each round"
    personal_head: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = OWN_STEP

    support: float = Field(
        0.5, gt=0, le=1, description="share of the samples that reconstruct the head, D_s (1: all serve for both)"
    )
    reconstruction_epochs: int = Field(10, ge=0, description="epochs of reconstruction, in place of k_r steps")
    reconstruction_lr: float | None = Field(
        None, gt=0, description="learning rate of the reconstruction, η_r [the experiment's]"
    )
    server_lr: float = Field(1.0, gt=0, description="learning rate of the server, η_s")
    body_update: Literal["descent", "sgd", "adam"] = Field(
        "descent",
        description="how the body moves: by the clients' descents, or by one step of the server's SGD or Adam along "
        "the mean of their gradients",
    )
    keep_head: bool = Field(False, description="begin with the client's last head, and predict with it")
    head_start: HeadStart = Field(
        "network", description="a head's initial values: the network's, or uniform in [0, 1) as in PFLEGO's release"
    )
    search: ClassVar[Search] = {"reconstruction_epochs": "1..10", "reconstruction_lr": "0.001..1:log"}

    @property
    def uploads(self) -> Uploads:  # type: ignore[override]
        return {"body" if self.body_update == "descent" else "gradient": Mean("n_query")}

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def train(self, client: Client, message: Message) -> Message:
        support, query = self._split(client)
        theta = self._reconstruct(support, message["body"], client.state.get("head"))
        if self.keep_head:
            client.state["head"] = theta[client.head]
        n_query = theta.new_tensor(query.n_samples)
        if self.body_update == "descent":
            return {"body": query.descend(theta, part=client.body)[client.body], "n_query": n_query}
        return {"gradient": query.gradient(theta)[client.body], "n_query": n_query}

    def broadcast(self, server: Server) -> Message:
        return {"body": server.state["body"]}

    def upload_like(self, server: Server, client: int) -> Message:
        return {"gradient": server.state["body"]}

    def receive(self, server: Server, total: Total) -> None:
        if self.body_update != "descent":  # g − η_s Σ n_i / n ∇f_i(g, l_i)
            server.step("body", total["gradient"], self.server_lr, self.body_update)
            return
        g, mean = server.state["body"], total["body"]  # by n_i = |D_i,q|
        moved = g.lerp(mean, self.server_lr)  # g + η_s Σ n_i / n (g_i − g)
        server.state["body"] = server.layout.copy_buffers(moved, mean)  # no step led to these

    def personal_model(self, client: Client, message: Message) -> Tensor:
        head = client.state.get("head")
        if head is not None:
            return torch.cat([message["body"], head])
        return self._reconstruct(client.fresh(), message["body"])  # the same in all rounds

    def _split(self, client: Client) -> list[Client]:
        """Make two clients without a state: one with the support samples, one with the query samples."""
        (x, y), support = client.train_data, self._supporting(client.n_samples)
        stream = client.stream("split", every_round=False)
        order = torch.randperm(client.n_samples, generator=stream, device="cpu").to(x.device)
        parts = [order[:support], order[support:]] if support < client.n_samples else [None, None]  # None: all
        return [replace(client, state={}, train_data=(select(x, part), select(y, part))) for part in parts]

    def _supporting(self, samples: int) -> int:
        """Count the support samples of a client; if all samples are, they are the query as well."""
        return samples if self.support == 1 else max(1, min(round(self.support * samples), samples - 1))

    def _reconstruct(self, client: Client, body: Tensor, head: Tensor | None = None) -> Tensor:
        """Fit a head to the body, from this one or from its initial values."""
        theta = torch.cat([body, client.initial_head(self.head_start) if head is None else head])
        lr = self.reconstruction_lr or client.optimizer.lr
        return client.descend(theta, part=client.head, epochs=self.reconstruction_epochs, steps=None, lr=lr)

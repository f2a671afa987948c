"""FedRecon: clients without memory, which reconstruct their heads on every visit."""

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.local.descent import take
from fedtailor.method import Client, Message, Method, Replies, Server


class FedRecon(Method):
    """Heads are reconstructed on each visit on some samples, the body trained on the rest (Singhal et al. 2021).

    g is the body, l_i the head, which begins at the network's first head on every visit and is not kept: a client has
    no state, and momentum that others keep from visit to visit begins anew. The head is fitted to the frozen body on
    the support part (on features that are computed once), then the body is trained under the frozen head on the query
    part; the server moves g along the mean of the clients' changes, weighted by their query samples. Each client's
    split is drawn once; a client with one sample uses it for both.

    Limits, with `support=1`, `server_lr=1` and no kept momentum: an empty head (`head=0`) is FedAvg;
    `reconstruction_epochs=0` is FedBABU's training. A head that is the whole network shares nothing. New clients: as
    all others, the broadcast's body with a head reconstructed on all their training samples.
    """

    name: ClassVar[str] = "fedrecon"
    paper: ClassVar[str] = "Singhal et al., Federated Reconstruction: Partially Local Federated Learning, NeurIPS 2021"
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head, reconstructed on each visit"
    personal_head: ClassVar[bool] = True

    support: float = Field(
        0.5, gt=0, le=1, description="share of the samples that reconstruct the head, D_s (1: all serve for both)"
    )
    reconstruction_epochs: int = Field(10, ge=0, description="epochs of reconstruction, in place of k_r steps")
    reconstruction_lr: float | None = Field(
        None, gt=0, description="learning rate of the reconstruction, η_r [the experiment's]"
    )
    server_lr: float = Field(1.0, gt=0, description="learning rate of the server, η_s")

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def broadcast(self, server: Server) -> Message:
        return {"body": server.state["body"]}

    def train(self, client: Client, message: Message) -> Message:
        support, query = self._split(client)
        theta = self._reconstruct(support, message["body"])
        return {"body": query.descend(theta, part=client.body)[client.body]}

    def receive(self, server: Server, replies: Replies) -> None:
        queries = [n - self._supporting(n) or n for n in replies.samples.tolist()]  # n_i = |D_i,q|
        mean = replies.mean("body", replies.samples.new_tensor(queries))
        body = server.state["body"].lerp(mean, self.server_lr)  # g + η_s Σ n_i / n (g_i − g)
        for place in server.statistics:
            if place.stop <= server.body.stop:
                body[place] = mean[place]  # no step led there
        server.state["body"] = body

    def personal(self, client: Client, message: Message) -> Tensor:
        return self._reconstruct(replace(client, round=0, state={}), message["body"])  # the same in all rounds

    def _split(self, client: Client) -> list[Client]:
        """The client with its support samples, and with its query samples; neither with a state."""
        (x, y), support = client.train, self._supporting(client.samples)
        stream = client.stream("split", every_round=False)
        order = torch.randperm(client.samples, generator=stream, device="cpu").to(x.device)
        parts = [order[:support], order[support:]] if support < client.samples else [None, None]  # None: all
        return [replace(client, state={}, train=(take(x, part), take(y, part))) for part in parts]

    def _supporting(self, samples: int) -> int:
        """How many of a client's samples are support; if all are, they are the query as well."""
        return samples if self.support == 1 else max(1, min(round(self.support * samples), samples - 1))

    def _reconstruct(self, client: Client, body: Tensor) -> Tensor:
        theta = torch.cat([body, client.initial[client.head]])
        lr = self.reconstruction_lr or client.how.lr
        return client.descend(theta, part=client.head, epochs=self.reconstruction_epochs, steps=None, lr=lr)

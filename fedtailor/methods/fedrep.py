"""FedRep: a shared body, and heads that are fitted to it before it moves."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Server, Uploads


class FedRep(Method):
    """Participants fit their heads to the shared body, then train the body, which is averaged (Collins et al. 2021).

    φ is the body, h_i the head, which never leaves. The head's epochs run on features that are computed once; the body
    then gets the experiment's epochs. Algorithm 1 weighs all participants equally; the authors' release weighs them by
    their samples: `released_weights`.

    Limits: `head_epochs=0` with `released_weights` is FedBABU's training; an empty head (`head=0`) with
    `released_weights` is FedAvg; a head that is the whole network with `head_epochs` equal to the experiment's epochs
    is Local. New clients: a head fitted to the present body in `head_epochs`, as in the paper.
    """

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    )
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head"
    personal_head: ClassVar[bool] = True

    head_epochs: int = Field(10, ge=0, description="epochs of the head on the received body, τ")
    released_weights: bool = Field(False, description="weigh participants by their samples, as the release does")

    @property
    def uploads(self) -> Uploads:  # type: ignore[override]
        return {"body": Mean("samples" if self.released_weights else "equal")}

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def train(self, client: Client, message: Message) -> Message:
        theta = self._fit_head(client, message)
        client.state["head"] = theta[client.head]
        return {"body": client.descend(theta, part=client.body)[client.body]}

    def _fit_head(self, client: Client, message: Message) -> Tensor:
        theta = torch.cat([message["body"], client.state.get("head", client.initial[client.head])])
        return client.descend(theta, part=client.head, epochs=self.head_epochs, steps=None)

    def personal_model(self, client: Client, message: Message) -> Tensor:
        if "head" in client.state:
            return torch.cat([message["body"], client.state["head"]])
        return self._fit_head(client.fresh(), message)  # the same in all rounds

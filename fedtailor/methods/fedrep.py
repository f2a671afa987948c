"""FedRep: a shared body, and heads that are fitted to it before it moves."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Search, Server, Uploads
from fedtailor.training.client import HeadStart


class FedRep(Method):
    """Participants fit their heads to the shared body, then train the body, which is averaged (Collins et al. 2021).

    φ is the body, h_i the head, which never leaves. The head's epochs run on features that are computed once; the body
    then gets `body_epochs` epochs: the experiment's own `epochs` and `steps` play no part. Heads that fit so well move
    the body far, so the rate of both is the experiment's but at most `max_lr`. Algorithm 1 weighs all participants
    equally; the authors' release weighs them by their samples: `released_weights`.

    The personal model is the present φ with h_i fitted to it once more, for `head_epochs` epochs; the release ends with
    a round that does this for all clients. Without `refit` it is φ with h_i as it is, fitted to the φ of the client's
    last round.

    Limits, with E the experiment's epochs and at most `max_lr` as its rate: `head_epochs=0` and `body_epochs=E` with
    `released_weights` is FedBABU's training; an empty head (`head=0`) and `body_epochs=E` with `released_weights` is
    FedAvg; a head that is the whole network with `head_epochs=E` and without `refit` is Local. New clients: a head
    fitted to the present body in `head_epochs`, as in the paper.

    Privacy: the head never leaves, and of whole clients needs no noise. Of single samples it has noise in training, as
    all of the body's gradients depend on a head that one sample has moved; refitted to predict, it has none.
    """

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    )
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "the head"
    personal_head: ClassVar[bool] = True

    head_epochs: int = Field(10, ge=0, description="epochs of the head on the received body, τ")
    body_epochs: int = Field(1, ge=0, description="epochs of the body under the new head, in place of the experiment's")
    max_lr: float = Field(
        0.02, gt=0, description="largest learning rate of head and body; the experiment's is cut to it"
    )
    refit: bool = Field(True, description="predict with a head fitted to the present body, as the release does")
    released_weights: bool = Field(False, description="weigh participants by their samples, as the release does")
    head_start: HeadStart = Field(
        "network", description="a head's initial values: the network's, or uniform in [0, 1) as in PFLEGO's release"
    )
    search: ClassVar[Search] = {"lr": None, "max_lr": "0.001..0.1:log", "head_epochs": "1..10", "body_epochs": "1..5"}

    @property
    def uploads(self) -> Uploads:  # type: ignore[override]
        return {"body": Mean("samples" if self.released_weights else "equal")}

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def train(self, client: Client, message: Message) -> Message:
        theta = self._descend(client, self._joined(client, message), client.head, self.head_epochs)
        client.state["head"] = theta[client.head]
        return {"body": self._descend(client, theta, client.body, self.body_epochs)[client.body]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta = self._joined(client, message)
        if "head" in client.state and not self.refit:
            return theta
        return self._descend(client.fresh(), theta, client.head, self.head_epochs)  # the same in all rounds

    def _joined(self, client: Client, message: Message) -> Tensor:
        """Join the shared body and the client's last head."""
        return torch.cat([message["body"], client.own_head(self.head_start)])

    def _descend(self, client: Client, theta: Tensor, part: slice, epochs: int) -> Tensor:
        return client.descend(theta, part=part, epochs=epochs, steps=None, lr=min(client.optimizer.lr, self.max_lr))

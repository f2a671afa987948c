"""FedBABU: the body alone is trained and averaged, under a head that stays as it began."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Mean, Message, Method, Search, Server, Uploads


class FedBABU(Method):
    """The body is trained under one fixed random head and averaged; clients then fine-tune (Oh et al. 2022).

    All clients have the same head, made from the seed: only the body is sent. The personal model is the global one
    (body and fixed head) after `tuning_epochs` epochs on the client's own samples, of everything or of one part. It is
    the same in all rounds for the same body.

    Limits: `tuning_epochs=0` is the global model itself; `tuning_epochs=k` on everything is that model under the
    evaluation's own fine-tuning of k epochs; an empty head (`head=0`) is FedAvg, fine-tuned in the same way; a head
    that is the whole network is a network that only fine-tuning trains. New clients: the same as all others.
    """

    name: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = (
        "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    )
    shared_part: ClassVar[str] = "the body"
    own_part: ClassVar[str] = "what fine-tuning changes"

    uploads: ClassVar[Uploads] = {"body": Mean("samples")}

    tuning_epochs: int = Field(5, ge=0, description="epochs of fine-tuning that make the personal model, τ_f")
    tuned: Literal["all", "head", "body"] = Field("all", description="what is fine-tuned: everything, or one part")
    head_start: Literal["network", "orthogonal"] = Field(
        "network", description="the fixed head: the network's initial one, or the orthogonal one nearest to it"
    )
    search: ClassVar[Search] = {"tuning_epochs": "1..10"}

    def start(self, server: Server) -> None:
        server.state["body"] = server.initial[server.body]

    def train(self, client: Client, message: Message) -> Message:
        return {"body": client.descend(self._whole(client, message), part=client.body)[client.body]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        part = {"all": None, "head": client.head, "body": client.body}[self.tuned]
        return client.fine_tuned(self._whole(client, message), self.tuning_epochs, part)

    def global_model(self, server: Server) -> Tensor | None:
        """Return the global model; None with an orthogonal head, as only clients know the shapes of the layers."""
        return torch.cat([server.state["body"], server.initial[server.head]]) if self.head_start == "network" else None

    def _whole(self, client: Client, message: Message) -> Tensor:
        head = client.initial[client.head] if self.head_start == "network" else orthogonal_head(client)
        return torch.cat([message["body"], head])


@torch.no_grad()
def orthogonal_head(client: Client) -> Tensor:
    """Make the initial head orthogonal: the nearest orthogonal matrix for each weight matrix (rows of length 1)."""
    network = client.network
    network.vector.copy_(client.initial)
    for name in network.head_names:
        for weight in network.module.get_submodule(name).parameters(recurse=False):
            if weight.dim() == 2:
                left, _, right = torch.linalg.svd(weight.double().cpu(), full_matrices=False)
                weight.copy_(left @ right)
    return network.vector[client.head].clone()

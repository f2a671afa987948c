"""FedAvg+FT: FedAvg's model, fine-tuned by every client."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedtailor.method import Client, Message, Search
from fedtailor.methods.fedavg import FedAvg


class FedAvgFT(FedAvg):
    """FedAvg, and each client predicts with the global model fine-tuned on its own samples (Wang et al. 2019).

    It is the same in all rounds for the same global model, and no client keeps anything. Limits: `tuning_epochs=0` is
    FedAvg; `tuning_epochs=k` is FedAvg under the evaluation's own fine-tuning of k epochs. New clients: the same as all
    others.
    """

    name: ClassVar[str] = "fedavg-ft"
    title: ClassVar[str] = "FedAvg+FT"
    paper: ClassVar[str] = "Wang et al., Federated Evaluation of On-device Personalization, arXiv:1910.10252, 2019"
    shared_part: ClassVar[str] = "the model"
    own_part: ClassVar[str] = "what fine-tuning changes"

    tuning_epochs: int = Field(5, ge=0, description="epochs of fine-tuning that make the personal model")
    search: ClassVar[Search] = {"tuning_epochs": "1..10"}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.fine_tuned(message["theta"], self.tuning_epochs)

"""FedAvg: the clients' models, averaged."""

from typing import ClassVar

from fedtailor.method import Client, Message, Method


class FedAvg(Method):
    """Every participant descends from the global model; the server averages the results (McMahan et al. 2017).

    The weights are n_i / Σ n over the participants. Fine-tuning is an option of the evaluation (0 epochs: the global
    model itself). New clients: the global model. Limits: with one participant it is Local for that round; with
    identical clients and one full-batch step it is gradient descent on all data together.
    """

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
    )

    def train(self, client: Client, message: Message) -> Message:
        return {"theta": client.descend(message["theta"])}

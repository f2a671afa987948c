"""What tests of reproductions share."""

from typing import Any

import torch

from fedtailor.method import Client, Message, Method
from fedtailor.studies.reproduction import Reproduction

SMALL: dict[str, Any] = {"data": "digits", "model": "mlp:16", "rounds": 3, "max_train": 30, "engine": "in-process"}


def work(reproduction: Reproduction) -> None:
    for path, experiment in reproduction.todo().items():
        reproduction.run(path, experiment, lambda record: None, lambda run: None)


class Explodes(Method):
    """A method whose training diverges at once."""

    def train(self, client: Client, message: Message) -> Message:
        return {"theta": client.descend(message["theta"]) * torch.inf}

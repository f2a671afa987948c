"""Sites that a test asks by hand, and a method whose state tells what was done to it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.client.sites import Sites
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import make_experiment

SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "model": "mlp:4", "epochs": 1, "engine": "in-process"}


class Counting(ft.Method):
    """FedAvg whose clients count their rounds, and do wrong what the message asks for."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        rounds = client.state.setdefault("rounds", torch.zeros(()))
        rounds += 1  # in place
        theta = client.descend(message["theta"]) + rounds
        message["theta"].zero_()
        if "fail" in message:
            raise OSError("no disk left")
        if "nan" in message:
            return {"theta": theta * float("nan")}
        if "forget" in message:
            client.state.clear()
        return {"theta": theta}

    def personal_model(self, client: ft.Client, message: ft.Message) -> Tensor:
        client.state["rounds"] = torch.tensor(-1.0)
        if "fail" in message:
            raise ValueError("no model here")
        return message["theta"]


def prepared(method: ft.Method | None = None, **settings: Any) -> Prepared:
    return prepare(make_experiment({**SMALL, **settings}), Objects(method=method or Counting()))


def make_sites(
    directory: Path | None = None, on_disk: bool = False, method: ft.Method | None = None, **settings: Any
) -> Sites:
    found = prepared(method, **settings)
    return Sites.at(found.data, found.terms, directory, on_disk)

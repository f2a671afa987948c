"""`fedtailor.testing`: a good method passes, and each fault is found by the check that it concerns."""

from typing import ClassVar

import pytest
import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

import fedtailor as ft
from examples.halfway import Halfway
from fedtailor.method import Uploads
from fedtailor.testing import CHECKS, check_method, parametrize_with_checks


@parametrize_with_checks([Halfway(), Halfway(own=1.0)])
def test_the_example_passes(method: ft.Method, check: object) -> None:
    check(method)  # type: ignore[operator]


class Plain(ft.Method):
    """FedAvg."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}


class Undeclared(Plain):
    """Uploads more than it declares."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {**super().train(client, message), "labels": client.train_data[1].float()}


class Undescribed(Plain):
    """Has a parameter without a description."""

    mu: float = 0.1


class Taken(Plain):
    """Has a parameter that is a setting of the experiment."""

    lr: float = Field(0.1, description="another rate")


class Remembers(Plain):
    """Keeps something outside of its states: worker processes do not see it."""

    _rounds: int = PrivateAttr(0)

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        self._rounds += 1
        return {"theta": client.descend(message["theta"], lr=0.1 / self._rounds)}


class Forgets(Plain):
    """Keeps something that is not in the checkpoint."""

    _seen: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        self._seen["theta"] = self._seen.get("theta", torch.zeros_like(total["theta"])) * 0.5 + total["theta"]
        server.state["theta"] = self._seen["theta"] / 2


class Stale(Plain):
    """Says that it predicts from its own state, and does not."""

    keeps_model: ClassVar[bool] = True


class Fragile(Plain):
    """Needs more than one class."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        assert len(client.train_data[1].unique()) > 1
        return super().train(client, message)


class NeedsAll(Plain):
    """Needs an upload of every participant."""

    uploads: ClassVar[Uploads] = {"theta": ft.Each()}

    def broadcast(self, server: ft.Server) -> ft.Message:
        return {"theta": server.state["theta"]}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        thetas = total.each("theta")
        server.state["theta"] = torch.stack([thetas[client] for client in server.participants]).mean(0)


class Idle(Plain):
    """Does not learn."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": message["theta"]}


@pytest.mark.parametrize(
    ("faulty", "found_by"),
    [
        (Undeclared, "uploads_are_declared"),
        (Undescribed, "parameters_are_described"),
        (Taken, "parameters_are_described"),
        (Remembers, "same_bits_on_every_engine"),
        (Forgets, "same_bits_after_resuming"),
        (Stale, "own_model_needs_no_broadcast"),
        (Fragile, "survives_one_sample"),
        (NeedsAll, "survives_a_missing_reply"),
        (Idle, "learns"),
    ],
)
@pytest.mark.filterwarnings("ignore::fedtailor.ClientFailure")
def test_a_fault_is_found(faulty: type[ft.Method], found_by: str) -> None:
    check = next(check for check in CHECKS if check.__name__ == found_by)
    with pytest.raises((AssertionError, ValueError, KeyError, ft.FedtailorError)):
        check(faulty())


def test_the_check_that_failed_is_named() -> None:
    with pytest.raises(ValueError, match="does not declare") as caught:
        check_method(Undeclared)
    where, check = caught.value.__notes__
    assert where == "In Undeclared, round 1, client 2."
    assert check == (
        "In the check uploads_are_declared of Undeclared: A client uploads exactly what `uploads` names, with the "
        "shapes and types that `upload_like` declares."
    )

"""Groups of clients that train as one computation: who is in one, failures, interrupts, memory, and every engine."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.client.group import OutOfMemory
from fedtailor.experiment import experiment_hash, make_experiment
from fedtailor.messages import Evaluate, Together, Train
from fedtailor.server.records import RoundRecord
from fedtailor.training import stack as stack_module
from fedtailor.training.stack import Call, Functions, Stack
from fedtailor.training.stacked_module import StackedObjective
from tests.client.parts import make_sites
from tests.helpers import assert_same, final

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 7, "model": "mlp:8", "rounds": 3, "epochs": 2, "max_train": 40, "participation": 5,
    "engine": "in-process", "dtype": "float64",
}  # fmt: skip


def records(result: ft.RunResult) -> list[dict[str, Any]]:
    return [{**record.plain(), "seconds": 0} for record in result.rounds]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls are computed at once, each time."""
    sizes, compute = list[int](), Stack._together

    def counted(stack: Stack, run: list[Any]) -> list[Any]:
        sizes.append(len(run))
        return compute(stack, run)

    monkeypatch.setattr(Stack, "_together", counted)
    return sizes


def test_a_group_is_clients_with_about_as_many_samples() -> None:
    sites = make_sites(clients=20, stack=3, partition="dirichlet:0.3")
    requests = [Train(1, client, {"x": torch.tensor(client)}) for client in range(20)]
    pieces = sites.split(requests)
    assert [len(piece.clients) for piece in pieces] == [3, 3, 3, 3, 3, 3, 2]
    assert sorted(client for piece in pieces for client in piece.clients) == list(range(20))
    for piece in pieces:
        assert isinstance(piece, Together)
        sizes = [sites.size(part) for part in piece.parts]
        assert sizes == sorted(sizes, reverse=True)
        assert piece.message.keys() == {f"{client}/x" for client in piece.clients}
        assert sites.size(piece) == sum(sizes)


def test_a_group_of_one_is_a_request_like_any_other() -> None:
    sites = make_sites(stack=4)
    assert [type(piece) for piece in sites.split([Train(1, client, {}) for client in range(5)])] == [
        Together,
        Train,
    ]
    assert [type(piece) for piece in sites.split([Train(1, 3, {})])] == [Train]


def test_a_run_of_groups_has_the_numbers_of_one_client_after_the_other(together: list[int]) -> None:
    settings = {**SMALL, "momentum": 0.9, "keep_momentum": True}
    one, other = (ft.run("fedavg", stack=stack, **settings) for stack in (1, 3))
    assert together == [2, *[3, 2] * 3]  # the first one is a trial of the network
    assert_close(final(one), final(other))
    assert [record.differentiated for record in one.rounds] == [record.differentiated for record in other.rounds]


@pytest.mark.parametrize("method", ["ditto", "pgfed", "pfedgraph"])
def test_functions_of_a_method_are_called_once_for_a_group(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[Functions](), Functions.__init__

    def noted(functions: Functions, *args: Any) -> None:
        make(functions, *args)
        made.append(functions)

    monkeypatch.setattr(Functions, "__init__", noted)
    ft.run(method, stack=5, **{**SMALL, "clients": 5})
    asked = [functions for functions in made if functions.corrected or functions.followed]
    assert asked
    assert all(functions.joined for functions in asked)


@pytest.mark.parametrize("method", ["fedlc", "fedproto", "fedpac", "gpfl", "moon"])
def test_objectives_of_a_method_are_computed_for_a_group(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By as many clients as that pays for on the CPU, with a last batch that is smaller."""
    passes, made = list[StackedObjective | None](), Functions.objective

    def noted(functions: Functions, *args: Any) -> StackedObjective | None:
        passes.append(made(functions, *args))
        return passes[-1]

    monkeypatch.setattr(Functions, "objective", noted)
    settings = {**SMALL, "clients": 17, "participation": "all", "max_train": 20, "batch": 8, "rounds": 2}
    one, other = (ft.run(method, stack=stack, **settings) for stack in (1, 17))
    assert passes
    assert all(passes)
    assert_close(final(one), final(other))


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10)


def test_models_of_a_group_are_measured_in_one_pass(together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuned or not, right after training and of clients that did not take part; numbers are copied for all."""
    copies = list[int]()
    fetched = stack_module.fetched
    monkeypatch.setattr(stack_module, "fetched", lambda tensors: [copies.append(1), *fetched(tensors)][1:])
    for fine_tune in (0, 1):
        settings = {**SMALL, "participation": "all", "rounds": 1, "evaluation": {"fine_tune": fine_tune}}
        together.clear()
        copies.clear()
        other = ft.run("ditto", stack=7, **settings)
        assert together == [2, *[7] * (3 + fine_tune)]  # the trial, two descents, a fine-tuning, outputs
        assert len(copies) == 3  # the check of upload and state, and the metrics of two splits
        one = ft.run("ditto", **settings)
        for before, after in zip(one.rounds, other.rounds, strict=True):
            assert (before.accuracy, before.loss) == pytest.approx((after.accuracy, after.loss), rel=1e-9)
    requests = [Evaluate(1, client, {"theta": torch.zeros(2)}) for client in range(4)]
    pieces = make_sites(stack=3).split(requests)
    assert [piece.clients for piece in pieces if isinstance(piece, Together)] == [pieces[0].clients]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_bits_in_workers(workers: int) -> None:
    one = ft.run("ditto", stack=3, **SMALL)
    other = ft.run("ditto", stack=3, **{**SMALL, "engine": "processes", "workers": workers})
    assert records(one) == records(other)
    assert_same(final(one), final(other))


def test_the_same_bits_after_an_interrupt(tmp_path: Path) -> None:
    settings = {**SMALL, "stack": 3, "momentum": 0.9, "keep_momentum": True, "checkpoint_every": 1}
    whole = ft.run("pgfed", **settings)

    def stop(record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("pgfed", out=tmp_path / "run", on_round=stop, **settings)
    resumed = ft.resume(tmp_path / "run")
    assert records(resumed) == records(whole)
    assert_same(final(resumed), final(whole))


class Failing(ft.Method):
    """FedAvg, in which client 2 fails in round 2 after its descent."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        if (client.id, client.round) == (2, 2):
            raise OSError("no disk left")
        return {"theta": client.descend(theta)}


@pytest.mark.parametrize("engine", ["in-process", "processes"])
def test_one_clients_failure_leaves_the_others_alone(engine: str) -> None:
    settings = {**SMALL, "engine": engine, "participation": "all"}
    results, said = [], []
    for stack in (1, 7):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(ft.run(Failing(), stack=stack, workers=1, **settings))
        said.append([str(warning.message) for warning in caught if warning.category is ft.ClientFailure])
    assert said[0] == said[1]
    assert "no disk left" in said[1][0]
    assert [record.failed for record in results[1].rounds] == [[], [2], []]
    assert_close(final(results[0]), final(results[1]))


def picky(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that cannot do with class 3."""
    if bool((targets == 3).all()):
        raise ValueError("no threes, please")
    return torch.nn.functional.cross_entropy(outputs, targets)


def test_a_loss_that_fails_for_one_client_fails_for_it_alone() -> None:
    stream = torch.Generator().manual_seed(0)
    data = [(torch.rand(20, 6, generator=stream), torch.randint(3, (20,), generator=stream)) for _ in range(4)]
    data[1] = data[1][0], torch.full((20,), 3)
    settings = {"data": data, "loss": picky, "model": "mlp:4", "rounds": 2, "engine": "in-process", "dtype": "float64"}
    with pytest.warns(ft.ClientFailure, match="no threes, please|failed in every round"):
        one, other = (ft.run("ditto", stack=stack, **settings) for stack in (1, 4))
    assert [record.failed for record in other.rounds] == [[1], [1]]
    assert_close(final(one), final(other))


def test_a_method_that_fails_under_debug_passes_its_exception() -> None:
    with pytest.raises(OSError, match="no disk left") as caught:
        ft.run(Failing(), stack=7, debug=True, **{**SMALL, "participation": "all"})
    assert "In Failing, round 2, client 2." in caught.value.__notes__


class Drawing(ft.Method):
    """FedAvg with draws of PyTorch's own, and without gradients around a descent."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        first = torch.rand(3)
        with torch.no_grad():
            theta = client.descend(message["theta"])
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
        client.state["draws"] = torch.cat([first, torch.rand(3)])
        return {"theta": client.descend(theta, purpose="again")}


def test_what_is_the_threads_is_each_clients_own() -> None:
    one, other = (ft.run(Drawing(), stack=stack, **SMALL) for stack in (1, 3))
    assert_close(final(one), final(other))


class Interrupted(ft.Method):
    """FedAvg that somebody interrupts while client 3 is at work."""

    ended: list[int] = []  # noqa: RUF012

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        try:
            theta = client.descend(message["theta"])
            if client.id == 3:
                raise KeyboardInterrupt
            return {"theta": client.descend(theta)}
        finally:
            self.ended.append(client.id)


def test_an_interrupt_ends_all_clients_at_work() -> None:
    method = Interrupted()
    method.ended.clear()
    with pytest.raises(KeyboardInterrupt):
        ft.run(method, stack=7, **{**SMALL, "participation": "all"})
    assert sorted(method.ended) == list(range(7))


def test_a_group_that_does_not_fit_the_devices_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, asked = Stack.compute, list[int]()

    def limited(stack: Stack, calls: Sequence[Call]) -> list[Any]:
        asked.append(len(calls))
        if len(calls) > 2:
            raise OutOfMemory("no memory left")
        return compute(stack, calls)

    monkeypatch.setattr(Stack, "compute", limited)
    with pytest.warns(UserWarning, match="memory") as caught:
        other = ft.run("fedavg", stack=7, **{**SMALL, "participation": "all"})
    said = [str(warning.message) for warning in caught if "memory" in str(warning.message)]
    assert len(said) == 2
    assert "from here on, at most 2 train as one computation; --stack 2 does so" in said[1]
    assert asked[:4] == [2, 7, 4, 2]  # the first one is a trial of the network
    monkeypatch.undo()
    assert_close(final(ft.run("fedavg", **{**SMALL, "participation": "all"})), final(other))


def test_networks_that_cannot_are_trained_one_after_the_other(together: list[int]) -> None:
    """With one sentence before the first round, and the bits of today."""
    settings = {**SMALL, "model": "gru:4", "image_size": None, "data": windows(), "clients": None}
    with pytest.warns(UserWarning, match="Clients train one after the other, and not 3 as one computation: PyTorch"):
        other = ft.run("fedavg", stack=3, **settings)
    assert together == [2]  # the trial
    assert_same(final(ft.run("fedavg", **settings)), final(other))


def windows() -> list[tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(0)
    return [(torch.rand(20, 2, 5, generator=stream), torch.randint(3, (20,), generator=stream)) for _ in range(7)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"deadline": 10.0, "engine": "processes"}, "a deadline is for each client"),
        ({"engine": "sites-in-memory"}, "sites in memory share nothing"),
        ({"privacy": "sample, clip=1, noise=1"}, "privacy of samples takes the gradient of each"),
    ],
)
def test_what_is_for_each_client_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ft.FedtailorError, match=f"^Clients cannot train as one computation here, as {reason}"):
        ft.run("fedavg", stack=2, **{**SMALL, **settings})
    ft.run("fedavg", stack="auto", **{**SMALL, "rounds": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "stack"),
    [({}, 8), ({"batch": 32}, 8), ({"batch": 33}, 1), ({"batch": "full"}, 1), ({"model": "resnet"}, 1)],
)
def test_auto_depends_on_the_network_and_the_batch(settings: dict[str, Any], stack: int) -> None:
    assert make_sites(stack="auto", **settings).terms.stack == stack
    assert make_sites(**settings).terms.stack == 1


def test_the_size_of_a_group_decides_about_numbers() -> None:
    """And a run that is older than the setting keeps its name."""
    names = [experiment_hash(make_experiment({"stack": stack}), {}) for stack in (None, 2, 3)]
    assert len(set(names)) == 3
    assert names[0] == experiment_hash(make_experiment({}), {})

"""Aggregation of uploads as they arrive, against sums over all of them in double precision."""

import time
import warnings
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedtailor as ft
from fedtailor.engines.workers import WINDOW
from fedtailor.messages import Message
from fedtailor.method import Total, Uploads
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.aggregation.robust import TOGETHER
from fedtailor.training.layout import Layout
from tests.helpers import digits

SIZES = (3, 1, 5, 2)  # of four layers
LAYERS = {name: slice(sum(SIZES[:i]), sum(SIZES[: i + 1])) for i, name in enumerate("abcd")}
LAYOUT = Layout(sum(SIZES), slice(0, 9), slice(9, 11), LAYERS)
N_SAMPLES = torch.tensor([7, 1, 30, 12, 5, 5, 1, 90, 44, 3])
PARTICIPANTS = [0, 2, 3, 4, 7, 8, 9]  # the others are not called


def vectors(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[int, Tensor]:
    """A tensor for each participant."""
    generator = torch.Generator().manual_seed(seed)
    return {client: torch.randn(shape, generator=generator, dtype=dtype) for client in PARTICIPANTS}


def together(**tensors: dict[int, Tensor]) -> dict[int, Message]:
    """Uploads from tensors by name and client."""
    return {client: {name: found[client] for name, found in tensors.items()} for client in PARTICIPANTS}


def aggregate(
    uploads: Uploads, found: dict[int, Message], order: list[int] | None = None, failed: tuple[int, ...] = ()
) -> Total:
    total = Aggregator(uploads, PARTICIPANTS, N_SAMPLES, LAYOUT)
    for client in order or PARTICIPANTS:
        total.put(client, None if client in failed else found[client])
    return total.total()


def closed_form(
    tensors: dict[int, Tensor], weights: dict[int, NDArray[Any]], replied: list[int]
) -> NDArray[np.float64]:
    """Σ w_i x_i / Σ w_i over those who replied, entry by entry; 0 where there is no weight."""
    stacked = np.stack([tensors[client].double().numpy() for client in replied])
    w = np.stack([np.broadcast_to(weights[client], stacked[0].shape) for client in replied])
    total = w.sum(0)
    return np.where(total > 0, (w * stacked).sum(0) / np.where(total > 0, total, 1), 0)


def by_layer(weights: Tensor) -> NDArray[np.float64]:
    """A weight for each layer as one for each of its entries."""
    return np.repeat(weights.double().numpy(), SIZES, axis=-1)


SAMPLES = {client: np.float64(N_SAMPLES[client].item()) for client in PARTICIPANTS}
EQUAL = {client: np.float64(1) for client in PARTICIPANTS}
FAILED = pytest.mark.parametrize("failed", [(), (3,), (0, 9), (0, 2, 3, 4, 8, 9)])
TYPES = pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])


def those_who(failed: tuple[int, ...]) -> list[int]:
    return [client for client in PARTICIPANTS if client not in failed]


@FAILED
@TYPES
@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_a_mean_is_over_those_who_replied(
    weights: str, dtype: torch.dtype, rounding: float, failed: tuple[int, ...]
) -> None:
    theta = vectors(11, dtype=dtype)
    total = aggregate({"theta": ft.Mean(weights)}, together(theta=theta), failed=failed)
    expected = closed_form(theta, SAMPLES if weights == "samples" else EQUAL, those_who(failed))
    assert total["theta"].dtype == dtype
    np.testing.assert_allclose(total["theta"].double().numpy(), expected, rtol=0, atol=rounding)
    assert total.clients == those_who(failed)
    assert total.n_samples.tolist() == N_SAMPLES[those_who(failed)].tolist()
    assert total.index.tolist() == those_who(failed)


@FAILED
@TYPES
@pytest.mark.parametrize("kind", ["one number", "one a row", "one a layer", "one a layer and row"])
def test_a_mean_by_the_clients_own_weights(
    kind: str, dtype: torch.dtype, rounding: float, failed: tuple[int, ...]
) -> None:
    """One number; a column against the rows of a matrix (pFedMB's branches); one for each layer; both."""
    theta = vectors(11, dtype=dtype) if kind in ("one number", "one a layer") else vectors(3, 11, dtype=dtype)
    shape = {"one number": (), "one a row": (3, 1), "one a layer": (4,), "one a layer and row": (3, 4)}[kind]
    weights = {client: w.abs() for client, w in vectors(*shape, dtype=dtype, seed=1).items()}
    total = aggregate({"theta": ft.Mean("alpha")}, together(theta=theta, alpha=weights), failed=failed)
    spread = {c: by_layer(w) if "layer" in kind else w.double().numpy() for c, w in weights.items()}
    expected = closed_form(theta, spread, those_who(failed))
    np.testing.assert_allclose(total["theta"].double().numpy(), expected, rtol=0, atol=10 * rounding)
    summed = sum(weights[client].double() for client in those_who(failed))
    torch.testing.assert_close(total.weight("theta").double(), summed, rtol=rounding, atol=rounding)
    assert total.weight("theta").shape == shape


@FAILED
@pytest.mark.parametrize("kind", ["one a row", "one a layer and row"])
def test_one_upload_with_weights_for_several_rows_has_a_mean_for_each(kind: str, failed: tuple[int, ...]) -> None:
    """IFCA's clusters: a client's one model counts in the row of its cluster."""
    theta = vectors(11)
    weights = {c: w.abs() for c, w in vectors(*((3, 1) if kind == "one a row" else (3, 4)), seed=1).items()}
    total = aggregate({"theta": ft.Mean("alpha")}, together(theta=theta, alpha=weights), failed=failed)
    rows = {client: tensor.expand(3, 11) for client, tensor in theta.items()}
    spread = {c: by_layer(w) if "layer" in kind else w.double().numpy() for c, w in weights.items()}
    expected = closed_form(rows, spread, those_who(failed))
    assert total["theta"].shape == (3, 11)
    np.testing.assert_allclose(total["theta"].double().numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("upload", [torch.ones(3), torch.ones(2, 2), torch.tensor(1.0), torch.ones(2).double()])
def test_an_upload_of_another_shape_or_type_is_left_out_and_the_sum_untouched(upload: Tensor) -> None:
    uploads = {"first": ft.Mean(), "theta": ft.Mean()}
    running = Aggregator(uploads, [0, 1, 2], torch.tensor([1, 1, 2]), LAYOUT)
    assert running.put(0, {"first": torch.ones(1), "theta": torch.ones(2)}) == {}
    refused = running.put(1, {"first": 100 * torch.ones(1), "theta": upload})
    assert list(refused) == [1]
    assert refused[1].startswith("its upload 'theta' ")
    running.put(2, {"first": 4 * torch.ones(1), "theta": 4 * torch.ones(2)})
    total = running.total()
    assert total.clients == [0, 2]
    assert total["first"].tolist() == pytest.approx([3.0])
    assert total["theta"].tolist() == pytest.approx([3.0, 3.0])


class Shapeless(ft.Method):
    """FedAvg with a client whose upload cannot be added to the others'."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("alpha")}
    what: str = "theta"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta, alpha = message["theta"] + 1, torch.ones(())
        if client.id == 1:
            theta, alpha = (torch.ones(5), alpha) if self.what == "theta" else (theta, torch.ones(7))
        return {"theta": theta, "alpha": alpha}

    def upload_like(self, server: ft.Server, client: int) -> ft.Message:
        """Declare each client's own shapes, so that only adding them up can fail."""
        other = {"theta": torch.ones(5)} if self.what == "theta" else {"alpha": torch.ones(7)}
        return other if client == 1 else {}


@pytest.mark.parametrize("what", ["theta", "alpha"])
@pytest.mark.parametrize("engine", ["in-process", "processes"])
def test_a_client_whose_upload_cannot_be_added_is_left_out_by_name(what: str, engine: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ft.run(Shapeless(what=what), data=digits([9, 9, 9]), model="mlp:4", rounds=2, engine=engine)
    first, last = (str(warning.message) for warning in caught)
    assert first.startswith("Shapeless, round 1: client 1 left out: its upload 'theta' ")
    assert last == "Shapeless: 1 of 3 clients failed in every round that they took part in."
    assert [record.failed for record in result.rounds] == [[1], [1]]
    initial = result.simulation.server.initial
    torch.testing.assert_close(result.server_state["theta"], initial + 2)


@pytest.mark.parametrize("failed", [(), (3, 8)])
def test_entries_without_any_weight_are_zero(failed: tuple[int, ...]) -> None:
    theta, weights = vectors(11), {client: torch.zeros(()) for client in PARTICIPANTS}
    total = aggregate({"theta": ft.Mean("alpha")}, together(theta=theta, alpha=weights), failed=failed)
    assert torch.equal(total["theta"], torch.zeros(11))
    layers = {client: torch.tensor([1.0, 0.0, 2.0, 0.0]) for client in PARTICIPANTS}
    total = aggregate({"theta": ft.Mean("alpha")}, together(theta=theta, alpha=layers), failed=failed)
    for name, place in LAYERS.items():
        assert (total["theta"][place] == 0).all() == (name in "bd")
    expected = closed_form(theta, {c: by_layer(w) for c, w in layers.items()}, those_who(failed))
    np.testing.assert_allclose(total["theta"].double().numpy(), expected, rtol=0, atol=1e-6)


def test_integers_are_averaged_as_numbers() -> None:
    counts = {client: torch.tensor([client, 2 * client]) for client in PARTICIPANTS}
    hits = {client: torch.tensor([client % 2 == 0, True]) for client in PARTICIPANTS}
    weights = {client: torch.tensor(client) for client in PARTICIPANTS}
    uploads = {"counts": ft.Mean("samples"), "hits": ft.Mean("equal"), "by": ft.Mean("weights")}
    total = aggregate(uploads, together(counts=counts, hits=hits, by=counts, weights=weights))
    np.testing.assert_allclose(total["counts"].numpy(), closed_form(counts, SAMPLES, PARTICIPANTS), rtol=1e-12)
    np.testing.assert_allclose(total["hits"].numpy(), closed_form(hits, EQUAL, PARTICIPANTS), rtol=1e-12)
    own = {client: np.float64(client) for client in PARTICIPANTS}
    np.testing.assert_allclose(total["by"].numpy(), closed_form(counts, own, PARTICIPANTS), rtol=1e-12)
    assert total["counts"].dtype == torch.float64


def test_scalars_counts_and_nothing_at_all() -> None:
    uploads = {name: ft.Mean() for name in ("loss", "count", "none")}
    running = Aggregator(uploads, [0, 1], torch.tensor([1, 3]), LAYOUT)
    running.put(1, {"loss": torch.tensor(1.0), "count": torch.tensor([2, 4]), "none": torch.empty(0)})
    running.put(0, {"loss": torch.tensor(3.0), "count": torch.tensor([4, 8]), "none": torch.empty(0)})
    total = running.total()
    assert total["loss"] == 1.5
    assert total["count"].tolist() == [2.5, 5.0]
    assert total["none"].shape == (0,)


@pytest.mark.parametrize("failed", [(), (3, 8)])
def test_what_is_seen_singly_is_what_was_uploaded(failed: tuple[int, ...]) -> None:
    gradients = vectors(11)
    total = aggregate({"g": ft.Each()}, together(g=gradients), order=PARTICIPANTS[::-1], failed=failed)
    assert list(total.each("g")) == those_who(failed)
    for client in those_who(failed):
        assert torch.equal(total.each("g")[client], gradients[client])
    assert torch.equal(total.rows("g"), torch.stack([gradients[client] for client in those_who(failed)]))
    expected = closed_form(gradients, SAMPLES, those_who(failed))
    np.testing.assert_allclose(total["g"].double().numpy(), expected, rtol=0, atol=1e-6)


def test_a_mean_is_not_seen_singly_and_hides_its_weights_uploads() -> None:
    theta, weights = vectors(11), {client: torch.tensor(1.0) for client in PARTICIPANTS}
    total = aggregate({"theta": ft.Mean("alpha")}, together(theta=theta, alpha=weights))
    for name in ("theta", "alpha"):
        with pytest.raises(KeyError):
            total.each(name)
    with pytest.raises(KeyError):
        total["alpha"]


EVERYTHING: Uploads = {
    "theta": ft.Mean("samples"),
    "step": ft.Mean("equal"),
    "branches": ft.Mean("alpha"),
    "layers": ft.Mean("beta"),
    "g": ft.Each(),
}


@pytest.mark.parametrize("failed", [(), (0,), (4, 7)])
def test_the_order_of_arrival_is_not_seen_in_any_bit(failed: tuple[int, ...]) -> None:
    found = together(
        theta=vectors(11, seed=1),
        step=vectors(5, seed=2),
        branches=vectors(3, 11, seed=3),
        alpha={client: w.abs() for client, w in vectors(3, 1, seed=4).items()},
        layers=vectors(11, seed=5),
        beta={client: w.abs() for client, w in vectors(4, seed=6).items()},
        g=vectors(11, seed=7),
    )
    reference = aggregate(EVERYTHING, found, failed=failed)
    random = np.random.default_rng(0)
    for _ in range(25):
        order = [PARTICIPANTS[place] for place in random.permutation(len(PARTICIPANTS))]
        total = aggregate(EVERYTHING, found, order, failed)
        for name in EVERYTHING:
            assert torch.equal(total[name], reference[name])
        for name in ("branches", "layers"):
            assert torch.equal(total.weight(name), reference.weight(name))
        assert list(total.each("g")) == list(reference.each("g"))
        assert total.clients == reference.clients


def test_uploads_are_left_as_they_were() -> None:
    """In process they may be tensors that somebody else still has."""
    theta, weights = vectors(11), {client: w.abs() for client, w in vectors(4, seed=1).items()}
    before = [{c: t.clone() for c, t in found.items()} for found in (theta, weights)]
    aggregate({"theta": ft.Mean("alpha"), "alpha": ft.Mean("equal")}, together(theta=theta, alpha=weights))
    for found, was in zip((theta, weights), before, strict=True):
        assert all(torch.equal(found[client], was[client]) for client in PARTICIPANTS)


def test_nobody_replied() -> None:
    total = aggregate(EVERYTHING, {}, failed=tuple(PARTICIPANTS))
    assert total.clients == []
    assert len(total.n_samples) == 0
    assert total.each("g") == {}
    assert Aggregator(EVERYTHING, [], N_SAMPLES, LAYOUT).total().clients == []


# --- memory: a few uploads at a time, however many participants ---


def test_an_upload_is_let_go_as_soon_as_it_is_its_turn() -> None:
    total = Aggregator({"theta": ft.Mean()}, list(range(10)), N_SAMPLES, LAYOUT)
    alive: list[weakref.ref[Tensor]] = []
    for client in (1, 2, 0, 3, 5, 4, 9, 8, 7, 6):
        theta = torch.ones(11)
        alive.append(weakref.ref(theta))
        total.put(client, {"theta": theta})
        del theta
        assert sum(ref() is not None for ref in alive) == len(total._waiting)
    assert total._waiting == {}


class Slow(ft.Method):
    """FedAvg whose first client is the last one to reply."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples")}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        if client.id == 0:
            time.sleep(1.0)
        return {"theta": message["theta"] + client.id}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "workers"), [("in-process", 1), ("processes", 1), ("processes", 2)])
@pytest.mark.parametrize("clients", [20, 60])
def test_the_server_holds_few_uploads_however_many_take_part(
    engine: str, workers: int, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []
    waiting: list[int] = []
    held: list[int] = []
    put = Aggregator.put

    def counting(total: Aggregator, client: int, upload: Message | None) -> dict[int, str]:
        assert upload is not None
        alive.append(weakref.ref(upload["theta"]))
        refused = put(total, client, upload)
        waiting.append(len(total._waiting))
        held.append(sum(ref() is not None for ref in alive))
        return refused

    monkeypatch.setattr(Aggregator, "put", counting)
    sizes = [1 + number % 3 for number in range(clients)]
    settings: dict[str, Any] = {
        "model": "logistic",
        "test": 0.0,
        "validation": 0.0,
        "rounds": 1,
        "evaluation": {"every": 0},
    }
    result = ft.run(Slow(), data=digits(sizes), engine=engine, workers=workers, **settings)
    assert len(waiting) == clients
    most = WINDOW * workers - 1 if engine == "processes" else 0
    assert max(waiting) <= most
    assert max(held) <= max(waiting) + TOGETHER - 1  # and the first few, which wait for the guard
    assert held[-1] <= 1  # the one that has just come
    if engine == "processes" and workers == 2:
        assert max(waiting) == most  # all that may be ahead of the slow one were
    expected = sum(n * i for i, n in enumerate(sizes)) / sum(sizes)
    change = result.server_state["theta"] - result.simulation.server.initial
    torch.testing.assert_close(change, torch.full_like(change, expected), rtol=1e-5, atol=0)

"""Robust aggregation of a round's uploads, and runs with it."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.messages import Message
from fedtailor.method import Total, Uploads
from fedtailor.methods import all_methods, find_method
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.aggregation.robust import NormBoundAggregator, RobustAggregator
from fedtailor.training.layout import Layout, bounded
from tests.helpers import assert_same, final
from tests.server.robust import MATRIX_RULES, SMALL

CLIENTS = [0, 1, 3, 4, 5, 7]
N_SAMPLES = torch.tensor([1000, 1, 5, 2, 9, 4, 5, 3])
LAYOUT = Layout(6, slice(0, 4), slice(4, 6), {"a": slice(0, 4), "b": slice(4, 6)}, (), (slice(2, 4),))
PLAIN = Layout(6, slice(0, 4), slice(4, 6), {"a": slice(0, 4), "b": slice(4, 6)})


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {client: torch.randn(shape, generator=generator, dtype=dtype) for client in CLIENTS}


def aggregate(total: Aggregator, order: list[int] | None = None, failed: tuple[int, ...] = (), **found: Any) -> Total:
    for client in order or CLIENTS:
        upload = {name: tensors[client] for name, tensors in found.items()}
        assert total.put(client, None if client in failed else upload) == {}
    return total.total()


def robust(rule: str, uploads: Uploads, layout: Layout = LAYOUT) -> RobustAggregator:
    return RobustAggregator(uploads, CLIENTS, N_SAMPLES, layout, rule=Rule.parse(rule))


# --- by a rule ---


@pytest.mark.parametrize("failed", [(), (0,), (3,)])
@pytest.mark.parametrize("weights", ["samples", "equal"])
@pytest.mark.parametrize("rule", ["median", "trimmed:0.2"])
def test_a_rule_takes_each_client_for_one_whatever_samples_it_claims(
    rule: str, weights: str, failed: tuple[int, ...]
) -> None:
    theta = vectors(2, 3)
    total = aggregate(robust(rule, {"theta": ft.Mean(weights)}), failed=failed, theta=theta)
    rows = np.stack([theta[client].double().numpy() for client in CLIENTS if client not in failed])
    expected = np.median(rows, 0) if rule == "median" else np.sort(rows, 0)[1:-1].mean(0)
    np.testing.assert_allclose(total["theta"].double().numpy(), expected, rtol=1e-6, atol=1e-7)
    assert (total["theta"].shape, total["theta"].dtype) == ((2, 3), torch.float32)
    assert total.clients == [client for client in CLIENTS if client not in failed]


@pytest.mark.parametrize("rule", MATRIX_RULES)
@pytest.mark.parametrize("failed", [(), (4,)])
def test_the_order_of_arrival_is_not_seen_in_any_bit(rule: str, failed: tuple[int, ...]) -> None:
    uploads: Uploads = {"theta": ft.Mean(), "step": ft.Mean("equal"), "alpha": ft.Each(record=True)}
    found = {"theta": vectors(6), "step": vectors(3, 5, seed=1), "alpha": vectors(2, seed=2)}
    expected = aggregate(robust(rule, uploads), failed=failed, **found)
    for seed in range(5):
        order = [CLIENTS[place] for place in np.random.default_rng(seed).permutation(len(CLIENTS))]
        total = aggregate(robust(rule, uploads), order, failed, **found)
        assert all(torch.equal(total[name], expected[name]) for name in ("theta", "step"))
        assert list(total.each("alpha")) == list(expected.each("alpha"))
        assert all(torch.equal(x, found["alpha"][client]) for client, x in total.each("alpha").items())


@pytest.mark.parametrize("rule", ["krum:1", "multi-krum:1,2"])
def test_krum_chooses_once_by_the_distances_of_all_uploads_without_buffers(rule: str) -> None:
    theta, step = vectors(6), vectors(3, seed=7)
    for client in CLIENTS:
        theta[client][2:4] *= 1e5  # buffers

    def chosen(*tensors: dict[int, Tensor]) -> list[int]:
        rows = {c: np.concatenate([x[c].double().numpy() for x in tensors]) for c in CLIENTS}
        away = {c: sorted(((rows[c] - rows[o]) ** 2).sum() for o in CLIENTS if o != c) for c in CLIENTS}
        return sorted(CLIENTS, key=lambda c: sum(away[c][: 6 - 1 - 2]))[: Rule.parse(rule).selected]

    parameters = {client: x[[0, 1, 4, 5]] for client, x in theta.items()}
    best = chosen(parameters, step)
    assert sorted(best) not in (sorted(chosen(parameters)), sorted(chosen(step)), sorted(chosen(theta, step)))
    total = aggregate(robust(rule, {"theta": ft.Mean(), "step": ft.Mean()}), theta=theta, step=step)
    for name, tensors in (("theta", theta), ("step", step)):
        torch.testing.assert_close(total[name], torch.stack([tensors[client] for client in best]).mean(0))
    several = {client: torch.stack([x, x + 1]) for client, x in theta.items()}  # as are rows of whole models
    total = aggregate(robust(rule, {"theta": ft.Mean(), "step": ft.Mean()}), theta=several, step=step)
    best = chosen(parameters, parameters, step)
    torch.testing.assert_close(total["theta"], torch.stack([several[client] for client in best]).mean(0))


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_numbers_of_any_kind(rule: str) -> None:
    uploads = {name: ft.Mean() for name in ("loss", "count", "none")}
    count = {client: torch.tensor([client, 2]) for client in CLIENTS}
    none = {client: torch.empty(0) for client in CLIENTS}
    loss = {client: torch.tensor(float(client)) for client in CLIENTS}
    total = aggregate(robust(rule, uploads), loss=loss, count=count, none=none)
    assert (total["loss"].shape, total["count"].dtype, total["none"].shape) == ((), torch.float64, (0,))
    assert 1 <= total["loss"] <= 5
    assert total["count"][1] == pytest.approx(2.0)
    assert total["count"][0] == pytest.approx(total["loss"].item(), abs=1e-5)


@pytest.mark.parametrize("upload", [torch.ones(3), torch.ones(2, 1), torch.tensor(1.0), torch.ones(2).double()])
def test_an_upload_of_another_shape_or_type_is_left_out_as_a_whole(upload: Tensor) -> None:
    running = RobustAggregator(
        {"first": ft.Mean(), "theta": ft.Mean()}, [0, 1, 2], N_SAMPLES, LAYOUT, rule=Rule("median")
    )
    assert running.put(0, {"first": torch.ones(1), "theta": torch.ones(2)}) == {}
    refused = running.put(1, {"first": 100 * torch.ones(1), "theta": upload})
    assert refused[1].startswith("its upload 'theta' ")
    running.put(2, {"first": 4 * torch.ones(1), "theta": 4 * torch.ones(2)})
    total = running.total()
    assert total.clients == [0, 2]
    assert (total["first"].tolist(), total["theta"].tolist()) == ([2.5], [2.5, 2.5])


# --- by a bound on the norm ---


def norm_bound(bound: float, uploads: Uploads, messages: Mapping[int, Message], layout: Layout = PLAIN) -> Aggregator:
    method = find_method("fedavg")
    return NormBoundAggregator(uploads, CLIENTS, N_SAMPLES, layout, bound=bound, method=method, messages=messages)


@pytest.mark.parametrize("failed", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_are_scaled_to_the_bound_and_averaged_by_samples(dtype: torch.dtype, failed: tuple[int, ...]) -> None:
    theta, gradient = vectors(6, dtype=dtype), vectors(4, seed=1, dtype=dtype)
    messages = {c: {"theta": x} for c, x in vectors(6, seed=2, dtype=dtype).items()}
    uploads: Uploads = {"theta": ft.Mean(), "gradient": ft.Mean("equal")}
    total = aggregate(norm_bound(1.5, uploads, messages), failed=failed, theta=theta, gradient=gradient)
    mean, plain, samples, scaled = np.zeros(6), np.zeros(4), 0, 0
    replied = [client for client in CLIENTS if client not in failed]
    for client in replied:
        sent = messages[client]["theta"].double().numpy()
        change, own = theta[client].double().numpy() - sent, gradient[client].double().numpy()
        scaled += int((change**2).sum() > 1.5**2) + int((own**2).sum() > 1.5**2)
        mean += int(N_SAMPLES[client]) * (sent + change * min(1.0, 1.5 / np.sqrt((change**2).sum())))
        plain += own * min(1.0, 1.5 / np.sqrt((own**2).sum())) / len(replied)
        samples += int(N_SAMPLES[client])
    assert 2 < scaled < 2 * len(replied)  # both kinds are there
    rounding = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(total["theta"].double().numpy(), mean / samples, rtol=0, atol=rounding)
    np.testing.assert_allclose(total["gradient"].double().numpy(), plain, rtol=0, atol=rounding)


def test_single_uploads_are_bounded_too_but_no_choices_numbers_weights_or_records() -> None:
    uploads: Uploads = {
        "theta": ft.Each(),
        "number": ft.Each(),
        "choice": ft.Each(),
        "noted": ft.Each(record=True),
        "body": ft.Mean("weight"),
        "weight": ft.Mean("equal"),  # which is a weight all the same
    }
    found: dict[str, Any] = {"theta": vectors(6), "noted": vectors(4), "body": vectors(3)}
    found |= {"number": vectors(), "choice": {c: torch.tensor([c, 9]) for c in CLIENTS}}
    found |= {"weight": {client: torch.tensor(50.0 * client + 1) for client in CLIENTS}}
    sent = vectors(6, seed=9)
    total = aggregate(norm_bound(0.25, uploads, {c: {"theta": sent[c]} for c in CLIENTS}), **found)
    for name in ("number", "choice", "noted"):
        assert all(torch.equal(total.each(name)[client], found[name][client]) for client in CLIENTS)
    for client, x in total.each("theta").items():
        assert (x - sent[client]).norm().item() == pytest.approx(0.25, rel=1e-5)
    weights = torch.tensor([50.0 * client + 1 for client in CLIENTS])
    bodies = torch.stack([0.25 * x / x.norm() for x in found["body"].values()])
    torch.testing.assert_close(total["body"], weights @ bodies / weights.sum())
    assert total.weight("body") == weights.sum()


def test_whole_numbers_are_bounded_as_numbers() -> None:
    counts = {client: torch.tensor([3, 4]) for client in CLIENTS}
    total = aggregate(norm_bound(1.0, {"count": ft.Mean()}, {client: {} for client in CLIENTS}), count=counts)
    assert total["count"].tolist() == pytest.approx([0.6, 0.8], rel=1e-12)


def test_buffers_of_whole_models_are_neither_counted_nor_scaled() -> None:
    sent, x = torch.arange(6.0), torch.tensor([3.0, 1.0, 500.0, -70.0, 4.0, 9.0])  # a change of 3 and 4, and buffers
    found = bounded(x, sent, 1.0, LAYOUT)
    torch.testing.assert_close(found, torch.tensor([0.6, 1.0, 500.0, -70.0, 4.0, 5.8]))
    assert bounded(x, sent, 5.0, LAYOUT) is x
    several = bounded(torch.stack([x, sent]), torch.stack([sent, sent]), 1.0, LAYOUT)
    torch.testing.assert_close(several, torch.stack([found, sent]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", ["large", "largest"])
def test_no_finite_numbers_escape_the_bound(dtype: torch.dtype, size: str) -> None:
    most = torch.finfo(dtype).max * (1e-30 if size == "large" else 1.0)
    x, sent = torch.full((6,), most, dtype=dtype), torch.tensor([1.0, -most, 0.0, 2.0, 3.0, -5.0], dtype=dtype)
    before = sent.clone()
    for start in (None, sent):
        assert torch.equal(bounded(x, start, 2.0, LAYOUT)[2:4], x[2:4])  # buffers
        assert torch.equal(sent, before)
    assert bounded(x, None, 2.0, PLAIN).norm() <= 2.0 * (1 + 1e-6)
    found = bounded(x, sent, 2.0, PLAIN)
    assert found.isfinite().all()
    assert (found - sent)[[0, 2, 3, 4, 5]].norm() <= 2.0 * (1 + 1e-6)


def test_a_bound_that_nobody_reaches_has_the_bits_of_the_mean() -> None:
    for method in ("fedavg", "ditto", "pgfed", "pfedmb"):
        with_bound = ft.run(method, engine="in-process", aggregation="norm-bound:1e6", **SMALL)
        assert_same(final(with_bound), final(ft.run(method, engine="in-process", **SMALL)))


def test_the_model_moves_no_farther_than_the_bound() -> None:
    for bound in (0.3, 0.01):
        result = ft.run("fedavg", engine="in-process", aggregation=f"norm-bound:{bound}", **{**SMALL, "rounds": 1})
        moved = (result.server_state["theta"] - result.simulation.server.initial).norm()
        assert 0 < moved <= bound * (1 + 1e-5)


@pytest.mark.parametrize("method", all_methods())
def test_every_method_runs_with_a_bound(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FedBN without normalisation layers
        result = ft.run(method, engine="in-process", aggregation="norm-bound:1.0", **SMALL)
    assert all(record.failed == [] for record in result.rounds)
    assert all(tensor.isfinite().all() for tensor in final(result).values())


# What a client uploads that is no change of what it was sent: gradients, changes, single numbers, records, and a model.
CHANGES_OF_NOTHING = {
    "scaffold": {"change"},
    "fednova": {"d", "a"},
    "pflego": {"gradient"},
    "pgfed": {"gradient", "g1"},
    "pgfedmo": {"gradient", "g1"},
    "pgfed-ce": {"loss", "path"},
    "pfedmb": {"alpha"},
    "apfl": {"alpha"},
    "ifca": {"cluster"},
    "fedfomo": {"theta", "weights"},
    "fedpac": {"h", "v"},
    "fedcac": {"mask"},
    "feddbe": {"mean"},
    "cfl": {"leaf"},
}


@pytest.mark.parametrize("method", all_methods())
def test_methods_say_what_an_upload_is_a_change_of(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    none: set[str] = set()
    found: set[str] = set()
    add = Aggregator._add

    def noted(total: Aggregator, client: int, upload: Message) -> None:
        for name in total.uploads:
            sent = chosen.sent(messages[client], name, upload[name])
            assert sent is None or sent.shape == upload[name].shape
            (none if sent is None else found).add(name)
        add(total, client, upload)

    messages: dict[int, Message] = {}
    chosen = find_method(method)
    send_all = type(chosen).send_all

    def kept(self: ft.Method, server: ft.Server) -> Mapping[int, Message]:
        messages.update(send_all(self, server))
        return messages

    monkeypatch.setattr(Aggregator, "_add", noted)
    monkeypatch.setattr(type(chosen), "send_all", kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ft.run(chosen, engine="in-process", **SMALL)
    assert none - found == CHANGES_OF_NOTHING.get(method, set())


def test_ifcas_upload_is_a_change_of_the_nearest_cluster() -> None:
    models = torch.tensor([[0.0, 0.0], [5.0, 5.0]])
    sent = find_method("ifca").sent({"theta": models}, "theta", torch.tensor([4.0, 9.0]))
    assert sent is not None
    assert sent.tolist() == [5.0, 5.0]

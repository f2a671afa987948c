"""The sites of one place: what they answer, what they refuse, and which of their states count."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.client.answers import Answering
from fedtailor.client.sites import Sites, measure_together
from fedtailor.engines.channel import InMemory
from fedtailor.engines.preparation import Prepared
from fedtailor.engines.remote import Remote
from fedtailor.engines.simulation import Simulation
from fedtailor.messages import NEVER, Adapt, Declaration, Evaluate, EvaluateShared, Personal, Reply, Request, Train
from fedtailor.messages.letters import as_letter
from fedtailor.messages.store import Store
from fedtailor.method import Server
from tests.client.parts import make_sites, prepared
from tests.helpers import assert_same, defined

PLACES = pytest.mark.parametrize("on_disk", [False, True])


def message(sites: Sites, *names: str) -> dict[str, Tensor]:
    """The first broadcast, with these names beside it."""
    return {"theta": sites.terms.initial.clone(), **{name: torch.ones(()) for name in names}}


# --- versions ---


@PLACES
def test_a_request_whose_version_is_not_here_is_refused(on_disk: bool, tmp_path: Path) -> None:
    sites = make_sites(tmp_path, on_disk)
    with pytest.raises(ft.FedtailorError, match=r"^The state of round 3 is not here: client 1 has lost it, or is anot"):
        sites.handle(Train(4, 1, message(sites), version=3))
    assert sites.store.get(1) == {}
    sites.handle(Train(1, 1, message(sites)))
    sites.accept([1])
    for request in (
        Train(3, 1, message(sites), version=2),
        Evaluate(3, 1, message(sites), version=2),
        Personal(3, 1, message(sites), version=2),
    ):
        with pytest.raises(ft.FedtailorError, match="The state of round 2 is not here"):
            sites.handle(request)
    with pytest.raises(ft.FedtailorError, match="client 1 has a state of round 1 that the server does not know of"):
        sites.handle(Train(2, 1, message(sites), version=NEVER))
    assert sites.store.current == {1: 1}
    assert sites.store.get(1)["rounds"] == 1


@PLACES
def test_a_site_that_ran_ahead_steps_back(on_disk: bool, tmp_path: Path) -> None:
    """It trained in a round that never counted: in the next one it is as if it had not."""
    sites, other = make_sites(tmp_path / "one", on_disk), make_sites(tmp_path / "other", on_disk)
    for each in (sites, other):
        each.handle(Train(1, 2, message(each)))
        each.accept([2])
    ahead = sites.handle(Train(2, 2, message(sites), version=1))
    assert ahead.version == 2
    assert sites.store.get(2)["rounds"] == 1  # it is a proposal as yet
    again, expected = (each.handle(Train(2, 2, message(each), version=1)) for each in (sites, other))
    assert_same(again.upload, expected.upload)
    for each in (sites, other):
        each.accept([2])
        assert each.store.get(2)["rounds"] == 2
    assert_same(sites.store.get(2), other.store.get(2))


@PLACES
def test_an_evaluation_leaves_what_may_still_count(on_disk: bool, tmp_path: Path) -> None:
    """In asynchronous rounds a client is measured as it was accepted, while its next state waits; a training steps
    back."""
    sites, alone = make_sites(tmp_path / "one", on_disk), make_sites(tmp_path / "other", on_disk)
    sites.handle(Train(1, 2, message(sites)))
    measured = sites.handle(Evaluate(1, 2, message(sites), version=NEVER)).measured
    assert measured == alone.handle(Evaluate(1, 2, message(alone), version=NEVER)).measured
    assert sites.store.get(2) == {}
    sites.accept([2])
    assert sites.store.get(2)["rounds"] == 1
    sites.handle(Train(2, 2, message(sites), version=1))
    sites.handle(Train(3, 2, message(sites), version=1))
    assert sites.store.get(2)["rounds"] == 1


@PLACES
def test_a_site_that_never_heard_that_its_round_counted_learns_it_from_the_next_request(
    on_disk: bool, tmp_path: Path
) -> None:
    sites = make_sites(tmp_path, on_disk)
    first = sites.handle(Train(1, 2, message(sites)))
    sites.handle(Train(2, 2, message(sites), version=first.version))
    assert sites.store.current == {2: 1}
    sites.accept([2])
    assert sites.store.get(2)["rounds"] == 2


@PLACES
@pytest.mark.parametrize("how", ["fail", "nan"])
def test_a_failed_clients_state_stays(how: str, on_disk: bool, tmp_path: Path) -> None:
    sites = make_sites(tmp_path, on_disk)
    sites.handle(Train(1, 2, message(sites)))
    sites.accept([2])
    before = sites.store.get(2)
    before = {name: tensor.clone() for name, tensor in before.items()}
    reply = sites.handle(Train(2, 2, message(sites, how), version=1))
    assert reply.error
    assert (reply.upload, reply.version, reply.measured) == ({}, NEVER, [])
    sites.accept([2])
    assert sites.store.current == {2: 1}
    assert_same(sites.store.get(2), before)
    assert sites.store.get(2)["rounds"] == 1


@PLACES
def test_a_state_that_was_cleared_is_empty_from_then_on(on_disk: bool, tmp_path: Path) -> None:
    sites = make_sites(tmp_path, on_disk)
    sites.handle(Train(1, 2, message(sites)))
    sites.accept([2])
    reply = sites.handle(Train(2, 2, message(sites, "forget"), version=1))
    sites.accept([2])
    assert reply.version == 2
    assert sites.store.get(2) == {}
    reply = sites.handle(Train(3, 2, message(sites), version=2))
    sites.accept([2])
    assert sites.store.get(2)["rounds"] == 1


# --- nothing but a round that counts changes anything ---


@PLACES
def test_looking_at_a_client_does_not_change_it(on_disk: bool, tmp_path: Path) -> None:
    """`Counting` writes into its state whenever it predicts."""
    sites = make_sites(tmp_path, on_disk)
    sites.handle(Train(1, 2, message(sites)))
    sites.accept([2])
    for request in (
        Evaluate(1, 2, message(sites), 1),
        Personal(1, 2, message(sites), 1),
        EvaluateShared(1, 2, message(sites)),
    ):
        assert sites.handle(request).error == ""
        assert sites.store.current == {2: 1}
        assert sites.store.get(2)["rounds"] == 1
    assert torch.equal(sites.personal_model(2, 1, message(sites)), sites.terms.initial)
    assert sites.store.get(2)["rounds"] == 1


def test_work_has_no_effect_on_the_store() -> None:
    sites = make_sites()
    _, state = sites.work(Train(1, 2, message(sites)), {})
    assert state["rounds"] == 1
    assert sites.store.get(2) == {}
    sites.accept([2])
    assert sites.store.get(2) == {}


def test_a_client_gets_copies_and_hands_out_copies() -> None:
    """`Counting` overwrites the message and its state in place."""
    sites = make_sites()
    sent = message(sites)
    for client in (0, 1):
        upload = sites.handle(Train(1, client, sent)).upload["theta"]
        assert upload.abs().sum() > 0
        assert torch.equal(sent["theta"], sites.terms.initial)
    sites.accept([0, 1])
    held = sites.store.get(0)["rounds"]
    sites.handle(Train(2, 0, sent, 1))
    assert held == 1


def test_what_a_client_computes_does_not_depend_on_who_came_before() -> None:
    sites, other = make_sites(), make_sites()
    for client in (3, 1, 4):
        other.handle(Train(1, client, message(other)))
    assert_same(sites.handle(Train(1, 0, message(sites))).upload, other.handle(Train(1, 0, message(other))).upload)


# --- failures ---


def test_a_failure_is_one_sentence_with_the_place_and_the_exception() -> None:
    sites = make_sites()
    reply = sites.handle(Train(2, 3, message(sites, "fail")))
    assert reply.error.startswith("OSError: no disk left (parts.py, line ")
    assert isinstance(reply.cause, OSError)
    assert reply.clients == (3,)
    with pytest.raises(ft.FedtailorError, match=r"^Counting, client 3: ValueError: no model here \(pa") as caught:
        sites.personal_model(3, 1, message(sites, "fail"))
    assert isinstance(caught.value.__cause__, ValueError)


def test_our_own_sentences_stay_as_they_are() -> None:
    class Refusing(ft.Method):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            raise ft.FedtailorError("This client has no cellar.")

    sites = make_sites(method=Refusing())
    assert sites.handle(Train(1, 0, message(sites))).error == "This client has no cellar"


def test_debug_lets_the_first_exception_pass_and_says_where() -> None:
    sites = make_sites(debug=True)
    with pytest.raises(OSError, match="no disk left") as caught:
        sites.handle(Train(7, 3, message(sites, "fail")))
    assert caught.value.__notes__ == ["In Counting, round 7, client 3."]


def test_a_request_of_an_unknown_kind_is_an_error() -> None:
    sites = make_sites()
    assert "a site does not answer Request" in sites.handle(Request(1, 0, {})).error


# --- what is measured ---


def test_clients_that_share_a_model_are_measured_as_each_alone() -> None:
    sites = make_sites(evaluation={"train": True})
    theta = sites.terms.initial
    reply = sites.handle(EvaluateShared(1, 1, {"theta": theta}, others=(2, 4)))
    assert reply.clients == (1, 2, 4)
    for client, measured in zip(reply.clients, reply.measured, strict=True):
        alone = sites.site(client).measure(sites.site(client).network_at(theta))
        assert set(measured) == {"validation", "test", "train"}
        for split in measured:
            assert defined(measured[split]) == pytest.approx(defined(alone[split]), rel=1e-5)
            assert measured[split].n_samples == len(getattr(sites.data.client(client), split)[1])
    several = [sites.site(client) for client in (1, 2)]
    assert measure_together(several, theta) == [measure_together([site], theta)[0] for site in several]


def test_measuring_after_training_is_of_the_clients_own_upload() -> None:
    sites = make_sites(method=Plain())
    reply = sites.handle(Train(1, 1, message(sites), measure=True))
    assert reply.measured == [sites.site(1).measure(sites.site(1).network_at(reply.upload["theta"]))]
    assert sites.handle(Train(1, 1, message(sites))).measured == []


class Plain(ft.Method):
    """FedAvg."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}


def test_adapting_tells_the_path_of_the_model_and_of_one_from_scratch() -> None:
    sites = make_sites(method=Plain(), evaluation={"fine_tune": 2}, new_clients=1)
    start = sites.terms.initial + 0.1
    reply = sites.handle(Adapt(1, 4, {"theta": start}))
    site = sites.site(4)
    assert len(reply.measured) == 2 * 3
    for begin, place in ((start, 0), (sites.terms.initial, 3)):
        assert reply.measured[place] == site.measure(site.network_at(begin))
        for epochs in (1, 2):
            tuned = site.client(0, {}).descend(begin, epochs=epochs, steps=None, purpose="fine-tuning")
            assert reply.measured[place + epochs] == site.measure(site.network_at(tuned))
    assert torch.equal(reply.upload["theta"], site.fine_tuned(start))


def test_the_size_of_a_request_is_the_number_of_its_samples() -> None:
    sites = make_sites()
    data = sites.data
    for client in range(5):
        assert sites.size(Train(1, client, {})) == len(data.train(client)[1])
        held_out = len(data.validation(client)[1]) + len(data.test(client)[1])
        assert sites.size(Evaluate(1, client, {})) == held_out
    shared = EvaluateShared(1, 0, {}, others=(2, 3))
    assert sites.size(shared) == sum(len(data.client(client).held_out) for client in (0, 2, 3))


# --- joining ---


def test_a_site_declares_four_things_and_no_more() -> None:
    found = prepared(new_clients=2, clients=7)
    sites = Sites.at(found.data, found.terms, None)
    declared = sites.declare()
    assert len(declared) == 5  # who is held out does not join
    for number, declaration in enumerate(declared):
        assert asdict(declaration) == {
            "name": str(number),
            "n_samples": len(found.data.train(number)[1]),
            "n_classes": None,
            "fingerprint": found.terms.fingerprint,
        }


def test_a_site_with_labels_of_its_own_says_how_many() -> None:
    sites = make_sites(labels="own", partition="classes:2")
    assert [declaration.n_classes for declaration in sites.declare()] == list(sites.data.own_classes)
    assert all(isinstance(declaration.n_classes, int) for declaration in sites.declare())


def test_the_fingerprint_tells_networks_apart() -> None:
    same, again, seed, model = (
        prepared(**settings).terms.fingerprint for settings in ({}, {}, {"seed": 1}, {"model": "mlp:5"})
    )
    assert same == again
    assert len({same, seed, model}) == 3


def test_a_site_with_another_network_is_refused() -> None:
    found, other = prepared(), prepared(seed=1)
    declared = Sites.at(found.data, found.terms, None).declare()
    server = server_of(found, declared)
    assert server.n_samples.tolist() == [declaration.n_samples for declaration in declared]
    assert server.n_clients == 5
    foreign = Sites.at(other.data, other.terms, None).declare()[3]
    declared[3] = replace(foreign, name="St. Mary")
    with pytest.raises(ft.FedtailorError, match=r"^The site St\. Mary has another network or experiment: it cannot"):
        server_of(found, declared)


def test_a_server_knows_of_its_sites_what_they_declared() -> None:
    found = prepared()
    declared = [Declaration(f"h{n}", 10 * n, None, found.terms.fingerprint) for n in (3, 1)]
    server = server_of(found, declared)
    assert server.n_samples.tolist() == [30, 10]
    assert server.n_clients == 2


def server_of(found: Prepared, declared: list[Declaration]) -> Server:
    """The server of sites elsewhere that declared this when they joined."""
    return Simulation(found, transport=Remote(InMemory({}), "run", [site.name for site in declared], declared)).server


# --- requests for a model that all clients share: whole clients, whatever the number of workers ---


def groups(samples: list[int], fine_tune: int = 0) -> list[tuple[int, ...]]:
    """How one request for clients with so many held-out samples is cut."""
    data: Any = SimpleNamespace(places=np.array([[0, 0, 0, count] for count in samples]))
    terms: Any = SimpleNamespace(fine_tune=fine_tune)
    request = EvaluateShared(1, 0, {}, others=tuple(range(1, len(samples))))
    return [piece.clients for piece in Sites(data, terms, Store(None, "client")).split([request])]


@pytest.mark.parametrize(
    ("samples", "most"),
    [
        ([30] * 20, 64),  # few samples: small requests, but not tiny ones
        ([100] * 160, 1000),  # a sixteenth of them
        ([100] * 1000, 1024),  # many: no request is too large
        ([0, 5, 3000, 0, 7], 187),  # a client is never divided
    ],
)
def test_requests_are_of_like_size(samples: list[int], most: int) -> None:
    found = groups(samples)
    assert [client for group in found for client in group] == list(range(len(samples)))
    sizes = [sum(samples[client] for client in group) for group in found]
    assert all(size <= most or len(group) == 1 for size, group in zip(sizes, found, strict=True))
    following = zip(sizes, found[1:], strict=False)
    assert all(size + samples[group[0]] > most for size, group in following)  # none is smaller than it need be


def test_clients_that_fine_tune_come_one_by_one() -> None:
    assert groups([1, 2, 3], fine_tune=1) == [(0,), (1,), (2,)]


def test_requests_for_one_client_are_not_cut() -> None:
    sites = make_sites()
    requests: list[Request] = [Train(1, 0, {}), Evaluate(1, 3, {}), Personal(1, 2, {})]
    assert list(sites.split(requests)) == requests


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 90000040 bytes."), "memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory"),
        (OSError(12, "Cannot allocate memory"), "memory"),
        (RuntimeError("another fault"), "work"),
        (OSError(2, "No such file or directory"), "work"),
    ],
)
def test_too_little_memory_is_told_as_that(error: Exception, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = make_sites()
    monkeypatch.setattr(sites, "handle", lambda request: Reply((1,), error="it failed", cause=error))
    answering = Answering("trial", "south", 1, sites)
    letter = as_letter(Train(1, 1, message(sites)), "trial", NEVER)
    assert answering.work(letter).header["fault"] == kind

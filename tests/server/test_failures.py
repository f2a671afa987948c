"""Clients that fail: counted, named once, shown in every table, and told apart by why they failed."""

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.messages import Reply, Request, Train
from fedtailor.messages.transport import Relay
from fedtailor.method import Uploads
from fedtailor.methods.pgfed import PGFed
from fedtailor.reporting.tables import FORMATS, write_tables
from fedtailor.studies.summary import summarize
from fedtailor.training.descent import batches, step_count
from fedtailor.training.optimizer import OptimizerSettings
from tests.helpers import digits, make_simulation


class Normed(nn.Module):
    """A network with BatchNorm1d, which cannot train on one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


def run(method: str | ft.Method, **settings: Any) -> tuple[ft.RunResult, list[str]]:
    """A run, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ft.run(method, engine="in-process", **settings)
    return result, [str(warning.message) for warning in caught]


# --- a batch of one sample ---


def test_batch_norm_never_sees_a_batch_of_one_sample() -> None:
    """21 training samples in batches of 10 leave one over; a client with one sample has nothing but such a batch."""
    data = digits([30, 30, 1])  # a fifth is for testing, a tenth for validation: 21, 21 and 1
    seen: list[int] = []

    class Spied(Normed):
        def forward(self, x: Tensor) -> Tensor:
            if self.layers[1].training:
                seen.append(len(x))
            return super().forward(x)

    for method in ("local", "fedavg", "apfl", "fedrod", "fedrecon", "per-fedavg", "pfedmb"):
        result, said = run(method, data=data, model=Spied, rounds=2, batch=10)
        assert said == []
        assert result.failures == {}
    assert seen
    assert 1 not in seen


def test_the_last_sample_joins_the_batch_before() -> None:
    stream, device = torch.Generator().manual_seed(0), torch.device("cpu")
    joined = OptimizerSettings(batch=10, epochs=2, join_last=True)
    found = [chosen for chosen in batches(21, joined, stream, device) if chosen is not None]
    assert [len(chosen) for chosen in found] == [10, 11] * 2
    assert len(found) == step_count(21, joined)
    for epoch in (found[:2], found[2:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(21))
    for samples, sizes in ((20, [10, 10]), (22, [10, 10, 2]), (11, [11]), (10, [10]), (1, [1])):
        every = OptimizerSettings(batch=10, join_last=True)
        lengths = [samples if chosen is None else len(chosen) for chosen in batches(samples, every, stream, device)]
        assert lengths == sizes
        assert step_count(samples, every) == len(sizes)


def test_batches_of_one_sample_and_batch_norm_are_refused() -> None:
    with pytest.raises(ft.FedtailorError, match=r"^BatchNorm needs other samples in a batch: set --batch to 2 or more"):
        ft.run("fedavg", data=digits([30, 30]), model=Normed, batch=1)


# --- failures are counted and shown ---


class Failing(ft.Method):
    """FedAvg in which some clients fail in every round, and one in the first."""

    always: tuple[int, ...] = (1, 3)
    first: int = 4

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        if client.id in self.always or (client.id == self.first and client.round == 1):
            raise MemoryError("no room")
        return {"theta": client.descend(message["theta"])}


SETTINGS: dict[str, Any] = {"data": "digits", "clients": 6, "max_train": 20, "model": "mlp:8", "rounds": 4}


def test_a_fault_is_told_once_and_counted_at_the_end() -> None:
    result, said = run(Failing(), **SETTINGS)
    first = "Failing, round 1: clients 1, 3, 4 left out: MemoryError: no room"
    last = "Failing: 2 of 6 clients failed in every round that they took part in, 1 of 6 clients failed in some rounds."
    assert len(said) == 2
    assert said[0].startswith(first)
    assert said[1] == last
    assert result.failures == {1: (4, 4), 3: (4, 4), 4: (1, 4)}
    assert [text.startswith(first) for text in result.warnings] == [True]


def test_failures_are_in_every_form_of_the_table(tmp_path: Path) -> None:
    failing, _ = run(Failing(), **SETTINGS, out=tmp_path / "failing")
    summary = summarize([ft.run("local", **SETTINGS), failing])
    words = "2 of 6 clients failed in every round that they took part in, 1 of 6 clients failed in some rounds"
    assert words in summary.caption
    assert [(line.failed, line.failed_always) for line in summary.lines] == [(0, 0), (3, 2)]
    write_tables(summary, tmp_path)
    for ending in FORMATS:
        text = (tmp_path / f"table.{ending}").read_text()
        assert "failed" in text
        assert ending == "csv" or "3 of 6" in text
        assert ending == "csv" or words in " ".join(text.split())
    recorded = json.loads((tmp_path / "result.json").read_text())
    assert recorded["lines"][1]["failed_always"] == 2
    own = json.loads((tmp_path / "failing" / "result.json").read_text())
    assert own["failed"] == {"1": {"failed": 4, "called": 4}, "3": {"failed": 4, "called": 4},
                             "4": {"failed": 1, "called": 4}}  # fmt: skip
    assert len(own["warnings"]) == 1
    assert ft.load(tmp_path / "failing").failures == failing.failures


def test_the_page_shows_failures(tmp_path: Path) -> None:
    failing, _ = run(Failing(), **SETTINGS)
    page = ft.report([failing, ft.run("local", **SETTINGS)], to=tmp_path / "page.html").read_text()
    assert "2 of 6 clients failed in every round that they took part in" in page
    assert "clients that failed" in page


def test_a_table_without_failures_has_no_column_for_them() -> None:
    summary = summarize([ft.run("local", **SETTINGS)])
    assert "failed" not in FORMATS["txt"](summary)


# --- rounds to a target, over the clients that have been called ---


def test_rounds_to_a_target_count_only_clients_that_have_been_called() -> None:
    """FedRep fits a head for clients that were never called, FedPer gives them an untrained one. Neither counts."""
    settings = {**SETTINGS, "participation": 2, "rounds": 5, "partition": "classes:2", "clients": 8}
    for method in ("fedrep", "fedper"):
        result = ft.run(method, **settings)
        called: set[int] = set()
        means = []
        for record, clients in zip(result.rounds, result.clients, strict=True):
            called |= set(record.participants)
            means.append(np.mean([clients.results[c]["test"].accuracy for c in called]))
        summary = summarize([result], target=float(np.max(means)) - 1e-9)
        assert summary.lines[0].rounds_to_target == 1 + int(np.argmax(means))
        assert summary.lines[0].bytes_to_target == sum(r.bytes for r in result.rounds[: 1 + int(np.argmax(means))])
        assert "until the mean accuracy of the clients called so far is" in summary.caption
    assert any(record.accuracy != mean for record, mean in zip(result.rounds, means, strict=True))


def test_clients_that_were_never_called_are_named_in_the_caption() -> None:
    result = ft.run("fedavg", **{**SETTINGS, "participation": 1, "rounds": 2})
    absent = 6 - len({client for record in result.rounds for client in record.participants})
    assert f"Up to {absent} of 6 clients were never called" in summarize([result]).caption
    assert "never called" not in summarize([ft.run("fedavg", **SETTINGS)]).caption
    called = ft.run("fedavg", **{**SETTINGS, "participation": 1}, evaluation={"clients": "participants"})
    assert "never called" not in summarize([called]).caption  # they do not count


# --- replies that are not what was asked for ---


class Strange(ft.Method):
    """FedAvg whose client 2 uploads something else."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples")}
    what: str = "nan"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        if client.id != 2:
            return {"theta": theta}
        other: dict[str, Any] = {
            "missing": {},
            "extra": {"theta": theta, "secret": client.train_data[0]},
            "shape": {"theta": theta[:-1]},
            "dtype": {"theta": theta.double()},
            "no tensor": {"theta": theta.tolist()},
        }
        return other[self.what]  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["missing", "extra", "shape", "dtype", "no tensor"])
def test_a_client_with_a_strange_reply_is_left_out_and_named(what: str) -> None:
    result, said = run(Strange(what=what), **SETTINGS)
    assert [record.failed for record in result.rounds] == [[2]] * 4
    assert said[0].startswith("Strange, round 1: client 2 left out: ")
    assert "its upload" in said[0]
    with_all_but_one = ft.run("fedavg", **SETTINGS, engine="in-process")
    assert not torch.equal(result.server_state["theta"], with_all_but_one.server_state["theta"])


class Absurd(PGFed):
    """PGFed whose client 2 uploads absurdly large but finite numbers in one round."""

    times: float = 0.0
    size: float = 0.0

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        upload = dict(super().train(client, message))
        if client.id == 2 and client.round == 2:
            for name in ("theta", "gradient"):
                theta = upload[name]
                upload[name] = torch.full_like(theta, self.size) if self.size else self.times * theta
        return upload


@pytest.mark.parametrize("absurd", [Absurd(times=1e20), Absurd(size=3e38)])
def test_clients_that_fail_because_of_what_they_were_sent_are_told_apart(absurd: Absurd) -> None:
    said = r"because of what it was sent \(.*client 2's .* was .* times as large as others' in round 2"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ft.FedtailorError, match=said):
            ft.run(absurd, **{**SETTINGS, "rounds": 9}, engine="in-process", aggregation="mean:inf")
    assert any(re.search(said, str(warning.message)) for warning in caught)


def test_clients_that_fail_by_themselves_are_not_blamed_on_the_server() -> None:
    result, said = run(Failing(), **SETTINGS)
    assert not any("because of what" in text for text in said)
    assert all(record.misled == [] for record in result.rounds)


# --- what a method has to say ---


def test_fedbn_without_normalisation_layers_says_that_it_is_fedavg(tmp_path: Path) -> None:
    result, said = run("fedbn", **SETTINGS, out=tmp_path / "run")
    assert said == ["The network has no normalisation layers: FedBN is FedAvg here."]
    assert ft.load(tmp_path / "run").warnings == said == result.warnings
    assert run("fedbn", **{**SETTINGS, "model": "resnet", "rounds": 1})[1] == []


def test_max_train_thins_validation_samples_in_proportion() -> None:
    data = ft.load_data("digits")
    whole = ft.federate(data, clients=5, partition="iid", validation=0.2)
    few = ft.federate(data, clients=5, partition="iid", validation=0.2, max_train=40)
    for client in range(5):
        n_train, n_validation = len(whole.train(client)[1]), len(whole.validation(client)[1])
        assert len(few.train(client)[1]) == 40
        assert len(few.validation(client)[1]) == round(n_validation * 40 / n_train)
        assert len(few.test(client)[1]) == len(whole.test(client)[1])
    plenty = ft.federate(data, clients=5, partition="iid", validation=0.2, max_train=10**6)
    assert plenty.fingerprint() == whole.fingerprint()
    assert len(ft.federate(data, clients=5, partition="iid", max_train=1).validation(0)[1]) == 1


class Talking(ft.Method):
    """FedAvg that says something in every round."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        super().receive(server, total)
        server.warn("the weather", f"It rains in round {server.round}.")


def test_a_resumed_run_says_nothing_twice(tmp_path: Path) -> None:
    _, said = run(Talking(), **{**SETTINGS, "rounds": 2}, out=tmp_path / "run")
    assert said == ["It rains in round 1."]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ft.resume(tmp_path / "run", rounds=4, engine="in-process", method=Talking())
    assert [record.warnings for record in result.rounds] == [{"the weather": "It rains in round 1."}, {}, {}, {}]


class Confused(Relay):
    """A transport that delivers replies twice, from nobody, and one not at all."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        for reply in super().ask(requests):
            if isinstance(requests[0], Train) and reply.clients == (0,):
                continue  # lost
            false = {name: torch.full_like(tensor, 1e3) for name, tensor in reply.upload.items()}
            yield reply
            if isinstance(requests[0], Train):
                yield Reply(reply.clients, false)
                yield Reply((99,), false)


def test_a_reply_counts_once_and_only_if_it_was_asked_for() -> None:
    simulation, expected = make_simulation("fedavg", **SETTINGS), make_simulation("fedavg", **SETTINGS)
    with pytest.warns(ft.ClientFailure, match="round 1: client 0 left out: it did not answer"):
        record = simulation.loop.round(1, Confused(simulation.sites))
    assert record.failed == [0]
    with pytest.warns(ft.ClientFailure, match="it did not answer"):
        expected.loop.round(1, Deaf(expected.sites))
    assert torch.equal(simulation.server.state["theta"], expected.server.state["theta"])


class Deaf(Relay):
    """A transport without client 0."""

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        yield from super().ask([r for r in requests if r.client != 0 or not isinstance(r, Train)])

"""Runs with robust aggregation: engines, resumes, hostile clients, rounds with too few replies, what is refused."""

import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.method import Uploads
from fedtailor.methods import all_methods
from tests.helpers import assert_same, digits, final, numbers
from tests.server.robust import MATRIX_RULES, RULES, SMALL

# --- the same bits, and what they are worth ---


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "pflego", "scaffold"])
def test_the_same_bits_on_every_engine_and_after_a_resume(method: str, rule: str, tmp_path: Path) -> None:
    settings = {**SMALL, "aggregation": rule}
    reference = ft.run(method, engine="in-process", **settings)
    plain = ft.run(method, engine="in-process", **SMALL)
    assert numbers(reference.rounds) != numbers(plain.rounds) or any(
        not torch.equal(one, other) for one, other in zip(final(reference).values(), final(plain).values(), strict=True)
    )
    for engine in ("processes", "sites-in-memory"):
        other = ft.run(method, engine=engine, workers=2, **settings)
        assert numbers(other.rounds) == numbers(reference.rounds)
        assert_same(final(other), final(reference))
    ft.run(method, engine="in-process", out=tmp_path / "run", **{**settings, "rounds": 1})
    resumed = ft.resume(tmp_path / "run", rounds=2)
    assert numbers(resumed.rounds) == numbers(reference.rounds)
    assert_same(final(resumed), final(reference))


@pytest.mark.parametrize("rule", [*RULES[:-1], "norm-bound:1e9", "trimmed:0", "multi-krum:0,5"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_equal_clients_have_the_models_of_the_mean(method: str, rule: str) -> None:
    settings: dict[str, Any] = {"data": digits([20]) * 5, "model": "mlp:8", "rounds": 3, "batch": "full", "epochs": 2}
    settings |= {"engine": "in-process", "dtype": "float64", "test": 0.0, "validation": 0.0, "evaluate_every": 0}
    expected, found = ft.run(method, **settings), ft.run(method, aggregation=rule, **settings)
    for name, tensor in expected.server_state.items():
        torch.testing.assert_close(found.server_state[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_a_network_with_buffers(rule: str) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    result = ft.run("fedavg", data=digits([30] * 5), model=network(), rounds=2, aggregation=rule, engine="in-process")
    assert result.server_state["theta"].isfinite().all()
    assert (result.rounds[-1].accuracy or 0) > 0.1


class Hostile(ft.Method):
    """FedAvg of five clients, of which the last one uploads what it likes."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        theta = client.descend(message["theta"])
        return {"theta": theta if client.id < 4 else torch.full_like(theta, 1e9)}


@pytest.mark.parametrize("rule", ["mean:inf", "mean", *MATRIX_RULES, "norm-bound:1.0"])
def test_a_hostile_client_ruins_the_mean_without_its_guard_and_no_rule(rule: str) -> None:
    settings: dict[str, Any] = {"data": digits([100] * 5), "model": "mlp:16", "rounds": 10, "engine": "in-process"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mean leaves out the client
        result = ft.run(Hostile(), aggregation=rule, **settings)
    accuracy = result.rounds[-1].accuracy or 0.0
    assert accuracy < 0.3 if rule == "mean:inf" else accuracy > 0.6


# --- too few clients ---


class Absent(ft.Method):
    """SCAFFOLD's kind of bookkeeping: a counter at each client, and the server's sum of all of them. Clients 3 and 4
    fail in round 2."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean(), "change": ft.Mean("equal")}

    def start(self, server: ft.Server) -> None:
        server.state |= {"theta": server.initial, "sum": torch.zeros(())}

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        assert client.round != 2 or client.id < 3, "no luck"
        client.state["count"] = client.state.get("count", torch.zeros(())) + 1
        return {"theta": client.descend(message["theta"]), "change": torch.ones(())}

    def upload_like(self, server: ft.Server, client: int) -> ft.Message:
        return {"change": torch.zeros(())}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        server.state |= {"theta": total["theta"], "sum": server.state["sum"] + len(total.clients) * total["change"]}


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("engine", ["in-process", "processes", "sites-in-memory"])
def test_a_round_with_too_few_replies_changes_nothing_at_anybody(engine: str, tmp_path: Path) -> None:
    settings = {**SMALL, "aggregation": "krum:1", "engine": engine}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one, two, three = (ft.run(Absent(), **{**settings, "rounds": rounds}) for rounds in (1, 2, 3))
        ft.run(Absent(), out=tmp_path / "run", **{**settings, "rounds": 2})
        resumed = ft.resume(tmp_path / "run", method=Absent(), rounds=3)
    why = "Round 2 changes nothing, like others with as few replies: the rule krum:1 needs at least 5 clients in a "
    assert said(caught).count(f"{why}round, not 3.") == 3  # once a run, and not again after it was resumed
    assert two.rounds[1].warnings["aggregation"] == f"{why}round, not 3."
    assert "aggregation" not in three.rounds[2].warnings
    assert_same(final(two), final(one))
    assert (two.rounds[1].failed, two.rounds[1].bytes_up) == ([3, 4], two.rounds[0].bytes_up * 3 // 5)
    assert three.server_state["sum"] == 10  # of two rounds, as at the clients
    assert [three.simulation.state_of(client)["count"].item() for client in range(5)] == [2.0] * 5
    assert not torch.equal(three.server_state["theta"], two.server_state["theta"])
    for record, other in zip(numbers(resumed.rounds), numbers(three.rounds), strict=True):
        assert {**record, "warnings": {}} == {**other, "warnings": {}}  # a resumed run cannot say who is back
    assert_same(final(resumed), final(three))


def test_by_chance_too_few_may_take_part() -> None:
    settings = {**SMALL, "clients": 8, "rounds": 12, "participation": "independent:0.4", "engine": "in-process"}
    with pytest.warns(UserWarning, match="needs at least 3 clients in a round") as caught:
        result = ft.run("fedavg", aggregation="krum:0", **settings)
    few = [record.round for record in result.rounds if len(record.participants) < 3]
    assert 0 < len(few) < 12
    assert len([text for text in said(list(caught)) if "changes nothing" in text]) == 1
    for before, record in zip(result.rounds, result.rounds[1:], strict=False):
        assert (record.loss == before.loss) == (record.round in few)
    assert all(record.failed == [] for record in result.rounds)


def test_the_number_of_clients_that_a_rule_needs() -> None:
    needs = {"mean": 1, "median": 1, "geometric-median": 1, "norm-bound:1": 1, "krum:0": 3, "krum:2": 7}
    needs |= {"multi-krum:2,5": 7, "multi-krum:2,6": 8, "multi-krum:0,9": 9}
    needs |= {"trimmed:0": 1, "trimmed:0.1": 10, "trimmed:0.2": 5, "trimmed:0.3": 4, "trimmed:0.49": 3}
    assert {text: Rule.parse(text).needs for text in needs} == needs
    assert Rule.parse("trimmed:1e-320").needs == 10**9


# --- what is refused, before the first round ---

SINGLE = (
    "and no rule can be robust where single uploads count: take --aggregation mean or norm-bound, or a method whose "
    "uploads are means, like fedavg."
)
OWN_WEIGHTS = (
    "and no rule can be robust where they choose these: take --aggregation mean or norm-bound, or a method whose "
    "uploads are means by samples, like fedavg."
)
REFUSED = {
    "pgfed": f"PGFed needs every client's own alpha, gradient and g1, {SINGLE}",
    "pgfedmo": f"PGFedMo needs every client's own alpha, gradient and g1, {SINGLE}",
    "pgfed-ce": f"PGFedCE needs every client's own theta, alpha, loss and path, {SINGLE}",
    "fedacs": f"FedACS needs every client's own w, {SINGLE}",
    "fedamp": f"FedAMP needs every client's own w, {SINGLE}",
    "fedfomo": f"FedFomo needs every client's own theta, weights and clients, {SINGLE}",
    "pfedsim": f"PFedSim needs every client's own theta, {SINGLE}",
    "pfedgraph": f"PFedGraph needs every client's own theta, {SINGLE}",
    "fedcac": f"FedCAC needs every client's own theta and mask, {SINGLE}",
    "cfl": f"CFL needs every client's own theta and leaf, {SINGLE}",
    "ifca": f"IFCA's mean is by weights that clients upload themselves (member), {OWN_WEIGHTS}",
    "pfedmb": f"PFedMB's mean is by weights that clients upload themselves (weight), {OWN_WEIGHTS}",
    "fedrecon": f"FedRecon's mean is by weights that clients upload themselves (n_query), {OWN_WEIGHTS}",
    "fedpac": f"FedPAC needs every client's own head, h and v, {SINGLE}",
    "fedproto": f"FedProto's mean is by weights that clients upload themselves (counts), {OWN_WEIGHTS}",
    "fedas": f"FedAS's mean is by weights that clients upload themselves (fisher), {OWN_WEIGHTS}",
}


@pytest.mark.parametrize("method", all_methods())
def test_every_method_takes_a_rule_or_says_why_not(method: str) -> None:
    for rule in MATRIX_RULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if method not in REFUSED:
                result = ft.run(method, engine="in-process", aggregation=rule, **{**SMALL, "rounds": 1})
                assert result.rounds[0].failed == []
                continue
        with pytest.raises(ft.FedtailorError) as refused:
            ft.run(method, aggregation=rule, **SMALL)
        assert str(refused.value) == REFUSED[method]


def test_the_page_says_which_methods_take_a_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "robust.md").read_text("utf-8")
    section = page.partition("## Methods")[2].partition("##")[0].splitlines()
    rows = [line.split("|")[1:3] for line in section if line.startswith("| `")]
    told = {name: text.strip().split(":")[0] for names, text in rows for name in re.findall(r"`([^`]+)`", names)}
    taken = {name: "refused" if name in REFUSED else "yes" for name in all_methods()}
    assert told == {**taken, "local": "nothing is uploaded"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"aggregation": "krum:2"}, "The rule krum:2 needs at least 7 clients in a round, and no more than 5"),
        ({"aggregation": "krum:1", "participation": 4}, "krum:1 needs at least 5 .* no more than 4 take part"),
        ({"aggregation": "krum:1", "participation": "2-4"}, "krum:1 needs at least 5 .* no more than 4 take part"),
        ({"aggregation": "krum:2", "participation": "independent:0.9"}, "krum:2 needs .* no more than 5 take part"),
        ({"aggregation": "multi-krum:1,5"}, "multi-krum:1,5 needs at least 6 .* no more than 5 take part"),
        ({"aggregation": "trimmed:0.1"}, "trimmed:0.1 needs at least 10 clients .* no more than 5 take part"),
        ({"aggregation": "krum:1", "new_clients": 1}, "no more than 4 take part: raise --participation or"),
        ({"aggregation": "median", "privacy": "client, noise=1"}, "The noise of --privacy client is made for a mean"),
        ({"aggregation": "norm-bound:1", "privacy": "client, noise=1"}, "leave --aggregation norm-bound:1.0 out"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ft.FedtailorError, match=text) as refused:
        ft.run("fedavg", **{**SMALL, **settings})
    assert str(refused.value).endswith(".")


def test_what_may_be_enough_is_not_refused() -> None:
    for participation in ("3-5", "independent:0.9"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ft.run("fedavg", engine="in-process", participation=participation, aggregation="krum:1", **SMALL)


def test_where_nothing_is_uploaded_any_rule_will_do() -> None:
    settings = {**SMALL, "engine": "in-process", "clients": 3}
    result = ft.run("local", aggregation="krum:2", **settings)
    assert_same(final(result), final(ft.run("local", **settings)))

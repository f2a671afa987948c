"""Several metrics of the user's own beside the one that decides: by name, per client and averaged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.experiment import experiment_hash, make_experiment
from fedtailor.messages import Metrics, Reply, Train
from fedtailor.messages.letters import Letter, as_answer, as_letter, as_reply
from fedtailor.server.records import RoundRecord
from tests.helpers import numbers

SMALL: dict[str, Any] = {"clients": 4, "model": "mlp:8", "epochs": 1, "rounds": 2, "engine": "in-process", "seed": 1}


def missed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).sum()


def largest(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.max())


def of_some(outputs: Tensor, targets: Tensor) -> float | None:
    """Not defined for clients without a 0."""
    return 1.0 if (targets == 0).any() else None


missed.higher_is_better = False  # type: ignore[attr-defined]
OWN = {"missed": missed, "largest": largest}


def slow(result: ft.RunResult, client: int) -> dict[str, float]:
    """The same two metrics of a client's test samples, from its exported state dict."""
    x, y = result.data.test(client)
    network = result.simulation.prepared.assembled.network().module
    network.load_state_dict(result.personal(client))
    with torch.no_grad():
        scores = network.eval()(x)
    return {
        "missed": float(sum(s.argmax() != t for s, t in zip(scores, y, strict=True))),
        "largest": scores.max().item(),
    }


def test_each_client_has_them_and_each_round_their_means(tmp_path: Path) -> None:
    result = ft.run("ditto", metrics=OWN, out=tmp_path / "run", **SMALL)
    expected = [slow(result, client) for client in range(4)]
    for client in range(4):
        assert result.per_client[client].more == pytest.approx(expected[client])
    last = result.rounds[-1]
    for name in OWN:
        assert last.more[name] == pytest.approx(np.mean([own[name] for own in expected]))
        found = [result.clients[-1].results[client]["validation"].more[name] for client in range(4)]
        assert last.validation_more[name] == pytest.approx(np.mean(found))
    loaded = ft.load(tmp_path / "run")  # which imports nothing
    assert numbers(loaded.rounds) == numbers(result.rounds)
    assert loaded.per_client == result.per_client


def test_nothing_else_changes() -> None:
    plain = ft.run("ditto", **SMALL)
    more = ft.run("ditto", metrics=OWN, **SMALL)
    for one, other in zip(plain.rounds, more.rounds, strict=True):
        without = {name: value for name, value in other.plain().items() if name not in ("more", "validation_more")}
        assert {**without, "seconds": 0} == {**one.plain(), "seconds": 0}
    experiment = make_experiment({})
    assert experiment.evaluation.metrics is None
    assert experiment_hash(experiment, {}) != experiment_hash(make_experiment({"metrics": {"a": "b:c"}}), {})


@pytest.mark.parametrize("engine", ["processes", "sites-in-memory"])
def test_they_are_the_same_on_every_engine(engine: str) -> None:
    rounds = [ft.run("fedper", metrics=OWN, **{**SMALL, "engine": each}).rounds for each in ("in-process", engine)]
    assert [record.more for record in rounds[0]] == [record.more for record in rounds[1]]


def test_one_of_them_may_decide() -> None:
    result = ft.run("ditto", metrics=OWN, metric="missed", choose="best-test", **SMALL)
    values = [record.more["missed"] for record in result.rounds]
    assert (result.metric.name, result.metric.title, result.higher_is_better) == ("missed", "missed", False)
    assert result.value == min(values)
    assert result.summary()["last"]["missed"] == values[-1]
    by_function = ft.run("ditto", metric=missed, choose="best-test", **SMALL)
    assert (by_function.value, by_function.rounds[-1].std) == (result.value, result.rounds[-1].std)


def test_beside_another_of_ones_own_that_decides() -> None:
    result = ft.run("ditto", metrics={"largest": largest}, metric=missed, **SMALL)
    assert result.rounds[-1].own == result.value
    assert result.rounds[-1].more.keys() == {"largest"}


def test_one_that_is_not_defined_for_all_is_the_mean_of_the_others() -> None:
    result = ft.run("local", metrics={"some": of_some}, partition="classes:2", **SMALL)
    known = [client for client, metrics in result.per_client.items() if metrics.more]
    assert 0 < len(known) < 4
    assert result.rounds[-1].more == {"some": 1.0}


def test_an_infinite_one_is_named_and_counts_for_nothing(tmp_path: Path) -> None:
    def endless(outputs: Tensor, targets: Tensor) -> float:
        return float("inf")

    result = ft.run("local", metrics={"endless": endless, "missed": missed}, out=tmp_path / "run", **SMALL)
    record = ft.load(tmp_path / "run").clients[-1]
    assert record.not_finite[0]["test"] == ["endless"]
    assert record.results[0]["test"].more.keys() == {"missed"}
    assert result.rounds[-1].more.keys() == {"missed"}


def test_as_tables_of_pandas() -> None:
    pytest.importorskip("pandas")
    result = ft.run("ditto", metrics=OWN, **SMALL)
    rounds, clients = result.to_pandas(), result.to_pandas("clients")
    assert rounds["missed"].tolist() == [record.more["missed"] for record in result.rounds]
    assert rounds["validation_largest"].tolist() == [record.validation_more["largest"] for record in result.rounds]
    row = clients[(clients["round"] == 2) & (clients["client"] == "3") & (clients["split"] == "test")].iloc[0]
    assert row["missed"] == result.per_client[3].more["missed"]
    assert "more" not in {*rounds.columns, *clients.columns}


def test_a_mean_over_the_last_rounds() -> None:
    result = ft.run("ditto", metrics=OWN, choose="last-5", **SMALL)
    chosen = result.chosen()
    assert chosen is not None
    assert chosen.more["largest"] == pytest.approx(np.mean([record.more["largest"] for record in result.rounds]))


def test_whoever_resumes_has_to_pass_or_trust_them(tmp_path: Path) -> None:
    by_name = {"missed": "tests.test_more_metrics:missed"}
    ft.run("ditto", metrics=by_name, out=tmp_path / "run", **SMALL)
    with pytest.raises(ft.FedtailorError, match=r"names code of its own .metric missed tests.test_more_metrics:missed"):
        ft.resume(tmp_path / "run", rounds=3)
    with pytest.raises(ft.FedtailorError, match=r"not the run's metric missed: that is tests.test_"):
        ft.resume(tmp_path / "run", rounds=3, metrics={"missed": largest})
    with pytest.raises(ft.FedtailorError, match="has no metric other: leave it out"):
        ft.resume(tmp_path / "run", rounds=3, metrics={"missed": missed, "other": largest})
    longer = ft.resume(tmp_path / "run", rounds=3, metrics={"missed": missed})
    again = ft.resume(tmp_path / "run", rounds=4, trust=True)
    whole = ft.run("ditto", metrics=by_name, **{**SMALL, "rounds": 4})
    assert numbers(longer.rounds) == numbers(whole.rounds[:3])
    assert numbers(again.rounds) == numbers(whole.rounds)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"accuracy": missed}, "it must be names of your own"),
        ({"two words": missed}, "it must be names of your own"),
        ({"mine": "missed"}, "names with functions as module:function, like missed=mine:missed"),
        ("missed", "names with functions as module:function"),
        ({"mine": 3}, "names with functions, like missed=mine:missed"),
        ({"seconds": missed}, "'seconds' would be taken for another entry of the record"),
        ({"mine": "tests.test_more_metrics:OWN"}, "is not a function of"),
        ({"mine": "tests.test_more_metrics:other"}, "There is no 'other' in the module"),
        ({"mine": "no_such:other"}, "The metric 'no_such:other' cannot be imported"),
    ],
)
def test_wrong_ones_are_refused_before_any_work(metrics: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        ft.run("ditto", metrics=metrics, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


def test_one_that_fails_is_one_sentence() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise ValueError("no such thing")

    with pytest.raises(ft.FedtailorError, match=r"The metric broken fails on client 0: ValueError: no such thing"):
        ft.run("ditto", metrics={"broken": broken}, **SMALL)


def test_a_comparison_has_a_column_for_each(tmp_path: Path) -> None:
    names = {name: f"tests.test_more_metrics:{name}" for name in OWN}
    settings = {name: value for name, value in SMALL.items() if name != "seed"}
    table = ft.compare(["local", "ditto"], seeds=[0], metrics=names, out=tmp_path / "out", **settings)
    record = table.lines[1].results[0].chosen()
    assert isinstance(record, RoundRecord)
    text = table.markdown(["missed"])
    assert "| missed |" in text
    assert f"{record.more['missed']:.4f}" in text
    with pytest.raises(ft.FedtailorError, match=r"no column 'misssed': did you mean 'missed'"):
        table.markdown(["misssed"])
    in_memory = ft.compare(["local", "ditto"], seeds=[0], metrics=OWN, **settings)
    assert in_memory.lines[1].results[0].rounds[-1].more == table.lines[1].results[0].rounds[-1].more


# --- what a site tells ---


def reply(more: Any, test: Any = None) -> Reply:
    metrics = Metrics(loss=1.0, n_samples=3)
    metrics.more = more
    return Reply((0,), measured=[{"test": metrics}])


@pytest.mark.parametrize("more", [{"other": 1.0}, {"missed": "x"}, {"missed": None}, [1.0], {1: 2.0}, None])
def test_the_server_believes_no_others_than_it_asked_for(more: Any) -> None:
    evaluator = ft.run("ditto", metrics=OWN, **SMALL).simulation.loop.evaluator
    assert evaluator._checked(reply({"missed": 2.0}), 0).measured
    assert evaluator._checked(reply(more), 0).error


def test_they_cross_in_letters_and_are_rounded_where_a_site_says_so() -> None:
    from fedtailor.client.answers import rounded

    letter = as_letter(Train(1, 0, {}, measure=True), "run", 0)
    sent = reply({"missed": 2.125, "largest": 1 / 3})
    got = as_reply(as_answer(letter, "north", sent).pack(), Train(1, 0, {}), "run", "north")
    assert got.measured == sent.measured
    assert rounded(sent.measured[0]["test"]).more == {"missed": 2.12, "largest": 0.33}
    plain = as_answer(letter, "north", reply({})).header["measured"]
    assert plain == [{"test": {"loss": 1.0, "n_samples": 3}}]
    wrong = Letter("answer", {**as_answer(letter, "north", sent).header, "measured": [{"test": {"more": {"a": "b"}}}]})
    assert "Its metrics are none" in as_reply(wrong.pack(), Train(1, 0, {}), "run", "north").error

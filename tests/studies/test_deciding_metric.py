"""The metric that decides, where lower is better and where it is no accuracy: every number against a slow version.

The regression is scikit-learn's diabetes table, split by age; the labels are drawn.
"""

import csv
import io
import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_diabetes, make_multilabel_classification
from sklearn.metrics import f1_score, root_mean_squared_error
from torch import Tensor

import fedtailor as ft
from fedtailor.reporting import figures
from fedtailor.reporting.marks import Bars, styles
from fedtailor.reporting.tables import comma_separated, markdown
from fedtailor.server.records import RoundRecord
from fedtailor.studies.advice import GLOBAL, _decide, _differences
from fedtailor.studies.candidate import Candidate
from fedtailor.studies.measures import client_values, individual_gains, until
from fedtailor.studies.summary import Summary, summarize

SMALL: dict[str, Any] = {"model": "mlp:8", "lr": 0.01, "rounds": 5, "validation": 0.2, "engine": "in-process"}
METHODS = ("local", "fedavg", "ditto")


@cache
def diabetes() -> list[tuple[np.ndarray, np.ndarray]]:
    """Eleven clients by age, from the youngest to the oldest."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std(0)).astype(np.float32), (y[:, None] / 10).astype(np.float32)
    return [(x[part], y[part]) for part in np.array_split(np.argsort(x[:, 0]), 11)]


@cache
def regression(method: str, seed: int = 0, **settings: Any) -> ft.RunResult:
    return ft.run(method, data=diabetes(), loss="mse", seed=seed, **{**SMALL, **settings})


@cache
def several_labels(method: str) -> ft.RunResult:
    x, y = make_multilabel_classification(n_samples=300, n_features=10, n_classes=4, random_state=0)
    x = (x / x.std(0)).astype(np.float32)
    data = [(x[place::6], y[place::6]) for place in range(6)]
    return ft.run(method, data=data, loss="bce", **{**SMALL, "lr": 0.1, "rounds": 4})


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarize([regression(method, seed) for method in METHODS for seed in (0, 1)])


def of_clients(result: ft.RunResult, split: str = "test") -> list[float]:
    """Each client's RMSE of the last round, by scikit-learn."""
    found = []
    for client in range(len(result.names)):
        x, y = getattr(result.data, split)(client)
        with torch.no_grad():
            network = result.simulation.terms.network
            network.vector.copy_(result.personal_vector(client))
            found.append(root_mean_squared_error(y.double(), network(x).double()))
    return found


def line(summary: Summary, method: str) -> Any:
    return next(line for line in summary.lines if line.method == method)


class TestARegression:
    def test_it_is_judged_by_the_rmse(self) -> None:
        result = regression("fedavg")
        values = of_clients(result)
        assert (str(result.metric), result.higher_is_better) == ("rmse", False)
        assert result.value == pytest.approx(np.mean(values))
        assert result.validation == pytest.approx(np.mean(of_clients(result, "validation")))
        last = result.rounds[-1]
        assert last.std == pytest.approx(np.std(values))
        assert last.worst_decile == pytest.approx(max(values))  # the worst is the highest
        assert (last.accuracy, last.accuracy_std) == (None, None)
        assert client_values(result) == pytest.approx(dict(enumerate(values)))

    @pytest.mark.parametrize("choose", ["best-validation", "best-test"])
    def test_the_best_round_is_the_lowest(self, choose: str) -> None:
        result = regression("ditto", choose=choose, rounds=8)
        field = "validation_rmse" if choose == "best-validation" else "rmse"
        lowest = min(result.rounds, key=lambda record: getattr(record, field))
        assert result.chosen() == lowest
        assert result.value == lowest.rmse
        assert lowest.round != max(result.rounds, key=lambda record: getattr(record, field)).round

    def test_a_target_is_at_most(self) -> None:
        result = regression("fedavg")
        values = [record.rmse for record in result.rounds]
        assert values[0] > min(values)
        target = (values[0] + min(values)) / 2
        place = next(place for place, value in enumerate(values) if value <= target)
        sent = sum(record.bytes for record in result.rounds[: place + 1])
        assert until(result, target) == (place + 1, sent, None)
        assert until(result, min(values) / 2) is None

    def test_a_target_counts_the_clients_that_were_called(self) -> None:
        result = regression("ditto", participation=3)
        called: set[int] = set()
        means = []
        for record, clients in zip(result.rounds, result.clients, strict=True):
            called |= set(record.participants)
            means.append(np.mean([clients.results[client]["test"].rmse for client in called]))
        assert len(called) < 11
        target = min(means)
        assert min(record.rmse for record in result.rounds) > target  # with the others it is not reached
        reached = until(result, target)
        assert reached is not None
        assert reached[0] == 1 + int(np.argmin(means))

    def test_a_gain_is_a_fall(self) -> None:
        mine, alone = regression("fedavg"), regression("local")
        expected = np.array(of_clients(alone)) - np.array(of_clients(mine))
        assert individual_gains(mine, alone) == pytest.approx(dict(enumerate(expected)))

    def test_the_summary(self, summary: Summary) -> None:
        values = {m: [np.mean(of_clients(regression(m, seed))) for seed in (0, 1)] for m in METHODS}
        order = sorted(METHODS, key=lambda method: np.mean(values[method]))
        assert [one.method for one in summary.lines if one.best] == [order[0]]
        assert [one.method for one in summary.lines if one.second] == [order[1]]
        worst = max(value for both in values.values() for value in both)
        assert worst <= summary.target <= worst * 1.1
        for method in METHODS:
            found = line(summary, method)
            assert found.value == pytest.approx(np.mean(values[method]))
            assert found.value_std == pytest.approx(np.std(values[method], ddof=1))
            deciles = [max(of_clients(regression(method, seed))) for seed in (0, 1)]
            assert found.worst_decile == pytest.approx(np.mean(deciles))
            if method != "local":
                pairs = [(of_clients(regression("local", s)), of_clients(regression(method, s))) for s in (0, 1)]
                gains = [np.subtract(local, mine) for local, mine in pairs]
                assert found.gain == pytest.approx(np.mean(gains))
                assert found.losing == np.mean([(gained < 0).sum() for gained in gains])

    def test_significance_is_that_of_the_clients_rmse(self, summary: Summary) -> None:
        best = summary.best
        assert best is not None
        others = [one for one in summary.lines if one is not best]
        raw = []
        for other in others:
            theirs, mine = (
                np.mean([of_clients(regression(m, seed)) for seed in (0, 1)], axis=0)
                for m in (best.method, other.method)
            )
            raw.append(stats.wilcoxon(mine, theirs).pvalue)
        low, high = sorted(raw)
        corrected = {low: min(1.0, 2 * low), high: max(min(1.0, 2 * low), high)}
        assert [one.p for one in others] == pytest.approx([corrected[p] for p in raw])

    def test_tables_and_captions_name_it(self, summary: Summary) -> None:
        text = markdown(summary)
        head = text.splitlines()[2]
        assert head.startswith("| method | RMSE | vs best | gain over Local | clients that lose | worst decile |")
        assert f"rounds to at most {summary.target:g}" in head
        assert "–" not in text.splitlines()[5]
        assert summary.best is not None
        assert f"**{summary.best.value:.4f} ±" in text
        assert summary.caption.startswith("Test RMSE (lower is better) of personal models")
        rows = list(csv.DictReader(io.StringIO(comma_separated(summary))))
        assert {row["metric"] for row in rows} == {"rmse"}
        assert [float(row["value"]) for row in rows] == [one.value for one in summary.lines]
        record = summary.plain()
        assert (record["metric"], record["higher_is_better"]) == ("rmse", False)

    def test_runs_by_another_metric_are_not_compared(self) -> None:
        with pytest.raises(ft.FedtailorError, match=r'evaluation.metric is "rmse" in .* and "mae" in'):
            summarize([regression("local"), regression("fedavg", metric="mae")])

    def test_the_report_is_about_it(self, tmp_path: Path) -> None:
        page = ft.report([regression(method) for method in METHODS], tmp_path / "page.html").read_text(encoding="utf-8")
        assert "The best RMSE is bold" in page
        assert "Test RMSE (lower is better)" in page

    def test_it_is_in_the_record(self, tmp_path: Path) -> None:
        result = regression("fedavg")
        again = ft.run("fedavg", data=diabetes(), loss="mse", **SMALL, out=tmp_path / "run")
        written = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (written["metric"], written["value"], written["higher_is_better"]) == ("rmse", result.value, False)
        loaded = ft.load(tmp_path / "run")
        assert (loaded.metric, loaded.value, loaded.validation) == (again.metric, again.value, again.validation)
        assert "RMSE" in repr(loaded)
        assert f"<th>{loaded.metric.title} std</th>" in loaded._repr_html_()

    def test_models_are_adapted_and_described_by_it(self, tmp_path: Path) -> None:
        result = ft.run("fedavg", data=diabetes(), loss="mse", new_clients=2, **SMALL)
        outcome = ft.adapt(result, epochs=1, to=tmp_path)
        last = outcome.adapted[-1]
        assert outcome.metric.name == "rmse"
        assert last.rmse == pytest.approx(np.mean([own.adapted[-1].rmse for own in outcome.per_client.values()]))
        assert outcome.csv().startswith("epoch,adapted_rmse,adapted_std,adapted_worst_decile,adapted_loss,local_rmse")
        about = json.loads(next(tmp_path.glob("adapted-*.json")).read_text())
        assert about["metric"]["name"] == "rmse"
        assert about["value"] == outcome.per_client[about["client"]].adapted[-1].rmse


class TestAdvice:
    def candidates(self, mine: list[float], base: list[float], metric: str) -> list[Candidate]:
        from fedtailor.experiment import make_experiment
        from fedtailor.training.metrics import METRICS

        return [
            Candidate(title, make_experiment({}), rounds=8, values=dict(enumerate(values)), metric=METRICS[metric],
                      n_samples=dict.fromkeys(range(len(values)), 10))
            for title, values in (("ditto", mine), (GLOBAL, base))
        ]  # fmt: skip

    def test_a_lower_error_is_a_gain(self) -> None:
        base = [50.0 + client for client in range(20)]
        lower, higher = [value - 5 for value in base], [value + 5 for value in base]
        better = _decide(self.candidates(lower, base, "rmse"))
        assert (better.chosen, better.gain) == ("ditto", pytest.approx(5.0))
        worse = _decide(self.candidates(higher, base, "rmse"))
        assert (worse.chosen, worse.gain) == (GLOBAL, pytest.approx(-5.0))
        assert better.interval == pytest.approx((5.0, 5.0))  # all clients gain alike: there is no other uncertainty

    def test_of_an_error_1_percent_is_worth_it(self) -> None:
        base = [50.0 + client % 2 for client in range(20)]  # a mean of 50.5
        for gain, chosen in ((0.6, "ditto"), (0.4, GLOBAL)):
            assert _decide(self.candidates([value - gain for value in base], base, "rmse")).chosen == chosen
        of_scale = [0.8 + 0.01 * (client % 2) for client in range(20)]
        assert _decide(self.candidates([value + 0.009 for value in of_scale], of_scale, "auc")).chosen == GLOBAL

    @pytest.mark.filterwarnings("ignore::fedtailor._common.errors.ClientFailure")
    def test_a_candidate_that_diverges_leaves_the_race_to_the_others(self) -> None:
        settings = {**SMALL, "epochs": 1, "batch": "full"}
        methods = ["local", "tests.studies.parts:Explodes"]
        advice = ft.advise(data=diabetes(), loss="mse", methods=methods, budget=0.1, **settings)
        assert [one.title for one in advice.candidates][2:] == ["tests.studies.parts:Explodes"]
        gone = advice.candidates[2]
        assert gone.failed.startswith("Explodes: no client could do its work in 3 rounds in a row: NotFinite")
        assert f"tests.studies.parts:Explodes left the race. {gone.failed}" in str(advice)
        alone = ft.advise(data=diabetes(), loss="mse", methods=["local"], budget=0.1, **settings)
        assert [(one.title, one.values) for one in advice.candidates[:2]] == [
            (one.title, one.values) for one in alone.candidates
        ]
        with pytest.raises(ft.FedtailorError, match=r"FedAvg: no client could do its work .* take a smaller --lr"):
            ft.advise(data=diabetes(), loss="mse", methods=["local"], budget=0.1, **{**settings, "lr": 1e30})

    @pytest.mark.parametrize(("metric", "by_samples"), [(None, False), ("mae", True)])
    def test_a_race_on_numbers(self, metric: str | None, by_samples: bool) -> None:
        settings = {**SMALL, "epochs": 1, "metric": metric}
        few = diabetes()[:3] if by_samples else diabetes()
        advice = ft.advise(data=few, loss="mse", methods=["local"], budget=0.1, **settings)
        values = [candidate.mean for candidate in advice.candidates]
        assert str(advice.metric) == (metric or "rmse")
        assert values == sorted(values)
        assert advice.by_samples == by_samples
        base = next(candidate for candidate in advice.candidates if candidate.title == GLOBAL)
        assert advice.gain == pytest.approx(base.mean - next(c.mean for c in advice.candidates if c is not base))
        rival = next(candidate for candidate in advice.candidates if candidate is not base)
        assert _differences(rival, base).sum() == pytest.approx(advice.gain)
        if by_samples:
            parts = advice.candidates[0].parts
            assert {client: errors.mean() for client, errors in parts.items()} == pytest.approx(
                advice.candidates[0].values, rel=1e-6
            )


class TestSeveralLabels:
    def test_it_is_judged_by_f1(self) -> None:
        result = several_labels("fedavg")
        found = []
        for client in range(6):
            x, y = result.data.test(client)
            network = result.simulation.terms.network
            network.vector.copy_(result.personal_vector(client))
            with torch.no_grad():
                guess = (network(x) > 0).numpy()
            seen = [label for label in range(4) if y[:, label].any() or guess[:, label].any()]
            found.append(f1_score(y, guess, average="macro", labels=seen, zero_division=0.0))
        assert str(result.metric) == "f1"
        assert result.value == pytest.approx(np.mean(found))
        assert result.accuracy is not None  # the share of labels that are right
        assert result.rounds[-1].exact_match is not None
        assert result.rounds[-1].worst_decile == pytest.approx(min(found))

    def test_a_table(self) -> None:
        table = summarize([several_labels(method) for method in ("local", "fedavg")])
        assert markdown(table).splitlines()[2].startswith("| method | F1 | vs best | gain over Local |")
        assert table.caption.startswith("Test F1 of personal models")
        sizes = several_labels("local").partition["n_train"]
        assert sizes == several_labels("local").data.n_samples.tolist()
        assert line(table, "local").passes == 5  # by samples, of which each counts once

    def test_predictions(self, tmp_path: Path) -> None:
        result = several_labels("fedavg")
        file = ft.export(result, to=tmp_path, client=0)[0]
        x, _ = result.data.test(0)
        found = ft.predict(file, x)
        with torch.no_grad():
            scores = ft.load_model(file)(x)
        assert torch.allclose(found.probabilities, scores.sigmoid())
        row = next(found.rows())
        assert [row[f"has({label})"] for label in range(4)] == (scores[0] > 0).int().tolist()
        assert row["p(2)"] == pytest.approx(float(scores[0, 2].sigmoid()))
        assert row["prediction"] == ", ".join(str(label) for label in range(4) if scores[0, label] > 0)
        assert next(csv.DictReader(io.StringIO(found.csv())))["has(0)"] == str(row["has(0)"])


def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().max()


largest_error.higher_is_better = False  # type: ignore[attr-defined]


def undefined(outputs: Tensor, targets: Tensor) -> None:
    return None


class TestAMetricOfTheUsersOwn:
    def test_a_function_decides(self, tmp_path: Path) -> None:
        data = diabetes()
        result = ft.run("fedavg", data=data, loss="mse", metric=largest_error, **SMALL, out=tmp_path / "run")
        expected = []
        for client in range(11):
            x, y = result.data.test(client)
            network = result.simulation.terms.network
            network.vector.copy_(result.personal_vector(client))
            with torch.no_grad():
                expected.append(float((network(x) - y).abs().max()))
        assert result.value == pytest.approx(np.mean(expected))
        assert result.rounds[-1].worst_decile == pytest.approx(max(expected))
        loaded = ft.load(tmp_path / "run")  # which imports nothing
        assert (loaded.metric.title, loaded.higher_is_better, loaded.value) == ("largest error", False, result.value)
        assert loaded.experiment.evaluation.in_words(loaded.metric).startswith("Test largest error (lower is better)")
        longer = ft.resume(tmp_path / "run", data=data, metric=largest_error, rounds=6)
        assert longer.rounds[-1].own is not None
        with pytest.raises(ft.FedtailorError, match=r"names code of its own .metric tests.studies"):
            ft.resume(tmp_path / "run", data=data, rounds=7)
        with pytest.raises(ft.FedtailorError, match="This is not the run's metric"):
            ft.resume(tmp_path / "run", data=data, metric=undefined, rounds=7)

    def test_it_is_the_same_on_both_engines(self) -> None:
        def values(engine: str) -> list[float | None]:
            settings = {**SMALL, "engine": engine, "workers": 2 if engine == "processes" else None, "rounds": 2}
            result = ft.run("ditto", data=diabetes(), loss="mse", metric=largest_error, **settings)
            return [record.own for record in result.rounds]

        assert values("in-process") == values("processes")

    def test_one_that_fails_is_one_sentence_with_the_client(self) -> None:
        def broken(outputs: Tensor, targets: Tensor) -> float:
            raise ValueError("no such thing")

        with pytest.raises(
            ft.FedtailorError, match=r"fails on client 0: ValueError: no such thing .test_deciding_metric"
        ):
            ft.run("fedavg", data=diabetes(), loss="mse", metric=broken, **SMALL)

    def test_one_that_fails_later_names_the_client_too(self) -> None:
        def unlucky(outputs: Tensor, targets: Tensor) -> float:
            if float(targets.mean()) == float(torch.tensor(held_out).mean()):
                raise ValueError("not on the 13th")
            return 0.0

        held_out = regression("local", rounds=1).data.test(7)[1].numpy()
        with pytest.raises(ft.FedtailorError, match="evaluation of client 7 failed: ValueError: not on the 13th"):
            ft.run("local", data=diabetes(), loss="mse", metric=unlucky, on_failure="stop", **SMALL)

    def test_one_that_is_not_defined_leaves_the_loss(self) -> None:
        result = ft.run("fedavg", data=diabetes(), loss="mse", metric=undefined, choose="best-test", **SMALL)
        assert result.value is None
        assert result.chosen() == min(result.rounds, key=lambda record: record.loss or 0)
        assert "loss" in repr(result)

    @pytest.mark.parametrize("metric", ["nowhere:function", "json:decoder", "json:nothing"])
    def test_one_that_is_not_there(self, metric: str) -> None:
        with pytest.raises(ft.FedtailorError, match="metric"):
            ft.run("fedavg", data=diabetes(), loss="mse", metric=metric, **SMALL)


def test_an_older_run_is_read_by_the_accuracy_that_it_has(tmp_path: Path) -> None:
    """Before, records had a spread of the accuracy alone, and about.json no metric."""
    plain = {"round": 1, "participants": [0], "bytes_down": 0, "bytes_up": 0, "seconds": 0.0, "accuracy": 0.5}
    record = RoundRecord.from_json(json.dumps({**plain, "accuracy_std": 0.25, "accuracy_worst_decile": 0.125}).encode())
    assert (record.std, record.worst_decile) == (0.25, 0.125)
    newer = {**plain, "accuracy_std": 0.25, "std": None, "worst_decile": 3.0}
    assert RoundRecord.from_json(json.dumps(newer).encode()).std is None


def test_figures_of_runs_that_are_read_have_every_client_in_percent(tmp_path: Path) -> None:
    """Each run has a metric of its own then, which is the same by its value alone."""
    for method in ("local", "fedavg"):
        ft.run(method, clients=5, rounds=2, model="mlp:8", engine="in-process", out=tmp_path / method)
    read = summarize([ft.load(tmp_path / "local"), ft.load(tmp_path / "fedavg")])
    figure = figures.clients(read, styles([(one.title, one.method) for one in read.lines]))
    assert figure is not None
    for panel, one in zip(figure.panels, read.lines, strict=True):
        bars = panel.marks[0]
        assert isinstance(bars, Bars)
        assert sorted(bars.y) == pytest.approx(sorted(100 * value for value in client_values(one.results[0]).values()))


def test_accuracies_decide_as_before() -> None:
    """The fields of the accuracy and those of the metric are the same where the accuracy decides."""
    result = ft.run("fedavg", clients=5, rounds=3, model="mlp:8", epochs=1, engine="in-process")
    assert result.value == result.accuracy
    for record in result.rounds:
        assert (record.std, record.worst_decile) == (record.accuracy_std, record.accuracy_worst_decile)
    by_auc = ft.run("fedavg", clients=5, rounds=3, model="mlp:8", epochs=1, engine="in-process", metric="auc")
    assert [r.accuracy for r in by_auc.rounds] == [r.accuracy for r in result.rounds]
    assert by_auc.value == by_auc.rounds[-1].auc
    assert by_auc.rounds[-1].std != by_auc.rounds[-1].accuracy_std
    assert all(a.round + 1 == b.round for a, b in pairwise(by_auc.rounds))


def test_the_caption_says_for_how_many_clients_the_metric_is_defined() -> None:
    x = torch.linspace(-1, 1, 40)[:, None]
    both, one = (x > 0).long().flatten(), torch.zeros(40, dtype=torch.int64)
    result = ft.run("fedavg", data={"both": (x, both), "one": (x, one)}, rounds=1, metric="auc", engine="in-process")
    assert [result.per_client[client].auc is None for client in (0, 1)] == [False, True]
    assert result.known_for == "The AUC is defined for 1 of 2 clients with test samples."
    assert result.known_for in summarize([result]).caption
    by_accuracy = ft.run("fedavg", data={"both": (x, both), "one": (x, one)}, rounds=1, engine="in-process")
    assert by_accuracy.known_for == ""

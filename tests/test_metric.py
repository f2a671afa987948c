"""Metrics by name: directions, formats, targets, and which are defined for what."""

import json

import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import Metrics
from fedtailor.server.records import About, Averages
from fedtailor.training.metrics import ACCURACY, DEFINED, METRICS, Metric, find_metric, own_metric
from fedtailor.training.predictions import measure

RMSE = METRICS["rmse"]


def test_each_has_a_place_in_the_records() -> None:
    for metric in METRICS.values():
        assert metric.of(Metrics()) is metric.of(Averages()) is metric.validation(Averages()) is None
    assert {name for names in DEFINED.values() for name in names} == METRICS.keys()


def test_which_of_two_values_is_better() -> None:
    assert (ACCURACY.gain(0.9, 0.8) > 0, RMSE.gain(0.9, 0.8) > 0) == (True, False)
    assert (ACCURACY.best([1, 3, 2]), RMSE.best([1, 3, 2])) == (3, 1)
    assert (ACCURACY.worst([1, 3, 2]), RMSE.worst([1, 3, 2])) == (1, 3)
    assert (ACCURACY.worst_first([1, 3, 2]), RMSE.worst_first([1, 3, 2])) == ([1, 2, 3], [3, 2, 1])
    assert ACCURACY.best([]) is None
    lower = {name for name, metric in METRICS.items() if not metric.higher_is_better}
    assert lower == {"loss", "log_loss", "rmse", "mae"}


def test_a_target_is_at_least_or_at_most() -> None:
    assert [ACCURACY.reaches(value, 0.5) for value in (0.4, 0.5, 0.6)] == [False, True, True]
    assert [RMSE.reaches(value, 0.5) for value in (0.4, 0.5, 0.6)] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "value", "target"),
    [
        ("accuracy", 0.8999, 0.89),
        ("accuracy", 0.29, 0.29),  # 100 × 0.29 is 28.999999999999996
        ("auc", 0.8734, 0.87),
        ("r2", -0.1234, -0.13),
        ("rmse", 53.27, 54),
        ("rmse", 0.05321, 0.054),
        ("rmse", 5.4, 5.4),
        ("log_loss", 0.0, 0.0),
    ],
)
def test_a_round_target_is_no_harder(name: str, value: float, target: float) -> None:
    metric = METRICS[name]
    assert metric.easier(value) == target
    assert metric.reaches(value, metric.easier(value))


def test_how_values_are_shown() -> None:
    assert (ACCURACY.text(0.93125), ACCURACY.shown(0.93125)) == ("93.12", "accuracy 93.12 %")
    assert (RMSE.text(5.12345), RMSE.text(54321.12), RMSE.text(-0.5, "+")) == ("5.1235", "54,321.1", "-0.5000")
    assert RMSE.text(None) == "–"
    assert [METRICS[name].title for name in ("log_loss", "r2", "balanced_accuracy")] == [
        "log loss", "R²", "balanced accuracy",
    ]  # fmt: skip
    assert Metric("mine:net_profit").title == "net profit"


def test_the_metric_of_auto_depends_on_the_targets() -> None:
    assert [find_metric("auto", kind).name for kind in ("classes", "labels", "numbers", None)] == [
        "accuracy", "f1", "rmse", "loss",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("acuracy", "classes", "There is no metric 'acuracy': did you mean 'accuracy'"),
        ("rmse", "classes", "rmse is not defined for targets that are classes: take one of accuracy, "),
        ("accuracy", "numbers", "not defined for targets that are numbers: take one of rmse, mae, r2, loss"),
        ("log_loss", "labels", "log_loss is not defined for targets that are several labels a sample: take one of f1"),
        ("accuracy", None, "accuracy is not defined for these outputs of the network: take one of loss"),
    ],
)
def test_a_metric_that_is_not_defined_is_refused(name: str, kind: None, said: str) -> None:
    with pytest.raises(FedtailorError, match=said):
        find_metric(name, kind)


def test_a_function_says_its_direction() -> None:
    def cost(outputs: object, targets: object) -> float:
        return 0.0

    assert own_metric("mine:cost", cost).higher_is_better
    cost.higher_is_better = False  # type: ignore[attr-defined]
    found = own_metric("mine:cost", cost)
    assert (found.higher_is_better, found.percent, found.field) == (False, False, "own")


@pytest.mark.parametrize("name", ["participants", "__class__", "a b:c", "mine:a\nb", ""])
def test_a_file_cannot_name_anything_else(name: str) -> None:
    about = {"format": 1, "versions": {}, "experiment": {}, "metric": {"name": name}}
    with pytest.raises(ValueError, match="there is no such metric"):
        About.from_json(json.dumps(about).encode())


def test_all_metrics_of_a_kind_are_measured() -> None:
    classes = measure(torch.randn(9, 3), torch.arange(9) % 3, lambda o, t: o.sum())
    labels = measure(torch.randn(9, 3), (torch.randn(9, 3) > 0).float(), lambda o, t: o.sum(), multi_label=True)
    numbers = measure(torch.randn(9, 3), torch.randn(9, 3), lambda o, t: o.sum())
    for kind, metrics in (("classes", classes), ("labels", labels), ("numbers", numbers)):
        defined = {name for name, metric in METRICS.items() if metric.of(metrics) is not None}
        assert defined == set(DEFINED[kind])  # type: ignore[index]

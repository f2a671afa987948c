"""Metrics against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch.nn import functional

from fedtailor.messages import Metrics
from fedtailor.training.predictions import area_under_curve, measure, sample_scores


@pytest.mark.parametrize("samples", [60, 90])  # of which all pairs are compared, and of which they are not
@pytest.mark.parametrize("seed", range(5))
def test_metrics_are_scikit_learns(seed: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(samples, 5, generator=generator).round(decimals=1)  # with ties
    y = torch.randint(5, (samples,), generator=generator)
    found = measure(scores, y, functional.cross_entropy)
    guess = scores.argmax(1).numpy()
    assert found.accuracy == pytest.approx(accuracy_score(y, guess))
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(y, guess))
    assert found.auc == pytest.approx(roc_auc_score(y, scores.double().softmax(1), multi_class="ovr"))
    assert found.loss == pytest.approx(float(functional.cross_entropy(scores, y)))
    assert found.f1 == pytest.approx(f1_score(y, guess, average="macro"))
    assert found.log_loss == pytest.approx(log_loss(y, scores.double().softmax(1)))
    assert (found.rmse, found.mae, found.r2, found.exact_match, found.own) == (None,) * 5


def test_classes_that_are_not_there_do_not_count() -> None:
    scores = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([1, 4] * 20)
    found = measure(scores, y, functional.cross_entropy)
    probabilities = scores.double().softmax(1).numpy()
    one_by_one = [roc_auc_score(y.numpy() == k, probabilities[:, k]) for k in (1, 4)]
    assert found.auc == pytest.approx(np.mean(one_by_one))
    recalls = [(scores.argmax(1)[y == k] == k).double().mean().item() for k in (1, 4)]
    assert found.balanced_accuracy == pytest.approx(np.mean(recalls))


@pytest.mark.parametrize("samples", [10, 100])
def test_equal_scores_are_no_better_than_chance(samples: int) -> None:
    assert area_under_curve(torch.full((samples, 2), 0.5), torch.tensor([0, 1] * (samples // 2))) == 0.5


@pytest.mark.parametrize("found", [1.0, float("inf"), float("nan")])
def test_few_samples_have_the_area_of_many_to_the_bit(found: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that has diverged."""
    generator = torch.Generator().manual_seed(0)
    for samples in (2, 3, 7, 64):
        probabilities = torch.rand(samples, 4, generator=generator, dtype=torch.float64).round(decimals=1)
        probabilities[torch.rand(samples, 4, generator=generator) < 0.2] = found
        y = torch.randint(4, (samples,), generator=generator)
        with monkeypatch.context() as patched:
            patched.setattr("fedtailor.training.predictions.FEW_SAMPLES", 0)
            one_by_one = area_under_curve(probabilities, y)
        assert area_under_curve(probabilities, y) == one_by_one


def test_what_is_not_defined_is_none() -> None:
    one_class = measure(torch.randn(3, 2), torch.zeros(3, dtype=torch.long), functional.cross_entropy)
    assert one_class.auc is None
    assert one_class.accuracy is not None
    nothing = measure(torch.empty(0, 1), torch.empty(0, dtype=torch.long), functional.cross_entropy)
    assert nothing == Metrics(n_samples=0)
    regression = measure(torch.ones(3), torch.zeros(3), functional.mse_loss)
    assert regression == Metrics(loss=1.0, rmse=1.0, mae=1.0, n_samples=3)  # R² of a constant is not defined


@pytest.mark.parametrize(("truth", "guess"), [([0], [0]), ([0], [3]), ([2, 2], [2, 0]), ([1, 1, 1], [1, 1, 1])])
def test_f1_is_over_the_classes_that_are_there_or_predicted(truth: list[int], guess: list[int]) -> None:
    found = measure(torch.eye(4)[guess], torch.tensor(truth), functional.cross_entropy)
    assert found.f1 == pytest.approx(f1_score(truth, guess, average="macro", zero_division=0.0))


def test_a_class_that_is_predicted_but_not_there_lowers_f1() -> None:
    found = measure(torch.eye(3)[[0, 0, 1]], torch.zeros(3, dtype=torch.long), functional.cross_entropy)
    assert found.f1 == pytest.approx((0.8 + 0.0) / 2)


def test_the_log_loss_is_that_of_the_probabilities_whatever_the_loss() -> None:
    scores, y = torch.tensor([[0.0, 0.0], [100.0, 0.0]]), torch.tensor([0, 1])
    found = measure(scores, y, lambda outputs, targets: outputs.sum())
    assert found.log_loss == pytest.approx((np.log(2) + 100) / 2)  # it is not clipped
    assert found.loss == 100.0


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 3), (2,), (2, 4)])
def test_metrics_of_numbers_are_scikit_learns(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    y, scores = 50 + 10 * torch.randn(shape, generator=generator), 50 + 9 * torch.randn(shape, generator=generator)
    found = measure(scores, y, functional.mse_loss)
    assert found.rmse == pytest.approx(root_mean_squared_error(y, scores), rel=1e-6)
    assert found.mae == pytest.approx(mean_absolute_error(y, scores), rel=1e-6)
    assert found.r2 == pytest.approx(r2_score(y.double(), scores.double()), rel=1e-6)
    assert (found.accuracy, found.auc, found.f1, found.log_loss) == (None,) * 4


def test_r2_needs_targets_that_differ() -> None:
    one = measure(torch.tensor([1.0]), torch.tensor([3.0]), functional.mse_loss)
    assert (one.rmse, one.mae, one.r2) == (2.0, 2.0, None)
    constant = measure(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]), functional.mse_loss)
    assert constant.r2 is None
    scores, y = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[1.0, 5.0], [2.0, 5.0]])
    assert measure(scores, y, functional.mse_loss).r2 == pytest.approx(r2_score([1.0, 2.0], [1.0, 3.0]))


def test_outputs_that_are_no_prediction_of_the_targets_have_a_loss_alone() -> None:
    """A mean and a variance for each number, say: what they predict only the loss knows."""
    found = measure(torch.ones(3, 2), torch.zeros(3), lambda outputs, targets: outputs.mean())
    assert found == Metrics(loss=1.0, n_samples=3)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_of_several_labels_are_scikit_learns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(40, 4, generator=generator).round(decimals=1)  # with ties
    y = (torch.rand(40, 4, generator=generator) < 0.3).float()
    found = measure(scores, y, functional.binary_cross_entropy_with_logits, multi_label=True)
    guess = (scores > 0).numpy()
    assert found.accuracy == pytest.approx((guess == y.numpy()).mean())
    assert found.exact_match == pytest.approx(accuracy_score(y, guess))
    assert found.f1 == pytest.approx(f1_score(y, guess, average="macro"))
    assert found.auc == pytest.approx(roc_auc_score(y, scores, average="macro"))
    assert (found.balanced_accuracy, found.log_loss, found.rmse, found.mae, found.r2) == (None,) * 5


def test_labels_that_nobody_has_do_not_count() -> None:
    scores = torch.tensor([[2.0, -1.0, -1.0], [-1.0, -1.0, 1.0], [1.0, -1.0, -1.0]])
    y = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    found = measure(scores, y, functional.binary_cross_entropy_with_logits, multi_label=True)
    assert found.f1 == pytest.approx(f1_score(y, scores > 0, labels=[0, 2], average="macro", zero_division=0.0))
    assert found.auc == 1.0  # of the first label: the others have one value alone
    none = measure(-torch.ones(2, 3), torch.zeros(2, 3), functional.mse_loss, multi_label=True)
    assert (none.f1, none.auc, none.accuracy, none.exact_match) == (None, None, 1.0, 1.0)


def test_a_metric_of_the_users_own() -> None:
    scores, y = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])
    assert measure(scores, y, functional.mse_loss, own=lambda o, t: (o - t).max()).own == 3.0
    assert measure(scores, y, functional.mse_loss, own=lambda o, t: None).own is None
    assert measure(scores, y, functional.mse_loss, own=lambda o, t: float("nan")).own is None


@pytest.mark.parametrize(
    ("name", "scores", "y", "multi_label"),
    [
        ("accuracy", torch.randn(9, 3), torch.arange(9) % 3, False),
        ("accuracy", torch.randn(9, 3), (torch.arange(27).view(9, 3) % 2).float(), True),
        ("log_loss", torch.randn(9, 3), torch.arange(9) % 3, False),
        ("mae", torch.randn(9, 1), torch.randn(9), False),
        ("mae", torch.randn(9, 2), torch.randn(9, 2), False),
    ],
)
def test_the_samples_parts_of_a_metric_average_to_it(
    name: str, scores: torch.Tensor, y: torch.Tensor, multi_label: bool
) -> None:
    parts = sample_scores(name, scores, y, multi_label)
    assert parts is not None
    assert parts.shape == (9,)
    whole = getattr(measure(scores, y, lambda o, t: o.sum(), multi_label), name)
    assert parts.mean() == pytest.approx(whole, rel=1e-6)
    assert sample_scores("auc", scores, y, multi_label) is None

"""Metrics against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_auc_score
from torch.nn import functional

from fedtailor.local.metrics import area_under_curve, measure
from fedtailor.messages import Metrics


@pytest.mark.parametrize("seed", range(5))
def test_metrics_are_scikit_learns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(60, 5, generator=generator).round(decimals=1)  # with ties
    y = torch.randint(5, (60,), generator=generator)
    found = measure(scores, y, functional.cross_entropy)
    guess = scores.argmax(1).numpy()
    assert found.accuracy == pytest.approx(accuracy_score(y, guess))
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(y, guess))
    assert found.auc == pytest.approx(roc_auc_score(y, scores.double().softmax(1), multi_class="ovr"))
    assert found.loss == pytest.approx(float(functional.cross_entropy(scores, y)))


def test_classes_that_are_not_there_do_not_count() -> None:
    scores = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([1, 4] * 20)
    found = measure(scores, y, functional.cross_entropy)
    probabilities = scores.double().softmax(1).numpy()
    one_by_one = [roc_auc_score(y.numpy() == k, probabilities[:, k]) for k in (1, 4)]
    assert found.auc == pytest.approx(np.mean(one_by_one))
    recalls = [(scores.argmax(1)[y == k] == k).double().mean().item() for k in (1, 4)]
    assert found.balanced_accuracy == pytest.approx(np.mean(recalls))


def test_equal_scores_are_no_better_than_chance() -> None:
    assert area_under_curve(torch.full((10, 2), 0.5), torch.tensor([0, 1] * 5)) == 0.5


def test_what_is_not_defined_is_none() -> None:
    one_class = measure(torch.randn(3, 2), torch.zeros(3, dtype=torch.long), functional.cross_entropy)
    assert one_class.auc is None
    assert one_class.accuracy is not None
    nothing = measure(torch.empty(0, 1), torch.empty(0, dtype=torch.long), functional.cross_entropy)
    assert nothing == Metrics(n_samples=0)
    regression = measure(torch.ones(3), torch.zeros(3), functional.mse_loss)
    assert regression == Metrics(loss=1.0, n_samples=3)

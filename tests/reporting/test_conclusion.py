"""The conclusion at the head of a report says what the table's numbers say, and no more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.reporting.conclusion import conclusion, verdict
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.page import html, prepare
from fedtailor.studies.captions import sentences
from fedtailor.studies.summary import Summary, summarize
from fedtailor.training.metrics import METRICS
from tests.reporting.made_up import made_up

TWELVE = [0.5 + client / 100 for client in range(12)]


def runs(tmp_path: Path, seeds: int = 1, **accuracies: list[Any]) -> Summary:
    made = [
        made_up(tmp_path / f"{name}{seed}", name, [list(values)], seed)
        for name, values in accuracies.items()
        for seed in range(seeds)
    ]
    return summarize(made)


def worse(by: float) -> list[float]:
    return [value - by for value in TWELVE]


def test_who_is_best_what_is_significant_what_it_costs_and_who_loses(tmp_path: Path) -> None:
    ditto = [*worse(-0.1)[:11], 0.2]
    noisy = [value + (0.02 if client % 2 else -0.03) for client, value in enumerate(ditto)]
    summary = runs(tmp_path, local=TWELVE, ditto=ditto, apfl=noisy, fedavg=worse(0.2))
    best, chance, costs, harm = conclusion(summary).split(". ")
    assert best == (
        "Ditto has the highest accuracy, 61.25 %; APFL is next with 60.75 % "
        "(with one seed: another may turn out otherwise)"
    )
    significant = {line.label: not line.like_best for line in summary.lines if line.p is not None}
    assert significant == {"Local": False, "APFL": False, "FedAvg": True}
    assert chance == (
        "Ditto is significantly better than FedAvg (p < 0.05), but its lead over Local and APFL may be chance"
    )
    assert costs.startswith("Ditto sends 150 B in all")
    assert costs.endswith("; no other method that sends anything sends less")
    assert harm == "1 of 12 clients does worse with Ditto than with Local."


def test_the_verdict_is_its_beginning(tmp_path: Path) -> None:
    summary = runs(tmp_path, local=TWELVE, ditto=worse(-0.1), fedavg=worse(0.2))
    assert verdict(summary) == (
        "Ditto has the highest accuracy, 65.50 %; Local is next with 55.50 % "
        "(with one seed: another may turn out otherwise). "
        "Ditto is significantly better than all others (p < 0.05)."
    )
    assert conclusion(summary).startswith(f"{verdict(summary)} Ditto sends ")


def test_it_stands_at_the_head_of_the_page(tmp_path: Path) -> None:
    summary = runs(tmp_path, local=TWELVE, ditto=worse(-0.1))
    page = html(prepare(read_runs([tmp_path])))
    said = conclusion(summary).replace("<", "&lt;").replace("'", "&#x27;")
    assert f'<p class="conclusion">{said}</p>' in page
    assert page.index(said) < page.index('class="lead"')


def test_several_seeds(tmp_path: Path) -> None:
    text = conclusion(runs(tmp_path, seeds=2, local=TWELVE, ditto=[*worse(-0.1)[:10], 0.2, 0.2]))
    assert "(a mean over 2 seeds)" in text
    assert text.endswith("2 of 12 clients do worse with Ditto than with Local on average over seeds.")


def test_a_cheaper_method_is_named(tmp_path: Path) -> None:
    summary = runs(tmp_path, ditto=TWELVE, apfl=worse(0.1), fedavg=worse(0.2))
    ditto, apfl, fedavg = summary.lines
    priced = (replace(ditto, bytes=3000.0, passes=2.0), replace(apfl, bytes=2000.0), replace(fedavg, bytes=0.0))
    said = "Ditto sends 3 kB in all and takes 2 passes over a client's samples a round; APFL, the cheapest other that"
    assert said in conclusion(replace(summary, lines=priced))


def test_no_significant_difference(tmp_path: Path) -> None:
    noisy = [value + (0.02 if client % 2 else -0.03) for client, value in enumerate(TWELVE)]
    text = conclusion(runs(tmp_path, ditto=TWELVE, apfl=noisy))
    assert "No method differs significantly from Ditto: the differences may be chance." in text
    assert text.endswith("Without a run of Local it is not known which clients would do better alone.")


def test_too_few_clients_for_the_test(tmp_path: Path) -> None:
    text = conclusion(runs(tmp_path, local=[0.5, 0.5, 0.5], ditto=[0.6, 0.7, 0.8]))
    assert "There are too few clients for any difference to be significant." in text
    assert text.endswith("None of 3 clients does worse with Ditto than with Local.")


def test_one_method(tmp_path: Path) -> None:
    text = conclusion(runs(tmp_path, ditto=[0.5, 0.7]))
    assert text.startswith("Ditto has a test accuracy of 60.00 % (with one seed")
    assert "significant" not in text


def test_local_is_best(tmp_path: Path) -> None:
    text = conclusion(runs(tmp_path, local=TWELVE, ditto=worse(0.1)))
    assert text.startswith("Local has the highest accuracy")
    assert "Local is significantly better than Ditto (p < 0.05)." in text
    assert text.endswith("No other method has a better mean than Local, where each client trains alone.")


def test_many_methods_share_the_first_place(tmp_path: Path) -> None:
    names = ("ditto", "apfl", "fedavg", "fedper", "fedrep")
    text = conclusion(runs(tmp_path, local=worse(0.1), **dict.fromkeys(names, TWELVE)))
    assert text.startswith("Ditto, APFL, FedAvg and 2 others share the highest accuracy, 55.50 %")


def test_a_lower_rmse_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = runs(tmp_path, local=[0.5, 0.5], ditto=[0.6, 0.6])
    for line in summary.lines:
        monkeypatch.setitem(vars(line.results[0]), "metric", METRICS["rmse"])
    local, ditto = summary.lines
    lower = replace(summary, lines=(replace(local, best=True, second=False), replace(ditto, best=False, second=True)))
    assert conclusion(lower).startswith("Local has the lowest RMSE, 0.5000; Ditto is next with 0.6000")


def test_without_an_accuracy_the_loss_is_ranked_and_without_any_metric_nothing(tmp_path: Path) -> None:
    summary = runs(tmp_path, local=[None, None], ditto=[None, None])
    assert conclusion(summary).startswith("Local and Ditto share the lowest loss, 1.0000")
    unmeasured = tuple(replace(line, value=None, best=False) for line in summary.lines)
    said = "No test loss was measured, so there is no conclusion."
    assert conclusion(replace(summary, lines=unmeasured)) == said


def test_of_a_grid_only_the_chosen_lines_are_ranked(tmp_path: Path) -> None:
    made = [
        made_up(tmp_path / f"{lr}", "ditto", [[0.5, accuracy]], lr=lr, validation_accuracy=validation)
        for lr, accuracy, validation in ((0.1, 0.9, 0.2), (0.2, 0.7, 0.8))
    ]
    text = conclusion(summarize(made))
    assert text.startswith("Ditto, lr=0.2 has a test accuracy of 60.00 %")
    assert "lr=0.1" not in text
    unchosen = [made_up(tmp_path / f"un{lr}", "ditto", [[0.5, lr]], lr=lr) for lr in (0.1, 0.2)]
    assert "no validation data to choose one by: none is ranked" in conclusion(summarize(unchosen))


def test_nothing_is_a_mean_over_one_seed(tmp_path: Path) -> None:
    for seeds, means in ((1, 0), (2, 3)):
        summary = runs(tmp_path / str(seeds), seeds=seeds, local=TWELVE, ditto=worse(-0.1))
        assert " ".join(sentences(summary)).count("over seeds") == means

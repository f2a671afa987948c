"""Advice: the skew of partitions with known answers, the rule of decision, and the race itself."""

import json
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data import Dataset, FederatedData, federate
from fedtailor.experiment import make_experiment
from fedtailor.studies.advice import ALONE, GLOBAL, TUNED, Candidate, _decide, _race, advise, measure_skew
from tests.cli.calling import Call, call, done, refusal  # noqa: F401

SMALL: dict[str, Any] = {"data": "digits", "clients": 10, "model": "mlp:32", "validation": 0.25, "epochs": 2,
                         "engine": "in-process"}  # fmt: skip


def partitioned(x: Any, y: Any, client: Any) -> FederatedData:
    names = tuple(map(str, sorted(set(client))))
    x, y, client = torch.tensor(x, dtype=torch.float32), torch.tensor(y), torch.tensor(client)
    data = Dataset("toy", x, y, ("a", "b"), client=client, client_names=names)
    return federate(data, partition="natural", test=0.0, validation=0.0)


def test_label_skew_is_the_mean_distance_to_everybody() -> None:
    y, client = [0] * 30 + [1] * 30, [0] * 30 + [1] * 30  # each client has one class of two
    skew = measure_skew(partitioned(np.zeros((60, 3)), y, client), 0)
    assert skew.label == pytest.approx(0.5)
    assert skew.label_by_chance < 0.2
    even = measure_skew(partitioned(np.zeros((60, 3)), [0, 1] * 30, client), 0)
    assert even.label == pytest.approx(0)
    assert even.label_by_chance > 0.02


def test_feature_skew_is_the_share_of_variance_that_goes_with_the_client() -> None:
    rng = np.random.default_rng(0)
    client, y = np.repeat(np.arange(10), 200), rng.integers(0, 2, 2000)
    noise = rng.normal(size=(2000, 5))
    assert measure_skew(partitioned(noise, y, client), 0).feature == pytest.approx(0, abs=0.003)
    shift = rng.normal(size=(10, 5))
    shift = (shift - shift.mean(0)) / shift.std(0)  # between clients the variance is 1, within them 1
    assert measure_skew(partitioned(noise + shift[client], y, client), 0).feature == pytest.approx(0.5, abs=0.03)


def candidate(title: str, *accuracies: float, rounds: int = 8) -> Candidate:
    return Candidate(title, make_experiment({}), rounds=rounds, accuracy=dict(enumerate(accuracies)))


def test_the_simplest_that_nothing_beats_is_chosen() -> None:
    many = range(30)
    base = candidate(GLOBAL, *(0.8 for _ in many))
    better = candidate("ditto", *(0.9 + 0.001 * k for k in many))
    near = candidate(ALONE, *(0.906 + 0.001 * k / 2 for k in many))
    assert _decide([better, base])[0] == "ditto"
    assert _decide([better, near, base])[0] == ALONE  # within a point of the best, and simpler
    lucky = candidate("ditto", 1.0, *(0.8 for _ in range(29)))  # one client gains: chance
    assert _decide([lucky, base])[0] == GLOBAL
    little = candidate("ditto", *(0.805 for _ in many))  # everybody gains next to nothing
    title, gain, p = _decide([little, base])
    assert (title, gain) == (GLOBAL, pytest.approx(0.005))
    assert p < 0.01
    assert _decide([base, better])[0] == "ditto"
    thousands = range(4000)  # so clear that p is 0
    clear = [candidate("ditto", *(0.9 for _ in thousands)), candidate(GLOBAL, *(0.5 for _ in thousands))]
    assert _decide(clear)[::2] == ("ditto", 0.0)
    early = candidate("ditto", *(1.0 for _ in many), rounds=4)  # left the race: it does not count
    assert _decide([base, early])[0] == GLOBAL


def test_the_race_halves_and_keeps_the_global_model() -> None:
    advanced: list[tuple[str, int]] = []

    class Fake(Candidate):
        def advance(self, rounds: int, report: Any) -> None:
            advanced.append((self.title, rounds))
            self.rounds = rounds

    quality = {GLOBAL: 0.1, "a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6, "e": 0.5, "f": 0.4, "g": 0.3}
    field = [Fake(title, make_experiment({}), seconds=1.0, accuracy={0: value}) for title, value in quality.items()]
    ranked = _race(field, 160.0, lambda *_: None)  # 8 seconds for a round of all
    assert {rounds for _, rounds in advanced} == {8, 16, 32}
    assert [title for title, rounds in advanced if rounds == 16] == ["a", "b", "c", "d", GLOBAL]
    assert [title for title, rounds in advanced if rounds == 32] == ["a", "b", "c", GLOBAL]
    assert [c.title for c in ranked][:5] == ["a", "b", "c", GLOBAL, "d"]


def test_few_clients_are_judged_by_their_samples() -> None:
    def of_two(title: str, rate: float) -> Candidate:
        return Candidate(title, make_experiment({}), rounds=8, accuracy={0: rate, 1: rate}, n_samples={0: 60, 1: 40})

    title, _, p = _decide([of_two("ditto", 0.9), of_two(GLOBAL, 0.7)])
    assert title == "ditto"
    assert p == pytest.approx(2 * (1 - NormalDist().cdf(0.2 / ((0.09 + 0.21) / 100) ** 0.5)))
    assert _decide([of_two("ditto", 0.75), of_two(GLOBAL, 0.7)])[0] == GLOBAL
    assert _decide([of_two("ditto", 1.0), of_two(GLOBAL, 1.0)])[0] == GLOBAL


@pytest.mark.parametrize(("partition", "needed"), [("iid", False), ("classes:2", True)])
def test_digits(partition: str, needed: bool) -> None:
    experiment = make_experiment({**SMALL, "partition": partition})
    advice = advise(experiment, 0.01, (GLOBAL, TUNED, ALONE, "fedper", "fedrod"))  # the shortest race there is
    assert advice.needed == needed
    assert (advice.chosen == GLOBAL) != needed
    assert (advice.skew.label > 2 * advice.skew.label_by_chance) == needed


def test_advise_speaks_plainly(call: Call) -> None:  # noqa: F811
    words = ("advise", "--clients", 6, "--model", "mlp:16", "--partition", "classes:2", "--epochs", 2, "--workers", 1,
             "--keep-momentum")  # fmt: skip
    race = ("--budget", 1, "--method", "local", "--method", TUNED)
    text = done(call(*words, *race))
    assert "Recommended: a personal model for each client" in text
    assert "Next: fedtailor run " in text
    assert "--partition classes:2" in text
    following = text.partition("Next: fedtailor ")[2].split()
    done(call(*following, "--rounds", 1))  # what it recommends can be run as it stands
    advice = json.loads(done(call(*words, "--budget", 1, "--method", "local", "--json")))
    assert advice["personalization_needed"]
    assert {line["method"] for line in advice["race"]} == {GLOBAL, "local"}
    assert "did you mean 'fedper'" in refusal(call, *words, "--method", "fedpar")
    assert "validation" in refusal(call, *words, "--validation", 0)


def test_numbers_are_no_classes() -> None:
    data = federate(Dataset("r", torch.zeros(40, 2), torch.zeros(40), ()), partition="iid", clients=2)
    with pytest.raises(ft.FedtailorError, match="needs classes"):
        measure_skew(data, 0)

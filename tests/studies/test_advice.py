"""Advice: the skew of partitions with known answers, the rule of decision, and the race itself."""

import json
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data import Dataset, FederatedData, federate
from fedtailor.experiment import make_experiment
from fedtailor.studies.advice import (
    ALONE,
    DRAWS,
    GLOBAL,
    MARGIN,
    MOST,
    RUNGS,
    TUNED,
    Advice,
    Skew,
    _decide,
    _differences,
    _interval,
    _race,
    advise,
    measure_skew,
    sign_flip,
)
from fedtailor.studies.candidate import Candidate
from tests.cli.calling import Call, call, done, refusal  # noqa: F401
from tests.helpers import digits

SMALL: dict[str, Any] = {"data": "digits", "clients": 10, "model": "mlp:32", "validation": 0.25, "epochs": 2,
                         "engine": "in-process"}  # fmt: skip


@pytest.fixture
def to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race of as many rounds as there can be, however fast the machine is."""
    monkeypatch.setattr("fedtailor.studies.advice._first_rung", lambda budget, seconds: MOST // RUNGS[-1])


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
    found = dict(enumerate(accuracies))
    return Candidate(title, make_experiment({}), rounds=rounds, values=found, n_samples=dict.fromkeys(found, 1000))


def test_the_simplest_that_nothing_beats_is_chosen() -> None:
    many = range(30)
    base = candidate(GLOBAL, *(0.8 for _ in many))
    better = candidate("ditto", *(0.9 + 0.001 * k for k in many))
    near = candidate(ALONE, *(0.906 + 0.001 * k / 2 for k in many))
    assert _decide([better, base]).chosen == "ditto"
    assert _decide([better, near, base]).chosen == ALONE  # within a point of the best, and simpler
    little = candidate("ditto", *(0.805 for _ in many))  # everybody gains next to nothing
    decision = _decide([little, base])
    assert (decision.chosen, decision.gain) == (GLOBAL, pytest.approx(0.005))
    assert decision.p < 0.01
    assert _decide([base, better]).chosen == "ditto"
    thousands = range(4000)  # so clear that no draw of the test is as large
    clear = [candidate("ditto", *(0.9 for _ in thousands)), candidate(GLOBAL, *(0.5 for _ in thousands))]
    assert _decide(clear).chosen == "ditto"
    assert _decide(clear).p == 1 / (DRAWS + 1)
    early = candidate("ditto", *(1.0 for _ in many), rounds=4)  # left the race: it does not count
    assert _decide([base, early]).chosen == GLOBAL
    worse = candidate("ditto", *(0.7 + 0.001 * k for k in many))
    assert _decide([base, worse]).chosen == GLOBAL


def test_one_lucky_client_decides_nothing() -> None:
    base = candidate(GLOBAL, *(0.8 for _ in range(30)))
    lucky = candidate("ditto", 1.0, *(0.8 for _ in range(29)))
    decision = _decide([lucky, base])
    assert (decision.chosen, decision.best, decision.p) == (None, "ditto", 1.0)
    assert decision.interval[0] < 0 < MARGIN < decision.interval[1]
    most_lose = candidate("ditto", 1.0, 1.0, *(0.795 for _ in range(28)))  # a test of ranks would find a difference
    assert _decide([most_lose, base]).chosen is None


def test_the_best_of_many_candidates_is_doubted_more_than_one_alone() -> None:
    """Six clients of six gain: p is 2/64 for one candidate, and no finding for the luckiest of four (Holm)."""
    base = candidate(GLOBAL, *(0.5 for _ in range(6)))
    better = candidate("ditto", *(0.6 for _ in range(6)))
    others = [candidate(title, *(0.5 for _ in range(6))) for title in ("apfl", "fedper", "pgfed")]
    assert _decide([better, base]).p == pytest.approx(2 / 64, abs=0.005)
    decision = _decide([better, base, *others])
    assert decision.p == pytest.approx(4 * 2 / 64, abs=0.02)
    assert (decision.chosen, decision.best) == (None, "ditto")


def test_the_race_halves_and_keeps_the_global_model_and_its_best_rival() -> None:
    advanced: list[tuple[str, int]] = []

    class Fake(Candidate):
        def advance(self, rounds: int, report: Any, along: bool = False) -> None:
            advanced.append((self.title, rounds))
            self.rounds = rounds

    quality = {GLOBAL: 0.1, "a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6, "e": 0.5, "f": 0.4, "g": 0.3}
    field = [Fake(title, make_experiment({}), seconds=1.0, values={0: value}) for title, value in quality.items()]
    ranked = _race(field, 160.0, lambda *_: None)  # 8 seconds for a round of all
    assert {rounds for _, rounds in advanced} == {8, 16, 32}
    assert [title for title, rounds in advanced if rounds == 16] == ["a", "b", "c", "d", GLOBAL]
    assert [title for title, rounds in advanced if rounds == 32] == ["a", "b", "c", GLOBAL]
    assert [c.title for c in ranked][:5] == ["a", "b", "c", GLOBAL, "d"]
    two = [Fake(title, make_experiment({}), seconds=1.0, values={0: a}) for title, a in ((GLOBAL, 0.9), ("a", 0.8))]
    assert len({c.rounds for c in _race(two, 160.0, lambda *_: None)}) == 1  # or there would be nothing to test


# --- few clients: the test over samples ---


def of_hits(title: str, *hits: list[int] | np.ndarray) -> Candidate:
    """A candidate that has these validation samples right, client by client."""
    each = {client: np.array(of_client, dtype=float) for client, of_client in enumerate(hits)}
    accuracy = {client: float(of_client.mean()) for client, of_client in each.items()}
    counts = {client: len(of_client) for client, of_client in each.items()}
    return Candidate(title, make_experiment({}), rounds=8, values=accuracy, n_samples=counts, parts=each)


def drawn(rng: np.random.Generator, sizes: list[int], gain: float, loss: float) -> tuple[Candidate, Candidate]:
    """Two candidates that differ on a sample with these probabilities: only the first is right, only the second."""
    u = [rng.random(size) for size in sizes]
    both = [rng.random(size) < 0.7 for size in sizes]
    one = of_hits(
        "ditto", *(np.where(a < gain, 1, np.where(a < gain + loss, 0, b)) for a, b in zip(u, both, strict=True))
    )
    base = of_hits(
        GLOBAL, *(np.where(a < gain, 0, np.where(a < gain + loss, 1, b)) for a, b in zip(u, both, strict=True))
    )
    return one, base


def by_enumeration(one: Candidate, base: Candidate) -> float:
    """The p-value from all signs of all samples that differ, and clients' means computed anew for each."""
    pairs = [(i, int(a), int(b)) for i in one.parts for a, b in zip(one.parts[i], base.parts[i], strict=True)]
    differing = [(i, a - b) for i, a, b in pairs if a != b]

    def gain(signs: tuple[int, ...]) -> float:
        of_client = dict.fromkeys(one.parts, 0.0)
        for sign, (i, difference) in zip(signs, differing, strict=True):
            of_client[i] += sign * difference
        return fmean(total / len(one.parts[i]) for i, total in of_client.items())

    observed = abs(gain((1,) * len(differing)))
    every = [abs(gain(signs)) >= observed - 1e-9 for signs in product((1, -1), repeat=len(differing))]
    return fmean(every)


def test_the_parts_of_a_difference_add_up_to_the_gain_that_is_shown() -> None:
    one, base = drawn(np.random.default_rng(0), [7, 20, 100], 0.2, 0.1)
    assert _differences(one, base).sum() == pytest.approx(one.mean - base.mean, abs=1e-12)
    assert len(_differences(one, base)) == 127
    one.parts.clear()  # as with many clients
    assert _differences(one, base).sum() == pytest.approx(one.mean - base.mean, abs=1e-12)
    assert len(_differences(one, base)) == 3


@pytest.mark.parametrize("seed", range(4))
def test_the_test_is_that_of_all_signs(seed: int) -> None:
    """Clients of different sizes, so that samples weigh differently."""
    rng = np.random.default_rng(seed)
    one, base = drawn(rng, [4, 9, 25], 0.2, 0.05)
    exact = by_enumeration(one, base)
    assert 0 < exact < 1
    found = sign_flip(_differences(one, base), rng, 200_000)
    assert found == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 200_000) ** 0.5 + 1e-5)


def test_one_client_is_mcnemars_test() -> None:
    from scipy import stats

    one, base = of_hits("ditto", [1] * 12 + [0] * 3 + [1] * 40), of_hits(GLOBAL, [0] * 12 + [1] * 3 + [1] * 40)
    found = sign_flip(_differences(one, base), np.random.default_rng(0), 200_000)
    assert found == pytest.approx(stats.binomtest(12, 15).pvalue, abs=0.002)


def test_samples_of_a_small_client_weigh_more_as_they_do_in_the_mean() -> None:
    """A client of 10 samples gains four, one of 200 loses four: the mean over clients gains 19 points. Over pooled
    samples it is nothing."""
    one = of_hits("ditto", [1] * 10, [1] * 196 + [0] * 4)
    base = of_hits(GLOBAL, [1] * 6 + [0] * 4, [1] * 200)
    assert one.mean - base.mean == pytest.approx(0.19)
    p = sign_flip(_differences(one, base), np.random.default_rng(0))
    assert p == pytest.approx(2 / 2**4, abs=0.01)  # those of the large client hardly move the mean


@pytest.mark.parametrize("sizes", [[46, 47, 46, 46], [10, 20, 60, 95]])
def test_the_level_and_the_power(sizes: list[int]) -> None:
    """185 samples: equal candidates rarely differ significantly, better ones mostly, and intervals cover the gain."""
    rng, trials = np.random.default_rng(1), 1000

    def of_trials(gain: float, loss: float) -> tuple[float, float]:
        found, covered = 0, 0
        for _ in range(trials):
            one, base = drawn(rng, sizes, gain, loss)
            p = sign_flip(_differences(one, base), rng, 999)
            low, high = _interval(one, base, p)
            found, covered = found + (p < 0.05), covered + (low <= gain - loss <= high)
            assert (low <= 0 <= high) == (p >= 0.05) or 0 in (low, high)
        return found / trials, covered / trials

    error = 3 * (0.05 * 0.95 / trials) ** 0.5
    for equal in (0.01, 0.05, 0.15):
        level, coverage = of_trials(equal, equal)
        assert level <= 0.05 + error
        assert coverage >= 0.95 - error
    assert level >= 0.05 - error  # 55 samples that differ: hardly coarser than the level
    power, coverage = of_trials(0.15, 0.02)
    assert power > 0.9
    assert coverage >= 0.95 - error


def test_what_the_samples_cannot_tell_is_not_decided() -> None:
    """Nine of ten samples that differ are gains: a test of unpaired samples saw nothing in such cases."""
    sizes, plus, minus = [46, 46, 46, 46], [3, 2, 2, 2], [0, 1, 0, 0]
    one = of_hits("ditto", *([1] * a + [0] * b + [1] * (n - a - b) for n, a, b in zip(sizes, plus, minus, strict=True)))
    base = of_hits(GLOBAL, *([0] * a + [1] * b + [1] * (n - a - b) for n, a, b in zip(sizes, plus, minus, strict=True)))
    alone = _decide([one, base])
    assert (alone.chosen, alone.best) == ("ditto", "ditto")
    assert alone.p == pytest.approx(22 / 1024, abs=0.005)
    rivals = [of_hits(title, *one.parts.values()) for title in ("fedrep", "apfl")]
    decision = _decide([one, *rivals, base])  # of three candidates, the best may be so good by chance
    assert decision.chosen is None
    assert decision.p == pytest.approx(66 / 1024, abs=0.01)
    assert decision.interval[0] <= 0 < MARGIN < decision.interval[1]
    assert decision.gain == pytest.approx(fmean((a - b) / n for n, a, b in zip(sizes, plus, minus, strict=True)))


def test_samples_that_all_agree_prove_little_if_they_are_few() -> None:
    def agreeing(size: int) -> tuple[Candidate, Candidate]:
        return of_hits("ditto", [1] * size, [1] * size), of_hits(GLOBAL, [1] * size, [1] * size)

    few, many = _decide([*agreeing(20)]), _decide([*agreeing(2000)])
    assert (few.chosen, few.gain, few.p) == (None, 0.0, 1.0)
    assert (many.chosen, many.gain, many.p) == (GLOBAL, 0.0, 1.0)
    assert _decide([of_hits("ditto", [1]), of_hits(GLOBAL, [0])]).chosen is None
    assert _decide([of_hits(GLOBAL, [1])]).chosen == GLOBAL  # nothing else was in the race


def test_the_samples_that_are_right_are_those_of_the_recorded_accuracy() -> None:
    """For personal, shared and fine-tuned models, and for heads with labels of the client's own."""
    shortlist = (GLOBAL, TUNED, ALONE, "fedper", "pgfed")
    settings = {**SMALL, "clients": 4, "partition": "classes:2", "model": "mlp:16"}
    own = {"labels": "own", "partition": "dirichlet:0.1", "lr": 0.001}  # heads with outputs that do not count
    for experiment in (make_experiment(settings), make_experiment({**settings, **own})):
        looked_at = [c for c in advise(experiment, 0.01, shortlist).candidates if c.parts]
        assert len(looked_at) > 1
        for of_race in looked_at:
            assert {i: float(hits.mean()) for i, hits in of_race.parts.items()} == of_race.values
            assert {i: len(hits) for i, hits in of_race.parts.items()} == of_race.n_samples


@pytest.mark.usefixtures("to_the_end")
@pytest.mark.parametrize(
    ("partition", "needed", "changes"),
    [  # It takes more to show no difference.
        ("iid", False, {"clients": 5, "validation": 0.6, "test": 0.05, "stratify": False, "lr": 0.1}),
        ("classes:2", True, {}),
    ],
)
def test_digits(partition: str, needed: bool, changes: dict[str, Any]) -> None:
    experiment = make_experiment({**SMALL, "partition": partition, **changes})
    advice = advise(experiment, 0.01, (GLOBAL, TUNED, ALONE))
    assert advice.needed == needed
    assert (advice.chosen == GLOBAL) != needed
    assert (advice.skew.label > 2 * advice.skew.label_by_chance) == needed


@pytest.mark.usefixtures("to_the_end")
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


@pytest.mark.usefixtures("to_the_end")
def test_advise_says_when_the_samples_cannot_tell(call: Call) -> None:  # noqa: F811
    words = ("advise", "--clients", 4, "--partition", "iid", "--model", "mlp:16", "--epochs", 2, "--workers", 1,
             "--validation", 0.02, "--budget", 1, "--method", TUNED)  # fmt: skip
    text = " ".join(done(call(*words)).split())
    assert (
        "Not decided: can't tell with 36 validation samples whether personal models pay. The best personal candidate"
        in text
    )
    assert "Give more validation samples (--validation 0.4) or more clients." in text
    assert "Recommended" not in text
    following = text.partition("Next: fedtailor ")[2]
    assert following.startswith("advise ")
    assert following.endswith(
        "--validation 0.4 --model mlp:16 --epochs 2 --workers 1 --budget 1 --method '" + TUNED + "'"
    )
    advice = json.loads(done(call(*words, "--json")))
    assert (advice["decided"], advice["recommended"], advice["personalization_needed"]) == (False, None, None)
    assert advice["interval"][0] <= 0 <= 0.01 < advice["interval"][1]
    assert (advice["best_personal"], advice["validation_samples"]) == (TUNED, 36)


def test_the_words_of_each_answer() -> None:
    from fedtailor.cli.advise import command
    from fedtailor.studies.advice import sentences

    def answer(chosen: str | None, gain: float, **settings: Any) -> Advice:
        race = [candidate("ditto", 0.8 + gain), candidate(GLOBAL, 0.8)]
        race[0].experiment = make_experiment(settings)
        interval = (gain - 0.058, gain + 0.058)
        return Advice(Skew(0.1, 0.1, 0.0), race, chosen, "ditto", gain, 0.11, interval, {}, False, None, 1.0)

    def said(chosen: str | None, gain: float) -> str:
        return sentences(answer(chosen, gain))[-1]

    gain = "+4.8 points against one model for all, 95 % interval -1.0 … +10.6, p = 0.11"
    assert said(None, 0.048).partition("pay. ")[2].startswith(f"The best personal candidate is ditto ({gain}). Best so")
    assert "Best so far: fedavg." in said(None, -0.01)
    much = answer(None, 0.048, validation=0.4)  # to validate with more would leave too little to train with
    assert sentences(much)[-1].endswith("Give more samples or more clients.")
    assert command(much, {}, {}) is None
    assert (
        said("ditto", 0.048)
        == f"Recommended: a personal model for each client, by ditto. Personal models pay ({gain})."
    )
    assert (
        said("fedper", 0.048) == "Recommended: a personal model for each client, by fedper. Personal models pay "
        f"(ditto {gain}), and fedper is the simplest within a point of the best."
    )
    assert f"No personal model is better by a point. The best is ditto ({gain})." in said(GLOBAL, 0.048)

    early = answer(None, 0.048)
    early.rising, early.unfinished, early.budget = {GLOBAL: 0.031, "ditto": 0.02}, True, 250
    assert sentences(early)[-1] == (
        "Not decided: still learning after 8 rounds (fedavg +3.1, ditto +2.0 points in the last 4 rounds). A budget of "
        "250 seconds (100 rounds) would tell, with more validation samples (--validation 0.4) or more clients. The "
        f"best personal candidate is ditto ({gain}). Best so far: ditto."
    )
    assert command(early, {}, {"budget": 90.0}) == "fedtailor advise --budget 250 --validation 0.4"
    early.p = 0.01  # there are enough samples
    assert "(100 rounds) would tell. The best" in sentences(early)[-1]
    assert command(early, {}, {"budget": 90.0}) == "fedtailor advise --budget 250"
    late = answer("ditto", 0.048)
    late.rising = {GLOBAL: 0.012}
    rises = "Still learning: fedavg +1.2 points in the last 4 rounds. "
    assert sentences(late)[-2] == rises + "To go on at this pace would not change the answer."
    late.candidates[0].rounds = MOST
    assert sentences(late)[-2].endswith("in the last 50 rounds. The answer is for runs of 100 rounds.")


def test_advice_on_clients_that_are_objects() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    advice = ft.advise(
        data=digits([40, 50, 60]), model=network, methods=["local"], budget=0.1, epochs=1, engine="in-process"
    )
    assert advice.n_samples == 30
    assert advice.decided == (advice.chosen is not None)


def test_the_skew_of_numbers_is_the_share_of_their_variance_between_clients() -> None:
    constant = federate(Dataset("r", torch.zeros(40, 2), torch.zeros(40), ()), partition="iid", clients=2)
    assert measure_skew(constant, 0).label == 0.0
    owner = torch.arange(40) % 2
    y = 3.0 * owner + torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(10)  # variance 9/4 between clients, 1 within
    apart = Dataset("r", torch.zeros(40, 2), y, (), client=owner, client_names=("a", "b"))
    found = measure_skew(federate(apart, partition="natural", test=0, validation=0), 0)
    assert found.label == pytest.approx(2.25 / 3.25)
    assert found.label_by_chance < 0.2
    assert found.targets == "numbers"


def test_the_skew_of_several_labels_is_the_mean_distance_of_their_shares() -> None:
    owner = torch.arange(40) % 2
    y = torch.stack([owner.float(), torch.ones(40), (torch.arange(40) % 4 < 2).float()], dim=1)
    data = Dataset("m", torch.zeros(40, 2), y, ("a", "b", "c"), client=owner, client_names=("a", "b"))
    found = measure_skew(federate(data, partition="natural", test=0, validation=0), 0)
    assert found.label == pytest.approx(0.5 / 3)  # the first label is one client's alone
    assert found.targets == "labels"

"""The table of a comparison: every number by hand, on made-up runs and on real ones."""

import csv
import io
import json
import re
from itertools import count
from pathlib import Path
from statistics import fmean

import pytest

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.methods import CATALOGUE
from fedtailor.reporting.tables import (
    Line,
    Summary,
    check_comparable,
    comma_separated,
    latex,
    markdown,
    plain_text,
    summarize,
    write_tables,
)
from fedtailor.studies.client_results import client_table
from fedtailor.studies.measures import holm, paired, wilcoxon
from tests.reporting.made_up import made_up

SMALL = {"data": "digits", "clients": 6, "rounds": 3, "model": "mlp:16", "engine": "in-process"}


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """Local, FedAvg and Ditto with two seeds, four clients and three rounds; the target is 70 %."""
    local = ([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]], [0.5, 0.6, 0.7, 0.8], [0.6, 0.6, 0.6, 0.6])
    fedavg = ([[0.7, 0.7, 0.7, 0.7], [0.1, 0.1, 0.1, 0.1]], [0.7, 0.7, 0.7, 0.7], [0.7, 0.7, 0.7, 0.7])
    ditto = ([[0.6, 0.6, 0.6, 0.6], [0.7, 0.7, 0.7, 0.7]], [0.6, 0.6, 0.9, 0.9], [0.5, 0.7, 0.8, 0.8])
    results = []
    for name, (before, *last) in (("local", local), ("fedavg", fedavg), ("ditto", ditto)):
        for seed in (0, 1):
            rounds = [*before, last[seed]] if seed == 0 else [before[0], before[0], last[seed]]
            results.append(made_up(tmp_path / f"{name}{seed}", name, rounds, seed))
    return summarize(results, target=0.7)


def of(summary: Summary, title: str) -> Line:
    return next(line for line in summary.lines if line.title == title)


class TestNumbers:
    def test_accuracy_is_the_mean_over_seeds_with_the_deviation_of_a_sample(self, summary: Summary) -> None:
        ditto = of(summary, "ditto")
        assert ditto.accuracy == pytest.approx((0.75 + 0.7) / 2)
        assert ditto.accuracy_std == pytest.approx(0.0353553, abs=1e-6)  # √(2 · 0.025²), with n - 1
        assert ditto.seeds == (0, 1)

    def test_the_gain_over_local_is_over_clients_and_then_over_seeds(self, summary: Summary) -> None:
        ditto = of(summary, "ditto")  # gains 0.1, 0, 0.2, 0.1 with seed 0 and -0.1, 0.1, 0.2, 0.2 with seed 1
        assert summary.base == "local"
        assert ditto.gain == pytest.approx(0.1)
        assert ditto.gain_std == pytest.approx((0.0707107 + 0.1224745) / 2, abs=1e-6)
        assert (ditto.losing, ditto.clients) == (0.5, 4)
        assert of(summary, "local").gain is None

    def test_the_worst_decile_is_averaged_over_seeds(self, summary: Summary) -> None:
        assert of(summary, "ditto").worst_decile == pytest.approx((0.6 + 0.5) / 2)

    def test_rounds_and_bytes_to_the_target_and_the_speed_up(self, summary: Summary) -> None:
        fedavg, ditto = of(summary, "fedavg"), of(summary, "ditto")
        assert fedavg.rounds_to_target == 1  # the first round that is there, though a later one is not
        assert ditto.rounds_to_target == (2 + 3) / 2
        assert ditto.bytes_to_target == 150 * 2.5
        assert (fedavg.speed_up, ditto.speed_up) == (2.5, 1)
        assert of(summary, "local").rounds_to_target is None
        assert of(summary, "local").speed_up is None
        assert ditto.bytes == 450

    def test_samples_per_second_are_those_of_the_local_epochs(self, summary: Summary) -> None:
        assert of(summary, "ditto").samples_per_second == 4 * 20 * 5 / 0.5

    def test_steps_in_place_of_epochs(self, tmp_path: Path) -> None:
        result = made_up(tmp_path / "a", "fedavg", [[0.5, 0.5]], steps=3, batch=8)
        assert summarize([result]).lines[0].samples_per_second == 2 * 3 * 8 / 0.5

    def test_the_target_is_what_the_worst_run_reaches_in_whole_percents(self, tmp_path: Path) -> None:
        one = made_up(tmp_path / "a", "fedavg", [[0.6], [0.29]], seed=0)  # 100 · 0.29 is 28.999999999999996
        other = made_up(tmp_path / "b", "ditto", [[0.3], [0.999]], seed=0)
        assert summarize([one, other]).target == 0.29

    def test_best_and_second_are_by_the_mean_and_equals_share_a_place(self, tmp_path: Path) -> None:
        values = {"local": 0.9, "fedavg": 0.9, "ditto": 0.8, "fedper": 0.7}
        made = summarize([made_up(tmp_path / name, name, [[value]]) for name, value in values.items()])
        assert [line.best for line in made.lines] == [True, True, False, False]
        assert [line.second for line in made.lines] == [False, False, True, False]

    def test_one_seed_has_no_deviation_and_one_line_no_rank(self, tmp_path: Path) -> None:
        line = summarize([made_up(tmp_path / "a", "ditto", [[0.5, 0.9]])]).lines[0]
        assert (line.accuracy_std, line.best, line.p, line.gain) == (None, False, None, None)

    def test_the_last_ten_rounds_count_for_every_client_where_they_are_the_result(self, tmp_path: Path) -> None:
        rounds = [[0.0, 0.0], *([[0.5, 0.7], [0.7, 0.9]] * 5)]
        how = {"evaluation": {"choose": "last-10"}}
        base = made_up(tmp_path / "l", "local", [[0.6, 0.6]] * 11, **how)
        line = summarize([made_up(tmp_path / "d", "ditto", rounds, **how), base]).lines[0]
        assert line.accuracy == pytest.approx(0.7)
        assert line.gain == pytest.approx(0.1)
        assert line.gain_std == pytest.approx(0.1)

    def test_clients_without_test_samples_are_left_out(self, tmp_path: Path) -> None:
        base = made_up(tmp_path / "l", "local", [[0.5, None, 0.5]])
        line = summarize([made_up(tmp_path / "d", "ditto", [[0.6, None, 0.4]]), base]).lines[0]
        assert (line.gain, line.losing, line.clients) == (pytest.approx(0), 1, 2)

    def test_real_runs(self, tmp_path: Path) -> None:
        results = [
            ft.run(method, **SMALL, seed=seed, out=tmp_path / f"{method}{seed}")
            for method in ("local", "ditto")
            for seed in (0, 1)
        ]
        made = summarize(results)
        line = of(made, "ditto")
        assert line.accuracy == pytest.approx(fmean(result.accuracy or 0 for result in results[2:]))
        gains = [
            results[2 + seed].per_client[client].accuracy - results[seed].per_client[client].accuracy
            for seed in (0, 1)
            for client in range(6)
        ]
        assert line.gain == pytest.approx(fmean(gains))
        assert line.losing == sum(gain < 0 for gain in gains) / 2
        assert line.bytes == sum(record.bytes_up + record.bytes_down for record in results[2].rounds)
        inside = summarize([ft.run("ditto", **SMALL)]).lines[0]  # a run that is nowhere on disk
        assert inside.accuracy == results[2].accuracy
        assert (inside.samples_per_second or 0) > 0


class TestLines:
    def test_parameters_and_settings_that_differ_are_in_the_title(self, tmp_path: Path) -> None:
        number = count()

        def run(method: str, lr: float, **parameters: float) -> ft.RunResult:
            return made_up(tmp_path / str(next(number)), method, [[0.5]], lr=lr, parameters=parameters)

        made = summarize([run("fedavg", 0.1), run("ditto", 0.1, lam=2), run("ditto", 0.01, lam=0.5)])
        assert [line.title for line in made.lines] == [
            "fedavg, lr=0.1",
            "ditto, lam=2, lr=0.1",
            "ditto, lam=0.5, lr=0.01",
        ]
        same = summarize([run("fedavg", 0.1), run("ditto", 0.1, lam=2), run("fedprox", 0.1)])
        assert [line.title for line in same.lines] == ["fedavg", "ditto", "fedprox"]

    def test_where_it_was_computed_makes_no_line(self, tmp_path: Path) -> None:
        one = made_up(tmp_path / "a", "ditto", [[0.5]], workers=1, checkpoint_every=1)
        other = made_up(tmp_path / "b", "ditto", [[0.7]], seed=1, workers=2, states="disk")
        made = summarize([one, other])
        assert [line.seeds for line in made.lines] == [(0, 1)]

    def test_fine_tuning_makes_another_line(self, tmp_path: Path) -> None:
        plain = made_up(tmp_path / "a", "fedavg", [[0.5]])
        tuned = made_up(tmp_path / "b", "fedavg", [[0.7]], evaluation={"fine_tune": 5})
        made = summarize([plain, tuned])
        assert [line.title for line in made.lines] == ["fedavg, fine_tune=0", "fedavg, fine_tune=5"]
        assert "fine-tuned for" not in made.caption
        assert "fine-tuned for 5 epochs" in summarize([tuned]).caption

    def test_of_equal_runs_the_longest_counts(self, tmp_path: Path) -> None:
        short = made_up(tmp_path / "a", "ditto", [[0.5]], rounds=2)
        whole = made_up(tmp_path / "b", "ditto", [[0.5], [0.7]])
        for results in ([short, whole], [whole, short]):
            assert summarize(results).lines[0].results == (whole,)

    def test_gains_are_over_the_best_local_where_there_are_several(self, tmp_path: Path) -> None:
        values = {0.1: 0.6, 0.01: 0.4}
        results = [made_up(tmp_path / f"l{lr}", "local", [[value]], lr=lr) for lr, value in values.items()]
        results += [made_up(tmp_path / f"d{lr}", "ditto", [[0.7]], lr=lr) for lr in values]
        made = summarize(results)
        assert made.base == "local, lr=0.1"
        assert [line.gain for line in made.lines] == [None, pytest.approx(-0.2), *[pytest.approx(0.1)] * 2]

    def test_of_several_lines_validation_chooses_and_test_does_not(self, tmp_path: Path) -> None:
        """The rates that are better on test data are worse on validation data."""
        chosen = {("local", 0.1): (0.5, 0.9), ("local", 0.01): (0.6, 0.8), ("ditto", 0.1): (0.9, 0.6)}
        chosen |= {("ditto", 0.01): (0.7, 0.7), ("fedavg", 0.1): (0.65, 0.5)}
        results = [
            made_up(tmp_path / f"{method}{lr}", method, [[test, test]], lr=lr, validation_accuracy=validation)
            for (method, lr), (test, validation) in chosen.items()
        ]
        made = summarize(results)
        assert [line.chosen for line in made.lines] == [True, False, False, True, None]
        assert made.base == "local, lr=0.1"
        assert made.best is not None
        assert made.best.title == "ditto, lr=0.01"
        assert [line.second for line in made.lines] == [False, False, False, False, True]
        assert [line.p is None for line in made.lines] == [False, True, True, True, False]
        assert "Holm for 2 comparisons" in made.caption
        assert "✓: the line of its method that validation data choose; only chosen lines are ranked" in made.caption
        lines = [line for line in markdown(made).splitlines() if line.startswith("|")][2:]
        rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
        assert [row[2] for row in rows] == ["90.00 ✓", "80.00", "60.00", "70.00 ✓", "50.00"]
        assert [row[1] for row in rows] == ["50.00", "60.00", "90.00", "**70.00**", "<u>65.00</u>"]
        assert r"70.00 $\surd$" in latex(made)

    def test_the_choice_is_in_csv_and_json_too(self, tmp_path: Path) -> None:
        for lr, test, validation in ((0.1, 0.9, 0.6), (0.01, 0.7, 0.8)):
            made_up(tmp_path / f"{lr}", "ditto", [[test, test]], lr=lr, validation_accuracy=validation)
        results = [ft.load(tmp_path / lr) for lr in ("0.1", "0.01")]
        made = summarize([*results, made_up(tmp_path / "l", "local", [[0.5, 0.5]], lr=0.1, validation_accuracy=0.5)])
        write_tables(made, tmp_path)
        rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
        assert [(row["chosen"], row["validation"]) for row in rows] == [("False", "0.6"), ("True", "0.8"), ("", "0.5")]
        lines = json.loads((tmp_path / "result.json").read_text())["lines"]
        assert [line["chosen"] for line in lines] == [False, True, None]
        assert [line["best"] for line in lines] == [False, True, False]

    def test_validation_is_the_mean_over_seeds(self, tmp_path: Path) -> None:
        """The rate that is best with one seed is not the best on average."""
        values = {0.1: (0.9, 0.1), 0.01: (0.6, 0.6)}
        made = summarize(
            [
                made_up(tmp_path / f"{lr}-{seed}", "ditto", [[0.5]], seed, lr=lr, validation_accuracy=of_seed[seed])
                for lr, of_seed in values.items()
                for seed in (0, 1)
            ]
        )
        assert [line.validation for line in made.lines] == [pytest.approx(0.5), pytest.approx(0.6)]
        assert [line.chosen for line in made.lines] == [False, True]

    def test_without_validation_data_nothing_is_chosen_and_test_data_do_not_stand_in(self, tmp_path: Path) -> None:
        values = {("local", 0.1): 0.5, ("fedavg", 0.1): 0.6, ("ditto", 0.1): 0.9, ("ditto", 0.01): 0.7}
        results = [
            made_up(tmp_path / f"{method}{lr}", method, [[test, test]], lr=lr) for (method, lr), test in values.items()
        ]
        made = summarize(results)
        assert [line.chosen for line in made.lines] == [None, None, False, False]
        assert [line.best for line in made.lines] == [False, True, False, False]
        assert [line.p is None for line in made.lines] == [False, True, True, True]
        assert "Without validation data, none of the lines of Ditto is chosen: they are not ranked" in made.caption
        assert "✓" not in markdown(made)
        assert "validation |" not in markdown(made)
        clients = client_table(made)
        assert [row.best for row in clients.rows] == [(False, True, False, False)] * 2
        assert "Best in general: FedAvg, lr=0.1 (60.00)." in clients.caption
        for few in (results[1:], results[2:]):  # nothing is left to be better than
            assert [line.best for line in summarize(few).lines] == [False] * len(few)
            assert "Best in general" not in client_table(summarize(few)).caption

    def test_a_line_without_a_validation_value_is_not_chosen(self, tmp_path: Path) -> None:
        """Its metrics were not finite, say."""
        results = [made_up(tmp_path / "a", "ditto", [[0.9]], lr=0.1)]
        results += [made_up(tmp_path / "b", "ditto", [[0.7]], lr=0.01, validation_accuracy=0.6)]
        assert [line.chosen for line in summarize(results).lines] == [False, True]

    def test_clients_are_best_with_chosen_lines_only(self, tmp_path: Path) -> None:
        values = {("local", 0.1): (0.5, 0.9), ("ditto", 0.1): (0.9, 0.6), ("ditto", 0.01): (0.7, 0.7)}
        made = client_table(
            summarize(
                [
                    made_up(tmp_path / f"{method}{lr}", method, [[test]], lr=lr, validation_accuracy=validation)
                    for (method, lr), (test, validation) in values.items()
                ]
            )
        )
        assert made.rows[0].best == (False, False, True)
        assert "Best in general: Ditto, lr=0.01 (70.00)." in made.caption

    def test_with_and_without_fine_tuning_is_no_choice_of_settings(self, tmp_path: Path) -> None:
        results = [
            made_up(tmp_path / f"{n}", "fedavg", [[0.5]], validation_accuracy=0.5 + n / 10, evaluation={"fine_tune": n})
            for n in (0, 1)
        ]
        assert [line.chosen for line in summarize(results).lines] == [None, None]

    def test_lines_with_other_seeds_are_compared_on_the_common_ones(self, tmp_path: Path) -> None:
        local = [made_up(tmp_path / f"l{seed}", "local", [[0.5]], seed) for seed in (0, 1)]
        ditto = [made_up(tmp_path / f"d{seed}", "ditto", [[0.4 + 0.2 * seed]], seed) for seed in (1, 2)]
        made = summarize([*local, *ditto])
        assert of(made, "ditto").gain == pytest.approx(0.1)  # of seed 1
        assert "Lines differ in their seeds" in made.caption

    def test_an_unfinished_run_is_named(self, tmp_path: Path) -> None:
        made = summarize([made_up(tmp_path / "a", "ditto", [[0.5]], rounds=9)])
        assert not made.lines[0].finished
        assert "Not finished: Ditto." in made.caption


class TestSignificance:
    def test_wilcoxon_by_hand(self) -> None:
        zero = dict.fromkeys(range(6), 0.0)
        assert wilcoxon({c: 0.01 * (c + 1) for c in zero}, zero) == pytest.approx(2 / 2**6)  # all of one sign
        assert wilcoxon(dict.fromkeys(zero, 0.1), zero) == pytest.approx(2 / 2**6)  # ties are counted exactly
        # Ranks 1 … 6, of which only rank 1 is negative: 2 of 64 signs are as far on either side.
        assert wilcoxon({c: (-0.01 if c == 0 else 0.01) * (c + 1) for c in zero}, zero) == pytest.approx(4 / 2**6)

    def test_clients_without_a_difference_do_not_count(self) -> None:
        zero = dict.fromkeys(range(9), 0.0)
        assert wilcoxon(zero, zero) == 1.0
        six = {c: 0.01 * (c + 1) if c < 6 else 0.0 for c in zero}
        assert wilcoxon(six, zero) == pytest.approx(2 / 2**6)
        noise = {c: 0.1 + 0.2 if c < 3 else 0.3 for c in zero}  # 0.30000000000000004 is 0.3
        assert wilcoxon(noise, dict.fromkeys(zero, 0.3)) == 1.0
        assert wilcoxon({1: 0.5}, {2: 0.5}) is None

    def test_holm_by_hand(self) -> None:
        assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
        assert holm([0.04, 0.001, 0.9, 0.6]) == pytest.approx([0.12, 0.004, 1.0, 1.0])
        assert holm([]) == []

    def test_lines_are_tested_against_the_best_and_corrected(self, tmp_path: Path) -> None:
        best = [0.5 + 0.01 * client for client in range(12)]
        worse = [accuracy - 0.001 * (client + 1) for client, accuracy in enumerate(best)]
        alike = [accuracy + (-0.001 if client % 2 else 0.0011) * (client + 1) for client, accuracy in enumerate(best)]
        runs = {"fedavg": worse, "ditto": best, "fedper": alike}
        made = summarize([made_up(tmp_path / name, name, [values]) for name, values in runs.items()])
        assert of(made, "fedavg").p == pytest.approx(2 * 2 / 2**12)  # the least of two, doubled
        assert not of(made, "fedavg").like_best
        assert (of(made, "fedper").p or 0) > 0.5
        assert of(made, "fedper").like_best
        assert of(made, "ditto").best
        assert of(made, "ditto").p is None
        assert "over 12 clients" in made.caption
        assert "Holm for 2 comparisons" in made.caption
        assert "cannot find any" not in made.caption

    def test_clients_are_averaged_over_seeds_before_the_test(self, tmp_path: Path) -> None:
        """Two clients cannot show anything, with however many seeds."""
        results = [made_up(tmp_path / f"a{seed}", "fedavg", [[0.5, 0.6]], seed) for seed in range(8)]
        results += [made_up(tmp_path / f"b{seed}", "ditto", [[0.7, 0.9]], seed) for seed in range(8)]
        made = summarize(results)
        assert of(made, "fedavg").p == pytest.approx(0.5)
        assert "With 2 clients, this test cannot find any." in made.caption

    def test_clients_are_paired_seed_by_seed(self, tmp_path: Path) -> None:
        """Ditto is better by a little with every seed: beside another seed's values it would be worse with some."""
        by_chance = {0: 0.2, 1: 0.6}
        results = [
            made_up(tmp_path / f"{method}{seed}", method, [[0.1 + level + gain + 0.01 * c for c in range(6)]], seed)
            for method, gain in (("fedavg", 0.0), ("ditto", 0.01))
            for seed, level in by_chance.items()
            if (method, seed) != ("ditto", 0)
        ]
        assert of(summarize(results), "fedavg").p == pytest.approx(2 / 2**6)
        fedavg, ditto = paired([r for r in results if r.experiment.method == "fedavg"], results[-1:])
        assert ditto[0] - fedavg[0] == pytest.approx(0.01)

    def test_equal_lines_do_not_differ(self, tmp_path: Path) -> None:
        made = summarize([made_up(tmp_path / name, name, [[0.5, 0.7]]) for name in ("fedavg", "ditto")])
        assert {line.p for line in made.lines} == {None, 1.0}


class TestComparable:
    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"data": "synthetic", "fingerprint": "x"}, 'data is "digits" in {a} and "synthetic" in {b}'),
            ({"partition": "iid", "fingerprint": "x"}, 'partition is the default in {a} and "iid" in {b}'),
            ({"test": 0.3, "fingerprint": "x"}, "test is 0.2 in {a} and 0.3 in {b}"),
            ({"fingerprint": "x"}, "the samples themselves are others in {a} than in {b}"),
            ({"evaluation": {"choose": "best-test"}}, 'evaluation.choose is "last" in {a} and "best-test" in {b}'),
            ({"evaluation": {"model": "local"}}, 'evaluation.model is "personal" in {a} and "local" in {b}'),
            ({"seed": 1, "test": 0.3}, "test is 0.2 in {a} and 0.3 in {b}"),
        ],
    )
    def test_another_question_is_refused_by_name(self, tmp_path: Path, settings: dict, said: str) -> None:
        one = made_up(tmp_path / "a", "fedavg", [[0.5, 0.6]])
        other = made_up(tmp_path / "b", "ditto", [[0.5, 0.6]], **settings)
        sentence = f"These runs cannot be compared: {said.format(a=one.path, b=other.path)}."
        for check in (check_comparable, summarize):
            with pytest.raises(FedtailorError) as error:
                check([one, other])
            assert str(error.value) == sentence

    def test_other_clients_are_refused_by_name(self, tmp_path: Path) -> None:
        one = made_up(tmp_path / "a", "fedavg", [[0.5, 0.6]])
        other = made_up(tmp_path / "b", "ditto", [[0.5, 0.6, 0.7]], seed=1)
        with pytest.raises(FedtailorError, match=r"clients is 2 in .*a and 3 in .*b\."):
            check_comparable([one, other])

    def test_the_same_samples_by_other_words_are_comparable(self, tmp_path: Path) -> None:
        one = made_up(tmp_path / "a", "fedavg", [[0.5, 0.6]])
        other = made_up(tmp_path / "b", "ditto", [[0.5, 0.6]], clients=2, partition="dirichlet:0.3", data_dir="there")
        check_comparable([one, other])

    def test_real_runs_on_other_data(self, tmp_path: Path) -> None:
        one = ft.run("local", **SMALL)
        other = ft.run("local", **{**SMALL, "partition": "classes:2"})
        with pytest.raises(FedtailorError, match=r'partition is the default in local with seed 0 and "classes:2" in'):
            check_comparable([one, other])

    def test_nothing_and_a_wrong_target(self, tmp_path: Path) -> None:
        with pytest.raises(FedtailorError, match="no run"):
            summarize([])
        with pytest.raises(FedtailorError, match="90, but it must be above 0 and at most 1"):
            summarize([made_up(tmp_path / "a", "fedavg", [[0.5]])], target=90)


class TestFormats:
    def test_methods_are_called_as_their_papers_call_them_and_records_keep_their_names(self, tmp_path: Path) -> None:
        names = {"lg-fedavg": "LG-FedAvg", "per-fedavg": "Per-FedAvg", "pfedme": "pFedMe", "pfedmb": "pFedMB",
                 "pgfedmo": "PGFedMo", "pgfed-ce": "PGFed-CE", "fedrod": "FedRoD", "a:Mine": "Mine"}  # fmt: skip
        made = summarize([made_up(tmp_path / str(n), name, [[0.5]]) for n, name in enumerate(names)])
        assert [line.label for line in made.lines] == list(names.values())
        assert [line["title"] for line in made.plain()["lines"]] == list(names)
        assert [row["method"] for row in csv.DictReader(io.StringIO(comma_separated(made)))] == list(names)
        twins = [made_up(tmp_path / name[0], name, [[0.5]]) for name in ("b:Mine", "c:Mine")]
        assert [line.label for line in summarize(twins).lines] == ["b:Mine", "c:Mine"]

    def test_a_variant_has_a_title_of_its_own(self) -> None:
        class Variant(CATALOGUE["pgfed-ce"]):  # type: ignore[misc]
            pass

        assert (Variant.title, Variant.name) == ("Variant", "pgfed-ce")

    def test_chosen_columns_in_their_order(self, summary: Summary) -> None:
        head, _, *rows = [line for line in markdown(summary, ["loss", "metric", "losing"]).splitlines() if "|" in line]
        assert head == "| method | loss | accuracy | clients that lose |"
        assert rows[2] == "| Ditto | 0.3333 ± 0.0000 | **72.50 ± 3.54** | 0.5 of 4 |"
        assert plain_text(summary, ["accuracy"]) == plain_text(summary, ["metric", "auc"])  # no run has an AUC
        with pytest.raises(FedtailorError, match="did you mean 'worst-decile'"):
            latex(summary, ["worst_decile"])

    def test_text_has_all_columns_and_no_colours(self, summary: Summary) -> None:
        text = plain_text(summary)
        assert "\x1b" not in text
        row = next(line for line in text.splitlines() if line.strip().startswith("Ditto"))
        cells = "Ditto 72.50 ± 3.54 best +10.00 ± 9.66 0.5 of 4 55.00 2.5 ± 0.7 1× 375 B 450 B 800"
        assert " ".join(row.split()) == cells
        local = next(line for line in text.splitlines() if line.strip().startswith("Local"))
        assert "> 3" in local
        words = " ".join(text.split())
        assert "Test accuracy in % of personal models, all clients, mean over clients, last round." in words
        assert "Mean ± standard deviation (n − 1) over 2 seeds." in words
        assert "until the accuracy is 70 %" in words

    def test_large_numbers_are_not_shortened_to_powers(self, tmp_path: Path) -> None:
        local = made_up(tmp_path / "l", "local", [[0.0] * 125] * 249 + [[0.9] * 125])
        ditto = made_up(tmp_path / "d", "ditto", [[0.8] * 124 + [0.9]] * 250)
        row = markdown(summarize([local, ditto], target=0.5)).splitlines()[5]
        assert "| −9.92 ± 0.89 | 124 of 125 |" in row
        assert "| 1 | 250× |" in row

    def test_markdown_marks_the_best_and_the_second(self, summary: Summary) -> None:
        lines = markdown(summary).splitlines()
        rows = [line for line in lines if line.startswith("|")]
        assert len({line.count("|") for line in rows}) == 1
        assert "| Ditto | **72.50 ± 3.54** | best | +10.00 ± 9.66 |" in rows[4]
        assert "| FedAvg | <u>70.00 ± 0.00</u> |" in rows[3]
        assert lines[-1] == summary.caption

    def test_latex_is_a_booktabs_table_with_everything_escaped(self, tmp_path: Path) -> None:
        results = [
            made_up(tmp_path / "a", "my_lab:Half_50%", [[0.5]], validation_accuracy=0.5, parameters={"share": "a&b#1"}),
            made_up(
                tmp_path / "b", "my_lab:Half_50%", [[0.6]], validation_accuracy=0.6, parameters={"share": "{~^\\$}"}
            ),
        ]
        made = summarize(results)
        text = latex(made)
        body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
        assert body[0].startswith(r"Half\_50\%, share=a\&b\#1 & 50.00 & 50.00 & ")
        assert r"share=\{\textasciitilde{}\textasciicircum{}\textbackslash{}\$\} & \textbf{60.00}" in body[1]
        columns = re.search(r"\\begin\{tabular\}\{(l r*)\}", text.replace("{l", "{l "))
        assert columns is not None
        unescaped = [re.sub(r"\\&", "", line) for line in [text.split("\\toprule\n")[1].splitlines()[0], *body]]
        assert {line.count("&") for line in unescaped} == {len(columns[1].replace(" ", "")) - 1}
        assert all(line.endswith(r" \\") for line in unescaped)
        stripped = re.sub(r"\\[{}]", "", text)
        assert stripped.count("{") == stripped.count("}")
        assert text.isascii()
        for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{table}", r"\end{table}"):
            assert text.count(rule) == 2  # results and costs

    def test_csv_has_the_raw_numbers(self, summary: Summary) -> None:
        rows = list(csv.DictReader(io.StringIO(comma_separated(summary))))
        by_title = {row["title"]: row for row in rows}
        for line in summary.lines:
            row = by_title[line.title]
            assert float(row["accuracy"]) == line.accuracy
            assert float(row["target"]) == 0.7
            assert row["seeds"] == "0 1"
        assert by_title["local"]["gain"] == ""
        assert by_title["ditto"]["best"] == "True"
        assert float(by_title["fedavg"]["p"]) == of(summary, "fedavg").p

    def test_all_are_written(self, summary: Summary, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        write_tables(summary, out)
        names = {path.name for path in out.iterdir()}
        assert names == {"table.txt", "table.md", "table.tex", "table.csv", "clients.csv", "result.json"}
        record = json.loads((out / "result.json").read_text())
        assert [line["title"] for line in record["lines"]] == ["local", "fedavg", "ditto"]
        assert record["lines"][2]["rounds_to_target"] == 2.5
        assert record["caption"] == summary.caption

    def test_what_nobody_has_is_no_column(self, tmp_path: Path) -> None:
        made = summarize([made_up(tmp_path / "a", "ditto", [[None, None]])])
        head = markdown(made).splitlines()[2]
        assert head == "| method | loss | rounds to at most 1 | bytes to at most 1 | bytes in all | samples/s |"
        assert "| Ditto | 1.0000 |" in markdown(made)


class TestNamesOfStrangers:
    NAMES = (
        "=cmd|' /C calc'!A0", "a\x1b]0;owned\x07b", "line\nbreak", "\\", "\\\\ \\hline", "`code`", "中文 é ß α",
        "<img src=x>",
        "a|b\\|c", "[x](javascript:1)", "**b** _i_ ~~s~~ $x$ &lt;",
    )  # fmt: skip

    @pytest.fixture
    def made(self, tmp_path: Path) -> Summary:
        return summarize(
            [
                made_up(tmp_path / str(number), "my_lab:A", [[0.1 * number]], parameters={"share": name})
                for number, name in enumerate(self.NAMES)
            ]
        )

    def test_text_has_no_control_characters(self, made: Summary) -> None:
        text = plain_text(made)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
        assert r"share=a\x1b]0;owned\x07b" in text

    def test_markdown_cells_are_not_left(self, made: Summary) -> None:
        rows = [line for line in markdown(made).splitlines() if line.startswith("|")]
        assert len(rows) == len(self.NAMES) + 2
        cells = [re.sub(r"\\.", "", row) for row in rows]  # escaped characters are text
        assert len({row.count("|") for row in cells}) == 1
        named = "".join(row.split("|")[1] for row in cells[2:])
        assert not re.search(r"[`*\[\]~$]|<\w|&\w+;|\b_i_\b", named)
        assert not re.search("[\x00-\x09\x0b-\x1f]", "".join(rows))
        assert "my_lab:A, share=<img" not in "".join(rows)

    def test_latex_is_still_a_table(self, made: Summary) -> None:
        text = latex(made)
        body = text.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
        lines = [line for line in body if not line.startswith(r"\quad ")]  # long titles go on in the next row
        assert len(lines) == len(self.NAMES) < len(body)
        assert len({re.sub(r"\\&", "", line).count("&") for line in body}) == 1
        assert all(line.endswith(r" \\") and line.count(r"\\") == 1 for line in body)
        assert "share=U+4E2DU+6587 é ß &" in text.replace(" U+03B1", "")
        assert r"\textbackslash{}textbackslash" not in text
        assert not re.search("[\x00-\x09\x0b-\x1f]", text)

    def test_csv_cells_are_no_formulas(self, tmp_path: Path) -> None:
        made = summarize([made_up(tmp_path / "a", "=my:A", [[0.5]]), made_up(tmp_path / "b", "local", [[0.4]])])
        rows = list(csv.reader(io.StringIO(comma_separated(made))))
        assert rows[1][0].startswith("'=my:A")
        assert not [cell for row in rows for cell in row if cell[:1] in tuple("=+@")]
        assert any(cell.startswith("-") or cell.startswith("0.") for row in rows[1:] for cell in row)

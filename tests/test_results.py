"""The records in results/ and the pages that are made of them."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.experiment import make_experiment
from fedtailor.experiment.tuned import find_settings, shipped
from fedtailor.methods import all_methods
from fedtailor.studies.comparison import make_comparison
from fedtailor.studies.presets import find_preset
from results.keeping import keep_comparisons, keep_runs, keep_tunings
from results.leaderboard import (
    AGAIN,
    FEDERATIONS,
    LEAST,
    NATURAL,
    below,
    better_than,
    differences,
    failed,
    fine_tuned,
    having,
    leaderboard,
    lines,
    result,
)
from results.page import FAR, difference, page, pairs_of_lines, pairs_of_methods, reproduction, studies
from results.pairs import Pair, rows
from results.shipping import SHIPPED, chose_other, shipped_text, unproven
from tests.methods.pages import page_of

ROOT = Path(__file__).parent.parent
SMALL = {"data": "digits", "clients": 4, "rounds": 3, "max_train": 20, "engine": "in-process"}


@pytest.mark.parametrize(("name", "make"), [("results", page), ("leaderboard", leaderboard)])
def test_a_page_is_what_the_records_give(name: str, make) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") == make(), "write it anew: python -m results"


def test_kept_records_give_the_same_result(tmp_path: Path) -> None:
    result = ft.run("pgfed", out=tmp_path / "all" / "paper" / "run", evaluation={"choose": "last-5"}, **SMALL)
    assert list(keep_runs(tmp_path / "all", tmp_path / "kept")) == [tmp_path / "kept" / "paper" / "run"]
    kept = ft.load(tmp_path / "kept" / "paper" / "run")
    assert kept.value == result.value
    assert kept.rounds == result.rounds
    assert b"null" not in (tmp_path / "kept" / "paper" / "run" / "rounds.jsonl").read_bytes()
    assert kept.counted == result.counted
    assert kept.observations.rounds() == [1, 2, 3]
    assert set(kept.observed(3)) == set(result.observed(3))
    assert not list(keep_runs(tmp_path / "all", tmp_path / "kept"))  # nothing is copied twice


def test_of_large_diagnostics_the_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ft.run("pgfed", out=tmp_path / "all" / "run", **SMALL)
    monkeypatch.setattr("results.keeping.MOST", 100)
    list(keep_runs(tmp_path / "all", tmp_path / "kept"))
    assert ft.load(tmp_path / "kept" / "run").observations.rounds() == [3]
    monkeypatch.setattr("results.keeping.TOO_MUCH", 100)
    list(keep_runs(tmp_path / "all", tmp_path / "none"))
    assert not (tmp_path / "none" / "run" / "observed").exists()
    assert ft.load(tmp_path / "none" / "run").value == ft.load(tmp_path / "kept" / "run").value


def test_clients_are_kept_in_rounds_that_count_alone(tmp_path: Path) -> None:
    best = {"choose": "best-test"}
    result = ft.run("local", out=tmp_path / "all" / "run", evaluation=best, **{**SMALL, "rounds": 6, "lr": 0.5})
    list(keep_runs(tmp_path / "all", tmp_path / "kept"))
    kept = ft.load(tmp_path / "kept" / "run")
    with_clients = {record.round for record in kept.clients if record.results}
    chosen = result.chosen()
    assert chosen is not None
    assert with_clients == {chosen.round, 6}
    assert kept.per_client == result.per_client
    assert not (tmp_path / "kept" / "run" / "checkpoint").exists()
    with pytest.raises(ft.FedtailorError, match="missing"):
        ft.resume(tmp_path / "kept" / "run", rounds=8)


def test_an_unfinished_run_is_not_kept(tmp_path: Path) -> None:
    result = ft.run("local", out=tmp_path / "all" / "run", **SMALL)
    assert result.path is not None
    (result.path / "result.json").unlink()
    assert not list(keep_runs(tmp_path / "all", tmp_path / "kept"))


def test_a_comparison_is_kept_as_its_summary(tmp_path: Path) -> None:
    ft.compare(["local", "fedavg"], seeds=[0], out=tmp_path / "all" / "race", **SMALL)
    assert list(keep_comparisons(tmp_path / "all", tmp_path / "kept")) == [tmp_path / "kept" / "race"]
    kept, made = (json.loads((tmp_path / place / "race" / "result.json").read_text()) for place in ("kept", "all"))
    assert kept == made
    assert not (tmp_path / "kept" / "race" / "runs").exists()


def test_a_tuning_is_kept_as_its_trials_and_shipped_only_with_enough_of_them(tmp_path: Path) -> None:
    ft.tune(["local"], trials=2, seeds=[0], out=tmp_path / "all" / "mine", **SMALL)
    assert list(keep_tunings(tmp_path / "all", tmp_path / "kept")) == [tmp_path / "kept" / "mine"]
    assert {path.name for path in (tmp_path / "kept" / "mine").iterdir()} == {"tuning.toml", "tuned.toml", "trials"}
    (tmp_path / "all" / "mine").rename(tmp_path / "all" / "digits")
    with pytest.raises(ft.FedtailorError, match=r"2 trials on 1 seed\(s\): make at least 16 on 3"):
        list(keep_tunings(tmp_path / "all", tmp_path / "kept"))
    assert not (tmp_path / "kept" / "digits").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_settings_are_those_of_the_kept_tuning_where_these_are_better(name: str) -> None:
    kept = (ROOT / "fedtailor" / "experiment" / "tuned" / f"{name}.toml").read_text(encoding="utf-8")
    assert kept == shipped_text(name), "write it anew: python -m results"
    chosen = find_settings(ROOT / "results" / "tunings" / name)
    for method in chosen.methods:
        assert shipped(name).of(method) == ({} if method in unproven(name) else chosen.of(method))


def test_what_is_not_better_than_the_default_on_fresh_seeds_is_not_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(kind: str, values: dict[str, float]) -> None:
        lines = [{"title": method, "method": method, "seeds": [2, 3, 4]} for method in values]
        clients = [{"name": str(n), "values": {m: v + n / 1000 * v for m, v in values.items()}} for n in range(20)]
        (tmp_path / f"fresh-{kind}-fashion-dirichlet").mkdir()
        text = json.dumps({"lines": lines, "clients": {"clients": clients}})
        (tmp_path / f"fresh-{kind}-fashion-dirichlet" / "result.json").write_text(text)

    monkeypatch.setattr("results.shipping.COMPARISONS", tmp_path)
    record("tuned", {"fedper": 0.85, "fedrod": 0.92, "apfl": 0.9})
    record("defaults", {"fedper": 0.89, "fedrod": 0.91, "apfl": 0.9})
    assert set(chose_other("fashion-dirichlet")) - set(unproven("fashion-dirichlet")) == {"fedrod"}
    content = tomllib.loads(shipped_text("fashion-dirichlet"))
    assert {"fedper", "apfl", "ifca", "scaffold"} <= set(content["methods"])
    assert not {"fedper", "apfl", "ifca"} & set(content["settings"])  # behind, the same, not run
    assert content["settings"]["fedrod"]["lr"] == 0.29
    assert content["settings"]["scaffold"]["lr"] == 0.1  # the tuning chose the default
    said = shipped_text("fashion-dirichlet").splitlines()[1]
    assert "fedper" in said
    assert "fedrod" not in said


@pytest.mark.parametrize(("ours", "paper", "text"), [
    (80.0, "81.02 ± 0.41", "−1.02"), (83.1, "81.02 ± 0.41", "+2.08 ≠"), (-3.0, "-8.99 ± 10.36", "+5.99 ≠"),
    (None, "81.02", "–"), (80.0, "", "–"),
])  # fmt: skip
def test_differences_from_the_paper(ours: float | None, paper: str, text: str) -> None:
    assert difference({"ours": ours, "paper": paper}) == text


@pytest.mark.slow
def test_far_numbers_are_explained() -> None:
    for study in (study for study in studies() if "preset" in study):
        cells = [cell for row in reproduction(study).outcome()["rows"] for cell in row["cells"]]
        assert any(cell["ours"] is not None for cell in cells), study["preset"]
        if any("≠" in difference(cell) for cell in cells):
            assert study.get("remarks"), f"{study['preset']} is more than {FAR} points from the paper: say why"


def test_every_cell_has_a_record_and_every_record_a_cell() -> None:
    shown = {path for study in studies() if "preset" in study for path in reproduction(study).experiments()}
    assert shown == set((ROOT / "results" / "papers").glob("*/*"))


NOT_RUN: dict[str, set[str]] = {}  # methods without a record, by federation


@pytest.mark.parametrize("federation", FEDERATIONS)
def test_no_default_is_absurd(federation: str) -> None:
    """With its defaults a method ends at 0.9 of Local's accuracy at least, or its page says why, with the share."""
    asked = tomllib.loads((ROOT / "results" / "federations" / f"{federation}.toml").read_text(encoding="utf-8"))
    assert set(lines("defaults", federation)) == set(asked["methods"])
    assert set(all_methods()) - set(asked["methods"]) == NOT_RUN.get(federation, set())
    for method, share in below(federation).items():
        text = " ".join(page_of(all_methods()[method]).split())
        named = rf"(?: \(`{method}`\))?" if f"(`{method}`)" not in text else rf" \(`{method}`\)"  # several on a page
        found = re.search(rf"\*\*Below {LEAST} of Local\*\*{named}.*?(\d\.\d\d) on `{federation}`", text)
        assert found, f"{method} has {share:.2f} of Local's accuracy on {federation}: its page must say why"
        assert abs(float(found[1]) - share) < 0.006


@pytest.mark.parametrize("federation", NATURAL)
def test_a_record_of_defaults_is_that_of_its_question(federation: str) -> None:
    asked = tomllib.loads((ROOT / "results" / "federations" / f"{federation}.toml").read_text(encoding="utf-8"))
    question = ROOT / "results" / "comparisons" / f"natural-{federation}" / "comparison.toml"
    recorded = tomllib.loads(question.read_text(encoding="utf-8"))
    assert asked.get("evaluation", {}).items() <= recorded["evaluation"].items()
    for name in asked.keys() - {"evaluation"}:
        assert recorded[name] == asked[name], name
    seeds = {
        method: line["seeds"] for method, line in lines("natural", federation).items() if line["value"] is not None
    }
    assert seeds == dict.fromkeys(seeds, asked["seeds"])
    assert {*lines("natural", federation), *failed(federation)} == set(asked["methods"])


def test_better_is_a_higher_accuracy_and_a_lower_error() -> None:
    for federation, sign in (("rotation", 100), ("schools", -1)):
        found = lines("natural", federation)
        base, tuned = found["fedavg"]["value"], found["fedavg-ft"]["value"]
        assert better_than("fedavg", federation)["fedavg-ft"][0] == pytest.approx(sign * (tuned - base)), federation
    clients = result("natural", "schools")["clients"]["clients"]
    differences = [client["values"]["fedavg-ft"] - client["values"]["fedavg"] for client in clients]
    assert sum(differences) < 0
    assert better_than("fedavg", "schools")["fedavg-ft"][1] == " ▲"


@pytest.mark.parametrize("federation", having("leaderboard"))
def test_the_fine_tuned_baseline_is_of_the_leaderboards_clients_and_rounds(federation: str) -> None:
    plain, tuned = lines("leaderboard", federation)["fedavg"], fine_tuned(federation)
    assert tuned["settings"]["fine_tune"] == 5
    for same in ("method", "seeds", "bytes", "passes", "metric"):
        assert tuned[same] == plain[same], same


@pytest.mark.parametrize("federation", AGAIN)
def test_a_column_was_run_again_with_all_methods(federation: str) -> None:
    moved = differences(federation)
    assert set(moved) == set(shipped(federation).methods)
    assert any(moved.values())  # the record is not a copy of the first
    for method, line in lines("again", federation).items():
        assert line["bytes"] == lines("leaderboard", federation)[method]["bytes"], method


def test_records_are_small_and_name_no_places() -> None:
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) < 16e6
    for path in files:
        assert path.stat().st_size < 1e6, path
        assert not re.search(rb'"/(tmp|home|root|work)/', path.read_bytes()), path


def test_a_pair_is_computed_over_the_clients_that_both_have() -> None:
    one, other = {"a": 0.9, "b": 0.8, "c": 0.75, "own": 0.1}, {"a": 0.7, "b": 0.7, "c": 0.75, "else": 0.9}
    pair = Pair.of("one", one, other)
    assert (pair.better, pair.worse) == (2, 0)
    assert pair.mean == pytest.approx((20 + 10 + 0) / 3)
    assert pair.error == pytest.approx(10 / 3**0.5)  # the deviation of 20, 10 and 0 is 10
    assert pair.p == pytest.approx(0.5)  # of two signs, both positive: 2 / 2²


def test_a_verdict_needs_a_corrected_p_below_the_level() -> None:
    def pair(better: int, worse: int) -> Pair:  # p is exact: 2 / 2ⁿ where all have one sign
        mine = {client: 0.5 + (0.001 if client < better else -0.001) * (client + 1) for client in range(better + worse)}
        return Pair.of("", mine, dict.fromkeys(mine, 0.5))

    assert [row[-1] for row in rows([pair(6, 0)])] == ["ahead"]  # 0.031
    assert [row[-1] for row in rows([pair(0, 6)])] == ["behind"]
    assert [row[-1] for row in rows([pair(5, 0)])] == ["not decided"]  # 0.0625
    assert [row[-1] for row in rows([pair(6, 0), pair(3, 3)])] == ["not decided", "not decided"]  # 2 · 0.031
    assert [row[-1] for row in rows([pair(9, 0), pair(3, 3)])] == ["ahead", "not decided"]


def test_a_verdict_stands_beside_the_pairs_that_carry_it() -> None:
    for study in studies():
        said = " ".join(study.get("remarks", []))
        words = re.findall(r"\b(?:ahead|behind|decided|beats?|best|as good as|level with)\b", said)
        assert "against" in study or not words, study


def test_every_paper_table_names_its_rounds() -> None:
    papers = [part for part in page().split("\n### ") if "fedtailor reproduce" in part and "`. " in part]
    assert len(papers) == sum("preset" in study for study in studies())
    for part in papers:
        assert re.search(r"\*\*(Shortened: \d+ of \d+ rounds|All \d+ rounds)\.", part), part[:200]


@pytest.mark.parametrize(("gain", "behind", "verdict"), [
    (0.006, 0, "PGFed, μ = 0.1"), (0.004, 0, "none"), (0.006, 8, "none"),
])  # fmt: skip
def test_the_decider_decides_by_its_rule_alone(gain: float, behind: int, verdict: str) -> None:
    """More than half a point, for enough clients: either alone does not decide."""
    study = next(study for study in studies() if "gain" in study)
    titles = {0.0: "without", 0.01: "little", 0.1: "much"}
    lines = [{"title": title, "settings": {"mu": mu}, "seeds": [0, 1, 2]} for mu, title in titles.items()]
    clients = [
        {"name": str(n), "values": {"without": 0.5, "little": 0.5, "much": 0.5 + (-0.004 if n < behind else gain)}}
        for n in range(20)
    ]
    found = {"mu-decider": {"lines": lines, "clients": {"clients": clients}}}
    assert f"**By the rule, this decides for {verdict}.**\n" in list(pairs_of_lines(study, found))


def test_methods_are_compared_at_the_rate_that_validation_data_chose_for_each() -> None:
    study = {"comparisons": {"one": "here, "}, "over": "lr", "by": "method", "against": "fedacs"}
    lines = [
        {
            "title": f"{method} {lr}",
            "method": method,
            "settings": {"lr": lr},
            "seeds": [0],
            "value": 0.5,
            "value_std": None,
        }
        | {"chosen": lr == best}
        for method, best in (("fedacs", 0.1), ("local", 0.01))
        for lr in (0.01, 0.1)
    ]
    values = {"fedacs 0.01": 0.9, "fedacs 0.1": 0.5, "local 0.01": 0.6, "local 0.1": 0.1}  # test data decide nothing
    clients = [
        {"name": str(n), "values": {t: v + (n / 1e4 if "local" in t else 0) for t, v in values.items()}}
        for n in range(8)
    ]
    text = "\n".join(pairs_of_methods(study, {"one": {"lines": lines, "clients": {"clients": clients}}}))
    assert "| here, `local` | +10.04 |" in text
    assert text.count("| here, ") == 1


@pytest.mark.parametrize("name", ["fedacs-rates", "fedacs-rates-500"])
def test_the_study_of_rates_is_the_presets_setting(name: str) -> None:
    """But for the network, validation samples, the rate, and FedAvg with fine-tuning as a method of its own."""
    comparison = make_comparison(tomllib.loads((ROOT / "results" / "studies" / f"{name}.toml").read_text("utf-8")))
    preset = find_preset("fedacs/figure1b-fmnist" + ("-500" if "500" in name else "-50samples"))
    theirs = {row.name.replace("fedavg-tuned", "fedavg-ft"): row for row in preset.rows}
    assert set(comparison.methods) == set(theirs)
    (column,) = preset.columns
    for method in comparison.methods:
        mine = comparison.experiment(method, 0, {})[0].model_dump()
        paper = preset.experiment(theirs[method], column).model_dump()
        different = {setting for setting in paper if mine[setting] != paper[setting]}
        expected = {"model", "validation", "lr", *(["method", "evaluation"] if method == "fedavg-ft" else [])}
        assert different - {"parameters", "checkpoint_every"} == expected, method
        assert mine["parameters"].items() >= paper["parameters"].items()


def test_the_decider_is_the_releases_setting() -> None:
    """Only what the rule names differs from the preset of the paper's table."""
    asked = tomllib.loads((ROOT / "results" / "studies" / "mu-decider.toml").read_text(encoding="utf-8"))
    preset = find_preset("pgfed/table1-cifar10-50")
    ours = make_experiment(
        {name: value for name, value in asked.items() if name not in ("methods", "seeds", "grid")} | {"method": "pgfed"}
    )
    row = next(row for row in preset.rows if row.name == "pgfed")
    theirs = preset.experiment(row, "50")
    mine, paper = ours.model_dump(), theirs.model_dump()
    different = {name for name in paper if mine[name] != paper[name] and name not in ("parameters", "seed")}
    assert different == {"max_train", "rounds", "evaluation"}
    assert asked["grid"]["mu"] == [0.0, 0.01, 0.1]

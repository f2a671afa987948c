"""The records in results/ and the pages that are made of them."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.experiment.tuned import shipped
from fedtailor.methods import all_methods
from results.keeping import SHIPPED, keep_comparisons, keep_runs, keep_tunings
from results.leaderboard import AGAIN, FEDERATIONS, LEAST, below, differences, fine_tuned, leaderboard, lines
from results.page import FAR, difference, page, reproduction, studies
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


def test_a_tuning_is_kept_as_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ft.tune(["local"], trials=2, seeds=[0], out=tmp_path / "all" / "digits", **SMALL)
    (tmp_path / "settings").mkdir()
    monkeypatch.setattr("results.keeping.SETTINGS", tmp_path / "settings")
    assert list(keep_tunings(tmp_path / "all", tmp_path / "kept")) == [tmp_path / "kept" / "digits"]
    assert {path.name for path in (tmp_path / "kept" / "digits").iterdir()} == {"tuning.toml", "tuned.toml", "trials"}
    written = (tmp_path / "settings" / "digits.toml").read_text().splitlines()
    assert written[0] == "# digits (8×8)"
    assert written[1:] == (tmp_path / "all" / "digits" / "tuned.toml").read_text().splitlines()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_settings_are_those_of_the_kept_tuning(name: str) -> None:
    chosen = (ROOT / "results" / "tunings" / name / "tuned.toml").read_text(encoding="utf-8")
    assert (ROOT / "fedtailor" / "experiment" / "tuned" / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[
        2
    ] == chosen


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


YOUNGEST = {"fedcp", "gpfl"}
GRAPHS = {"pfedsim", "pfedgraph", "fedcac"}
NOT_RUN = {
    "flights": YOUNGEST,
    "fashion-classes": YOUNGEST | GRAPHS,
    "fashion-dirichlet": YOUNGEST | GRAPHS | {"pfedfda", "fedala", "feddbe", "knn-per", "cfl", "fedem"},
}


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


@pytest.mark.parametrize("federation", FEDERATIONS)
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
    assert sum(path.stat().st_size for path in files) < 12e6
    for path in files:
        assert path.stat().st_size < 1e6, path
        assert not re.search(rb'"/(tmp|home|root|work)/', path.read_bytes()), path

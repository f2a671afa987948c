"""What stands beside the numbers of a reproduction: speed-ups, the last round, curves, histograms, α over rounds."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor._common.files import seal
from fedtailor.client.sites import Site
from fedtailor.reporting.marks import Curve
from fedtailor.reporting.reproduced import draw_outcome, figure_of
from fedtailor.server.records import Plain
from fedtailor.studies.measures import individual_gains
from fedtailor.studies.outcome import add_histogram, add_speedups, further_tables, last_round, markdown
from fedtailor.studies.presets import Preset, Row, find_preset
from fedtailor.studies.reproduction import Reproduction, shared_branches
from tests.studies.parts import SMALL, work


def outcome_of(rows: list[Plain], **more: Any) -> Plain:
    """An outcome of these rows, as `Reproduction.outcome` makes it."""
    about: Plain = {"preset": "own/table", "title": "A table", "paper": "We", "measure": "accuracy", "rounds": 3,
                    "full_rounds": 3, "seeds": 1, "changed": {}, "claim": "", "notes": [], "majority": {},
                    "not_in_paper": ""}  # fmt: skip
    return {**about, "rows": rows, **more}


def row_of(name: str, ours: float | None = None, paper: str = "", **more: Any) -> Plain:
    cell = {"column": "few", "paper": paper, "ours": ours, "spread": None}
    return {"row": name, "title": name, "missing": False, "in_paper": True, "cells": [cell], **more}


# --- speed-ups ---


def test_speedups_are_over_the_slowest_method_that_arrived() -> None:
    names = {"fast": "10", "slow": "20", "never": "40"}
    rows = tuple(Row(name, name, "fedavg", {}, (rounds,)) for name, rounds in names.items())
    preset = Preset("own/table", "t", "p", "rounds", {}, {"few": {}}, rows, slowest={"few": 40.0})
    found = outcome_of([row_of("fast", 3.0, "10"), row_of("slow", 12.0, "20"), row_of("never", None, "40")],
                       measure="rounds", rounds=30)  # fmt: skip
    add_speedups(found, preset)
    cells = [row["cells"][0] for row in found["rows"]]
    assert [cell["speedup"] for cell in cells] == [4.0, 1.0, None]
    assert [cell["paper_speedup"] for cell in cells] == [4.0, 2.0, 1.0]
    text = markdown(found)
    assert "| fast | 3 (4.0×) | 10 (4.0×) |" in text
    assert "| never | > 30 | 40 (1.0×) |" in text


def test_a_reproduction_has_speedups_and_one_method_alone_has_none(tmp_path: Path) -> None:
    settings = {**SMALL, "clients": 4, "evaluation": {"choose": "best-test"}, "rounds": 20}
    preset = replace(find_preset("pgfed/table2-25"), settings=settings, columns={"25": {}}, target=0.5)
    both = Reproduction(preset.of_rows(["fedper", "fedrod"]), tmp_path)
    work(both)
    cells = [row["cells"][0] for row in both.outcome()["rows"]]
    slowest = max(cell["ours"] for cell in cells)
    assert [cell["speedup"] for cell in cells] == [slowest / cell["ours"] for cell in cells]
    assert [cell["paper_speedup"] for cell in cells] == [31 / 8, 31 / 26]
    assert not any("last" in cell for cell in cells)  # the first round that is good enough is nobody's best
    alone = Reproduction(preset.of_rows(["fedper"]), tmp_path).outcome()["rows"][0]["cells"][0]
    assert alone["speedup"] is None
    assert alone["paper_speedup"] == 31 / 8


# --- the last round beside the best ---


@pytest.fixture(scope="module")
def flattered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Preset, Path]:
    """A table of the rounds that were best on test data, with its runs."""
    rows = (Row("local", "local", "local", {}, ("80",)), Row("fedavg", "fedavg", "fedavg", {"momentum": 0.0}, ("85",)))
    settings = {**SMALL, "rounds": 8, "lr": 0.5, "momentum": 0.5, "evaluation": {"choose": "best-test"}}
    preset = Preset("own/table", "t", "p", "accuracy", settings, {"few": {"clients": 4}}, rows)
    out = tmp_path_factory.mktemp("flattered")
    work(Reproduction(preset, out))
    return preset, out


def test_the_last_round_stands_beside_the_one_that_was_best_on_test_data(flattered: tuple[Preset, Path]) -> None:
    reproduction = Reproduction(*flattered)
    outcome = reproduction.outcome()
    cell = outcome["rows"][1]["cells"][0]
    result = next(run for path in reproduction.experiments() if (run := ft.load(path)).experiment.method == "fedavg")
    last, best = result.rounds[-1].accuracy, max(record.accuracy or 0 for record in result.rounds)
    assert last is not None
    assert cell["last"] == 100 * last < cell["ours"] == 100 * best
    text = markdown(outcome)
    assert "| method | few, ours | few, ours in the last round | few, paper |" in text
    assert f"| fedavg | {100 * best:.2f} | {100 * last:.2f} | 85 |" in text
    table = last_round(outcome)
    assert table is not None
    assert table.rows[1] == ["fedavg", f"{100 * last:.2f}"]


def test_gains_of_the_last_round_are_over_locals_last_round(flattered: tuple[Preset, Path]) -> None:
    preset, out = flattered
    reproduction = Reproduction(replace(preset, measure="gain").of_rows(["fedavg"]), out)
    assert reproduction.todo() == {}
    runs = {run.experiment.method: run for path in reproduction.experiments() if (run := ft.load(path))}
    accuracy = {
        method: {client: measured["test"].accuracy or 0 for client, measured in run.clients[-1].results.items()}
        for method, run in runs.items()
    }
    expected = fmean(100 * (accuracy["fedavg"][c] - accuracy["local"][c]) for c in range(4))
    cell = reproduction.outcome()["rows"][0]["cells"][0]
    assert cell["last"] == pytest.approx(expected)
    assert runs["local"].chosen() is not runs["local"].rounds[-1]
    assert cell["ours"] == pytest.approx(100 * fmean(individual_gains(runs["fedavg"], runs["local"]).values()))
    assert cell["last"] != pytest.approx(cell["ours"])


def test_other_rules_have_no_last_round_beside_them(flattered: tuple[Preset, Path], tmp_path: Path) -> None:
    preset = replace(flattered[0], settings={**SMALL, "rounds": 2})
    reproduction = Reproduction(preset, tmp_path)
    outcome = reproduction.outcome()
    assert last_round(outcome) is None
    assert "last round" not in markdown(outcome)


# --- figures ---


def test_a_histogram_counts_every_client_once() -> None:
    found = outcome_of(
        [row_of("one", gains=[-7.0, -5.0, 0.0, 100 * (0.35 - 0.3), 4.99]), row_of("other", gains=[10.0])]
    )
    assert 100 * (0.35 - 0.3) < 5  # as floats have it; it is a gain of 5 points all the same
    add_histogram(found)
    assert found["bins"] == [-10, -5, 0, 5, 10, 15]
    assert found["rows"][0]["histogram"] == [1, 1, 2, 1, 0]
    assert found["rows"][1]["histogram"] == [0, 0, 0, 0, 1]
    assert "| -5 to 0 | 1 | 0 |" in markdown(found)


def test_figure_two_has_its_trend_and_its_histogram(tmp_path: Path) -> None:
    settings = {**SMALL, "clients": 5, "evaluation": {"choose": "last"}}
    reproduction = Reproduction(replace(find_preset("pgfed/figure2"), settings=settings), tmp_path)
    work(reproduction)
    outcome = reproduction.outcome()
    path = next(iter(reproduction.experiments()))
    result = ft.load(path)
    for row in outcome["rows"]:
        kept = json.loads((path / f"{row['row']}.json").read_text())
        assert len(row["curve"]) == len(kept["accuracy"]) == 7
        assert row["curve"][0] == pytest.approx(100 * (result.rounds[-1].accuracy or 0))  # FedAvg's model itself
        assert row["curve"][-1] - row["curve"][0] == pytest.approx(row["cells"][0]["ours"])
        assert row["gains"] == [100 * gain for gain in kept["gains"]]
        assert sum(row["histogram"]) == 5
    assert outcome["rows"][0]["curve"] != outcome["rows"][1]["curve"]
    assert [table.head[0] for table in further_tables(outcome)] == ["step", "gain in points"]
    text = markdown(outcome)
    assert "| step | implicit | explicit |" in text
    assert f"| 6 | {outcome['rows'][0]['curve'][6]:.2f} | {outcome['rows'][1]['curve'][6]:.2f} |" in text
    before = (path / "explicit.json").read_bytes()
    reproduction.outcome()
    assert (path / "explicit.json").read_bytes() == before
    (path / "explicit.json").write_bytes(seal({"gains": [0.0]}))  # all that an older version kept
    assert reproduction.outcome() == outcome


def test_figure_four_has_the_curve_that_its_number_is_the_end_of(tmp_path: Path) -> None:
    """Of the global model, and of Local's initial one; Per-FedAvg's is not adapted before."""
    preset = find_preset("pgfed/figure4-cifar10").of_rows(["local", "fedavg", "per-fedavg"])
    *others, meta = preset.rows
    meta = replace(meta, settings={"parameters": {"inner_lr": 1.0}})  # a step that would show
    preset = replace(preset, rows=(*others, meta))
    evaluation = {"model": "global", "clients": "new", "fine_tune": 3, "every": 2, "choose": "last"}
    settings = {**SMALL, "clients": 6, "new_clients": 2, "rounds": 2, "batch": 7, "evaluation": evaluation}
    reproduction = Reproduction(replace(preset, settings=settings), tmp_path)
    work(reproduction)
    outcome = reproduction.outcome()
    for row in outcome["rows"]:
        assert len(row["curve"]) == 4
        assert row["curve"][-1] == pytest.approx(row["cells"][0]["ours"])
        assert len(set(row["curve"])) > 1
    for row in (row for row in preset.rows if row.name != "local"):
        result = ft.load(reproduction.path(reproduction.experiment(row, "new-clients", 0)))
        simulation = result.simulation
        theta = simulation.loop.method.global_model(simulation.server)
        assert theta is not None
        untuned = replace(simulation.prepared.terms, fine_tune=0)
        sites = [Site(client, simulation.data.client(client), untuned) for client in (4, 5)]
        before = [site.measure(site.network_at(theta))["test"].accuracy for site in sites]
        curve = next(line["curve"] for line in outcome["rows"] if line["row"] == row.name)
        assert curve[0] == pytest.approx(100 * fmean(accuracy or 0 for accuracy in before))
        assert result.path is not None
        assert json.loads((result.path / "fine-tuning.json").read_text())["accuracy"] == [v / 100 for v in curve]
    text = markdown(outcome)
    assert "| epoch | local | fedavg | per-fedavg |" in text
    assert f"| 3 | {outcome['rows'][0]['cells'][0]['ours']:.2f} |" in text


def test_curves_and_histogram_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row_of("one", curve=[1.0, 2.0], gains=[1.0]), row_of("other", curve=[3.0, 4.0], gains=[7.0])]
    outcome = outcome_of(rows, measure="explicit")
    add_histogram(outcome)
    figure = figure_of(outcome, "own-table")
    assert figure is not None
    trend, histogram = ([mark for mark in panel.marks if isinstance(mark, Curve)] for panel in figure.panels)
    assert [mark.y.tolist() for mark in trend] == [[1.0, 2.0], [3.0, 4.0]]
    assert [mark.x.tolist() for mark in histogram] == [[0, 5, 5, 10]] * 2
    assert [mark.y.tolist() for mark in histogram] == [[1, 1, 0, 0], [0, 0, 1, 1]]
    pytest.importorskip("matplotlib")
    written = draw_outcome(outcome, tmp_path / "own-table")
    assert {path.name for path in written} == {"own-table.png", "own-table.pdf", "own-table.svg"}
    assert all(path.stat().st_size for path in written)
    assert draw_outcome(outcome_of([row_of("one")]), tmp_path / "none") == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    assert draw_outcome(outcome, tmp_path / "without") == []


# --- pFedMB's Figure 3 ---


def one_hot(*branches: int) -> torch.Tensor:
    """The α of clients that each use one branch of five, in two layers."""
    return torch.eye(5)[list(branches)][:, None].repeat(1, 2, 1)


def test_pairs_and_their_branches_are_counted() -> None:
    assert shared_branches(one_hot(0, 0, 1, 1, 2, 2, 3, 3, 4, 4)) == (5, 5)
    assert shared_branches(one_hot(0, 0, 0, 0, 2, 2, 3, 3, 3, 3)) == (5, 3)  # pairs that share a branch with others
    assert shared_branches(one_hot(0, 1, 1, 1, 2, 3, 3, 3, 4, 0)) == (2, 2)  # clients that left their pair
    assert shared_branches(torch.full((10, 1, 5), 0.2)) == (0, 0)  # as all begin: nobody has a branch yet


def test_figure_three_tells_pairs_and_branches_over_rounds(tmp_path: Path) -> None:
    preset = find_preset("pfedmb/figure3")
    settings = {**SMALL, "clients": 10, "partition": "pairs", "rounds": 3, "max_train": 20}
    reproduction = Reproduction(replace(preset, settings=settings), tmp_path)
    assert len(reproduction.experiments()) == 2
    work(reproduction)
    outcome = reproduction.outcome()
    for row in outcome["rows"]:
        result = ft.load(reproduction.path(reproduction.experiment(
            next(known for known in preset.rows if known.name == row["row"]), "pairs", 0)))  # fmt: skip
        alpha = result.observed(3)["alpha"]
        assert alpha.shape == (10, 1, 5)
        assert [cell["ours"] for cell in row["cells"]] == list(shared_branches(alpha))
        assert [found["round"] for found in row["alpha"]] == [1, 2, 3]
        assert np.allclose(row["alpha"][-1]["alpha"], alpha[:, 0], atol=1e-4)
        assert (row["alpha"][-1]["pairs"], row["alpha"][-1]["branches"]) == shared_branches(alpha)
    last = outcome["rows"][0]["cells"]
    text = markdown(outcome)
    assert f"| pfedmb | {last[0]['ours']:.0f} | – | {last[1]['ours']:.0f} | – |" in text
    assert f"| 3 | {last[0]['ours']:.0f}, {last[1]['ours']:.0f} |" in text

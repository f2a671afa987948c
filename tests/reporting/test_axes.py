"""Curves over rounds, bytes, time and virtual time; and what a target costs in each."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.reporting.axes import Along, axes, chosen_axis
from fedtailor.reporting.figures import curves
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.marks import Curve, Figure, styles
from fedtailor.reporting.page import Report, html, prepare
from fedtailor.reporting.tables import comma_separated, latex, markdown, plain_text, summarize, write_tables
from fedtailor.studies.summary import Line, Summary
from tests.cli.calling import Call, done, refusal
from tests.helpers import rewrite
from tests.reporting.browser import CHROMIUM, Browser
from tests.reporting.conftest import SMALL
from tests.reporting.made_up import made_up


def lines(summary: Summary) -> dict[str, Line]:
    return {line.title: line for line in summary.lines}


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """FedAvg reaches 70 % with both seeds, Ditto with one of them, FedPer with none; Local has no system."""
    clock = {0: [100.0, 250.0, 400.0], 1: [40.0, 60.0, 400.0]}
    rises = {"fedavg": ([0.5, 0.7, 0.9], [0.6, 0.6, 0.8]), "ditto": ([0.8, 0.8, 0.8], [0.1, 0.2, 0.3]),
             "fedper": ([0.1, 0.1, 0.1], [0.1, 0.1, 0.2]), "local": ([0.1, 0.8, 0.8], [0.1, 0.8, 0.8])}  # fmt: skip
    return summarize(
        [
            made_up(
                tmp_path / f"{method}-{seed}",
                method,
                [[accuracy, accuracy] for accuracy in of_seeds[seed]],
                seed,
                clock=None if method == "local" else clock[seed],
            )
            for method, of_seeds in rises.items()
            for seed in (0, 1)
        ],
        target=0.7,
    )


class TestTarget:
    def test_its_costs_are_means_over_the_seeds_that_reach_it(self, summary: Summary) -> None:
        fedavg, ditto, fedper, local = (lines(summary)[name] for name in ("fedavg", "ditto", "fedper", "local"))
        assert [line.reached for line in (fedavg, ditto, fedper, local)] == [2, 1, 0, 2]
        assert (fedavg.rounds_to_target, fedavg.rounds_to_target_std) == (2.5, pytest.approx(0.5**0.5))
        assert (fedavg.bytes_to_target, fedavg.bytes_to_target_std) == (375, pytest.approx(150 * 0.5**0.5))
        assert (fedavg.clock_to_target, fedavg.clock_to_target_std) == (325, pytest.approx(75 * 2**0.5))
        assert (ditto.rounds_to_target, ditto.bytes_to_target, ditto.clock_to_target) == (1, 150, 100)
        assert (ditto.rounds_to_target_std, ditto.clock_to_target_std) == (None, None)
        assert (fedper.rounds_to_target, fedper.bytes_to_target, fedper.clock_to_target) == (None, None, None)
        assert (local.rounds_to_target, local.clock_to_target) == (2, None)

    def test_only_lines_that_reach_it_with_every_seed_have_a_speed_up(self, summary: Summary) -> None:
        found = {title: line.speed_up for title, line in lines(summary).items()}
        assert found == {"fedavg": 1, "ditto": None, "fedper": None, "local": 1.25}

    def test_the_table_says_how_many_seeds_and_who_never_does(self, summary: Summary) -> None:
        head, _, *rows = markdown(summary).splitlines()[2:8]
        names = head.strip("| ").split(" | ")
        cells = {
            row.split(" | ")[0].strip("| "): dict(zip(names, row.strip("| ").split(" | "), strict=True)) for row in rows
        }
        shown = ("rounds to 70 %", "bytes to 70 %", "virtual time to 70 %")
        assert {name: [of[column] for column in shown] for name, of in cells.items()} == {
            "FedAvg": ["2.5 ± 0.7", "375 B", "5.42 min ± 106 s"],
            "Ditto": ["1 (1 of 2)", "150 B", "100 s"],
            "FedPer": ["> 3", "–", "–"],
            "Local": ["2 ± 0", "300 B", "–"],
        }
        assert (
            "Rounds, bytes and virtual time until the accuracy is 70 %, mean ± standard deviation over seeds that "
            "reach it, with their number, and the speed-up over the slowest that gets there." in summary.caption
        )

    def test_it_is_in_every_file(self, summary: Summary, tmp_path: Path) -> None:
        write_tables(summary, tmp_path / "out")
        plain = json.loads((tmp_path / "out" / "result.json").read_text())
        assert (plain["target"], plain["target_given"]) == (0.7, True)
        assert [line["clock_to_target"] for line in plain["lines"]] == [325, 100, None, None]
        rows = list(csv.DictReader(io.StringIO(comma_separated(summary))))
        assert [row["clock_to_target"] for row in rows] == ["325.0", "100.0", "", ""]
        assert [row["reached"] for row in rows] == ["2", "1", "0", "2"]
        assert "virtual time" in plain_text(summary)
        assert "virtual time" in latex(summary)

    def test_without_a_system_there_is_no_column(self, tmp_path: Path) -> None:
        made = summarize([made_up(tmp_path / "a", "fedavg", [[0.5], [0.6]])], target=0.5)
        assert "virtual" not in markdown(made)

    def test_one_that_nobody_gave_is_said_to_be_what_all_runs_reach(self, tmp_path: Path) -> None:
        runs = [made_up(tmp_path / name, name, [[0.5], [end]]) for name, end in (("fedavg", 0.659), ("ditto", 0.8))]
        assert "until the accuracy is 65 %, what all runs reach, and" in summarize(runs).caption
        assert "until the accuracy is 65 %, and" in summarize(runs, target=0.65).caption


def x_of(figure: Figure) -> dict[str, list[float]]:
    return {mark.label: mark.x.tolist() for mark in figure.panels[0].marks if isinstance(mark, Curve)}


class TestCurves:
    def test_virtual_time_is_that_of_the_records(self, summary: Summary) -> None:
        look = styles([(line.title, line.method) for line in summary.lines])
        *others, by_clock = curves(summary, look)
        assert [figure.name for figure in others] == ["curves-rounds", "curves-bytes", "curves-time"]
        assert (by_clock.name, by_clock.tab) == ("curves-clock", "over virtual time")
        assert by_clock.panels[0].x == "virtual time until then, min"
        expected = pytest.approx([70 / 60, 155 / 60, 400 / 60])  # mean over seeds
        assert x_of(by_clock) == {"FedAvg": expected, "Ditto": expected, "FedPer": expected}
        assert by_clock.caption.count("Not here, as they have no virtual clock: Local.") == 1
        assert "virtual clock" not in "".join(figure.caption for figure in others)

    def test_the_chosen_one_comes_first(self, summary: Summary) -> None:
        look = styles([(line.title, line.method) for line in summary.lines])
        assert [figure.name for figure in curves(summary, look, "clock")] == [
            "curves-clock", "curves-rounds", "curves-bytes", "curves-time",
        ]  # fmt: skip

    def test_without_a_system_there_is_no_virtual_time(self, tmp_path: Path) -> None:
        made = summarize([made_up(tmp_path / "a", "fedavg", [[0.5], [0.6]])])
        assert [*axes(made)] == ["rounds", "bytes", "time"]
        with pytest.raises(ft.FedtailorError, match="no virtual time, as their clients have no system"):
            chosen_axis(made, "clock")
        with pytest.raises(ft.FedtailorError, match="'byte': did you mean 'bytes'"):
            chosen_axis(made, "byte")  # type: ignore[arg-type]


# --- a real run, whose clock is set by hand ---


CLOCK = {1: 1.5, 2: 4.0, 3: 4.25}


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes") / "runs"
    for method in ("fedavg", "apfl"):
        ft.run(method, out=folder / method, **SMALL)
        rewrite(folder / method / "rounds.jsonl", clock=lambda record: CLOCK[record["round"]])
    return folder


def reported(timed: Path, x: Along) -> Report:
    return prepare(read_runs([timed]), x=x)


@pytest.mark.parametrize("x", ["rounds", "bytes", "clock"])
def test_the_curves_of_diagnostics_are_over_what_was_chosen(timed: Path, x: Along) -> None:
    report = reported(timed, x)
    sent = np.cumsum([record.bytes for record in ft.load(timed / "apfl").rounds])
    expected = {"rounds": [1, 2, 3], "bytes": sent / 1e3, "clock": [*CLOCK.values()]}
    assert report.figures[0].name == f"curves-{x}"
    (alpha,) = (figure for figure in report.figures if figure.name == "apfl-alpha")
    assert x_of(alpha)["mean"] == pytest.approx(list(expected[x]))
    assert alpha.panels[0].x == report.figures[0].panels[0].x
    assert f"in each client's mix, over {'virtual time' if x == 'clock' else x}:" in alpha.caption


def test_the_command_refuses_virtual_time_where_there_is_none(call: Call, tmp_path: Path) -> None:
    made_up(tmp_path / "other", "fedavg", [[0.5], [0.6]])
    assert refusal(call, "report", "other", "--x", "clock").startswith("These runs have no virtual time")


@pytest.mark.slow
def test_the_command_takes_it(timed: Path, call: Call) -> None:
    done(call("report", str(timed), "--x", "clock", "--figures", "paper"))
    assert {"curves-clock.pdf", "apfl-alpha.svg"} < {path.name for path in Path("paper").iterdir()}
    drawn = Path("paper/apfl-alpha.svg").read_text()
    assert "virtual time until then, s" in drawn.replace("<!-- ", "").replace(" -->", "")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_virtual_time_is_a_tab_of_the_page(timed: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html(reported(timed, "rounds")), encoding="utf-8")
    with Browser() as browser:
        browser.open(page)
        browser.click("#tab-curves-clock")
        chart: dict[str, Any] = browser.run(
            """(() => {
              const chart = document.getElementById("chart-curves-clock-0");
              return {visible: getComputedStyle(chart).visibility, title: chart.layout.xaxis.title.text,
                      x: chart.data.map((trace) => trace.x)};
            })()"""
        )
        assert browser.messages == []
    assert chart == {"visible": "visible", "title": "virtual time until then, s", "x": [[1.5, 4, 4.25]] * 2}

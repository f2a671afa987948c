"""The table that `ft.compare` returns: reports of it, figures in a notebook, and the names of what was an object."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.reporting.figures import clients, curves
from fedtailor.reporting.marks import Curve, styles
from fedtailor.reporting.page import prepare
from tests.cli.calling import Call, call, done
from tests.helpers import rewrite

__all__ = ["call"]

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "mlp:8", "engine": "in-process"}


class Mine(ft.Method):
    """FedAvg under another name."""

    title = "Mine & others"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}


def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(30, 5, generator=generator), torch.arange(30) % 3) for name in "abcd"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("compared") / "cmp"
    return ft.compare(["local", "pgfed", Mine], data=data(), seeds=[0, 1], target=0.3, out=out, **SMALL)


def page_of(runs: Any, tmp_path: Path, **how: Any) -> str:
    return ft.report(runs, to=tmp_path / "page.html", **how).read_text()


def without_places(page: str) -> str:
    """The page without what is drawn, and without the directories of its runs."""
    return re.sub(r'<script type="text/plain".*?</script>|<section id="runs">.*?</section>', "", page, flags=re.DOTALL)


# --- reports ---


def test_a_table_is_reported_as_its_directory_is(table: Any, tmp_path: Path) -> None:
    directory = table.lines[0].results[0].path.parents[1]
    assert without_places(page_of(table, tmp_path)) == without_places(page_of(directory, tmp_path))
    assert "rounds to 30 %" in page_of(table, tmp_path)
    page_of([table], tmp_path, tables=tmp_path / "tables")
    assert (tmp_path / "tables/table.tex").read_text() == table.latex()


def test_tables_results_and_directories_are_reported_together(table: Any, tmp_path: Path) -> None:
    more = ft.compare(["fedavg"], data=data(), seeds=[0, 1], choose="last-5", **SMALL)
    again = [result.path for result in table.lines[0].results]
    page = page_of([table, more, ft.load(again[0]), again[1]], tmp_path)
    assert "<h1>Local, PGFed, Mine &amp; others and FedAvg on 4 clients of your own data</h1>" in page
    assert page.partition('<section id="runs">')[2].count("<tr>") == 1 + 10
    assert page.partition('<section id="results">')[2].partition("</table>")[0].count("<tr>") == 1 + 4


def test_runs_of_a_table_that_failed_are_named(table: Any, tmp_path: Path) -> None:
    failed = replace(table, failed={"ditto, seed 0": "Every client diverged."})
    said = "ditto, seed 0 came to no end: Every client diverged."
    for given in (failed, [failed, table]):
        with pytest.warns(UserWarning, match=said):
            assert f"<li>{said}</li>" in page_of(given, tmp_path)


# --- figures ---


def test_a_table_draws_the_figures_of_its_report(table: Any) -> None:
    drawn = table.figures()
    report = prepare(table.runs)
    assert list(drawn) == [figure.name for figure in report.figures]
    look = styles([(line.title, line.method) for line in table.lines])
    figure = curves(table.summary, look)[0]
    expected = [mark for panel in figure.panels for mark in panel.marks if isinstance(mark, Curve)]
    lines = [trace for trace in drawn["curves-rounds"].data if trace.fill is None]
    assert len(lines) == len(expected) == 2 * 3
    for mark, trace in zip(expected, lines, strict=True):
        assert np.allclose(trace.y, mark.y, rtol=1e-4)
        assert trace.line.color == mark.style.colour
    assert [trace.name for trace in lines if trace.showlegend] == ["Local", "PGFed", "Mine &amp; others"]
    assert {trace.xaxis for trace in lines} == {"x", "x2"}
    bars = [trace for trace in drawn["clients"].data if trace.type == "bar"]
    shown = clients(table.summary, look)
    assert shown is not None
    assert len(bars) == len(shown.panels) == 3


def test_panels_do_not_lie_on_each_other(table: Any) -> None:
    for name, figure in table.figures().items():
        places = []
        for axis in figure.select_xaxes():
            number = axis.plotly_name.removeprefix("xaxis")
            places.append((*axis.domain, *figure.layout[f"yaxis{number}"].domain))
        assert len(places) == len({*places})
        for one in places:
            assert 0 <= one[0] < one[1] <= 1, name
            assert 0 <= round(one[2], 9) < one[3] <= 1, name
            for other in places:
                apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
                assert one == other or apart, name


def test_a_matrix_has_colours_and_names_by_itself(table: Any) -> None:
    (heat,) = [trace for trace in table.figures()["partition-seed0"].data if trace.type == "heatmap"]
    assert len(heat.colorscale) > 2
    assert list(heat.customdata[1][2]) == [heat.y[1], heat.x[2]]


def test_every_kind_of_figure_can_be_drawn(tmp_path: Path) -> None:
    methods = ["local", "pgfed", "ifca", "apfl", "fedamp", "pfedmb"]
    grid = {"attack": ["none", "sign-flip, clients=0.4"]}
    found = ft.compare(methods, seeds=[0], clients=5, grid=grid, **{**SMALL, "rounds": 3})
    figures = found.figures()
    assert {"curves-time", "gains", "attacks"} < set(figures)
    for name, figure in figures.items():
        figure.write_html(tmp_path / f"{name}.html", include_plotlyjs=False)


# --- names ---


def test_objects_are_your_own_data_everywhere(table: Any, call: Call) -> None:
    directory = table.lines[0].results[0].path.parents[1]
    run = table.lines[2].results[0]
    title = "4 clients of your own data, 2 rounds, seeds 0, 1"
    assert str(table).startswith(title)
    assert table.markdown().startswith(title)
    assert f"\\caption{{{title}." in table.latex()
    assert "\\label{tab:own-data}" in table.latex()
    assert f"<caption>{title}." in table._repr_html_()
    assert repr(run).startswith("<RunResult Mine & others on 4 clients of your own data, 2 of 2 rounds: ")
    page = without_places(page_of(table, Path.cwd()))
    assert "<h1>Local, PGFed and Mine &amp; others on 4 clients of your own data</h1>" in page
    assert "84 training samples of your own data (3 classes) at 4 clients." in page
    shown = done(call("show", directory)), done(call("show", run.path))
    assert shown[0].lstrip().startswith(title)
    assert shown[1].lstrip().startswith("4 clients of your own data, 2 of 2 rounds, seed 0")
    for text in (str(table), table.markdown(), table.latex(), table._repr_html_(), repr(run), page, *shown):
        assert not re.search("object:|own-data-[0-9a-f]{16}|dictionary", text)


def test_one_client_is_one_client(tmp_path: Path) -> None:
    one = ft.run("local", data=[next(iter(data().values()))], **SMALL)
    assert repr(one).startswith("<RunResult local on 1 client of your own data, ")
    seen: list[str] = []

    class Sees(ft.Tracker):
        def start(self, run: ft.TrackedRun) -> str:
            seen.append(run.name)
            return run.name

    ft.compare(["local"], data=data(), seeds=[0], track=Sees(), **SMALL)
    assert seen[0] == "own-data-comparison"


NAME = f"{__name__}:Mine"
WORDS = ("--clients", 3, "--rounds", 2, "--epochs", 1, "--model", "mlp:8", "--engine", "in-process")


def test_run_tune_and_compare_call_a_method_of_ones_own_by_its_title(call: Call) -> None:
    ran = call("run", NAME, "fedavg", *WORDS, "--out", "runs")
    texts = {
        "run": done(ran) + ran.setup + "".join(ran.progress),
        "show": done(call("show", next(Path("runs").glob("*Mine*")))),
        "compare": done(call("compare", NAME, "local", *WORDS, "--seeds", "0", "--out", "cmp")),
        "show a comparison": done(call("show", "cmp")),
        "tune": done(call("tune", NAME, *WORDS, "--trials", 1, "--validation", "0.2", "--out", "tuned")),
        "in Python": repr(ft.tune([Mine], trials=1, clients=3, validation=0.2, **SMALL)),
    }
    for text in texts.values():
        assert "Mine & others" in text
        assert NAME not in text
    assert "Mine &amp; others" in without_places(page_of("cmp", Path.cwd()))
    assert "fedavg" in texts["run"]  # those of the catalogue keep the names that commands have for them


def test_a_record_that_is_older_than_titles_has_the_name_of_the_class(tmp_path: Path) -> None:
    result = ft.run(Mine, clients=3, out=tmp_path / "run", **SMALL)
    assert result.method_title == ft.load(tmp_path / "run").method_title == "Mine & others"
    about = json.loads((tmp_path / "run/network.json").read_text())
    assert about["title"] == "Mine & others"
    rewrite(tmp_path / "run/network.json", title="")
    assert ft.load(tmp_path / "run").method_title == "Mine"

"""The figures' numbers by hand, and both ways to draw them."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import fedtailor as ft
from fedtailor.method import Message, Server
from fedtailor.methods.fedavg import FedAvg
from fedtailor.reporting.diagnostics import diagnostics
from fedtailor.reporting.figures import clients, curves, evenly, gains, partitions
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.interactive import chart
from fedtailor.reporting.marks import GREY, PALETTE, Bars, Curve, Figure, Heat, Network, Points, Style, styles
from fedtailor.reporting.page import Report, prepare
from fedtailor.reporting.paper import draw, save
from fedtailor.studies.summary import Summary, summarize
from tests.reporting.conftest import OWN_FIGURES, SMALL
from tests.reporting.made_up import made_up


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """Local and Ditto with two seeds; Ditto's second seed broke off after a round."""
    results = [
        made_up(tmp_path / "local-0", "local", [[0.5, 0.5], [0.5, 0.7]], 0),
        made_up(tmp_path / "local-1", "local", [[0.4, 0.4], [0.6, 0.6]], 1),
        made_up(tmp_path / "ditto-0", "ditto", [[0.2, 0.4], [0.9, 0.7]], 0),
        made_up(tmp_path / "ditto-1", "ditto", [[0.4, 0.6]], 1, rounds=2),
    ]
    return summarize(results)


def look(summary: Summary) -> dict[str, Style]:
    return styles([(line.title, line.method) for line in summary.lines])


@pytest.fixture(scope="module")
def report(runs: Path) -> Report:
    return prepare(read_runs([runs]))


def test_curves_are_means_over_the_seeds_that_have_come_so_far(summary: Summary) -> None:
    by_rounds, by_bytes, by_time = curves(summary, look(summary))
    local, ditto = by_rounds.panels[0].marks
    assert isinstance(local, Curve)
    assert isinstance(ditto, Curve)
    assert local.x.tolist() == [1, 2]
    assert local.y == pytest.approx([45, 60])
    assert ditto.y == pytest.approx([40, 80])  # the second round is the first seed's alone
    assert ditto.low is not None
    assert ditto.high is not None
    spread = np.std([30, 50], ddof=1)
    assert (ditto.low[0], ditto.high[0]) == pytest.approx((40 - spread, 40 + spread))
    assert (ditto.low[1], ditto.high[1]) == pytest.approx((80, 80))
    assert [mark.y.tolist() for mark in by_rounds.panels[1].marks if isinstance(mark, Curve)] == [[1, 0.5], [1, 0.5]]
    for figure, title, x in (
        (by_bytes, "sent up and down until then, B", [150, 300]),
        (by_time, "time until then, s", [0.5, 1]),
    ):
        assert figure.panels[0].x == title
        assert figure.panels[0].marks[0].x.tolist() == x  # type: ignore[union-attr]


def test_rounds_without_evaluation_have_no_point_but_cost_bytes(tmp_path: Path) -> None:
    settings = {**SMALL, "evaluation": {"every": 2}}
    summary = summarize([ft.run("fedavg", out=tmp_path / "run", **settings)])
    by_rounds, by_bytes, _ = curves(summary, look(summary))
    sent = np.cumsum([record.bytes for record in summary.lines[0].results[0].rounds])
    (curve,), (along_bytes,) = by_rounds.panels[0].marks, by_bytes.panels[0].marks
    assert isinstance(curve, Curve)
    assert isinstance(along_bytes, Curve)
    assert curve.x.tolist() == [2, 3]
    assert along_bytes.x * 1e3 == pytest.approx(sent[1:])
    assert curve.low is None


def test_clients_are_sorted_and_gains_are_over_local_on_the_same_seed(summary: Summary) -> None:
    figure = clients(summary, look(summary))
    assert figure is not None
    bars = [panel.marks[0] for panel in figure.panels]
    assert [mark.y.round(6).tolist() for mark in bars if isinstance(mark, Bars)] == [[55, 65], [65, 65]]
    assert figure.panels[1].title == "Ditto: 65 %"
    assert isinstance(bars[0], Bars)
    assert bars[0].text[0] == "client 0, 20 samples, mean over 2 seeds"
    figure = gains(summary, look(summary))
    assert figure is not None
    points = figure.panels[0].marks[0]
    assert isinstance(points, Points)
    assert points.y == pytest.approx([40, 0, -20, 0])
    assert points.x.tolist() == [20] * 4


def test_there_are_no_gains_without_local(tmp_path: Path) -> None:
    summary = summarize([made_up(tmp_path / "run", "fedavg", [[0.5, 0.6]])])
    assert gains(summary, look(summary)) is None


def test_the_partition_is_the_recorded_one_with_like_clients_side_by_side(report: Report) -> None:
    first, second = partitions(report.summary)
    assert (first.tab, second.tab) == ("seed 0", "seed 1")
    heat = first.panels[0].marks[0]
    assert isinstance(heat, Heat)
    result = report.summary.lines[0].results[0]
    counts = np.array(result.partition["train"])
    order = [result.names.index(name) for name in heat.rows]
    assert sorted(order) == list(range(6))
    assert np.array_equal(heat.last, counts[order])
    assert np.all(np.diff(counts[order].argmax(1)) >= 0)


def own(report: Report, method: str) -> list[Figure]:
    line = next(line for line in report.summary.lines if line.method == method)
    return diagnostics(line, Style(PALETTE[0]))


def test_pgfeds_change_comes_with_the_two_regressions_of_its_paper(report: Report) -> None:
    (figure,) = own(report, "pgfed")
    heat, columns, rows = (panel.marks for panel in figure.panels)
    result = next(line for line in report.summary.lines if line.method == "pgfed").results[0]
    shown = result.observed(3)
    order = [result.names.index(name) for name in heat[0].rows]  # type: ignore[union-attr]
    assert np.allclose(heat[0].last, shown["change"][order][:, order])  # type: ignore[union-attr]
    assert np.allclose(columns[0].y, shown["change"].mean(0))  # type: ignore[union-attr]
    assert np.allclose(rows[0].y, shown["change"].mean(1))  # type: ignore[union-attr]
    assert columns[0].x.tolist() == np.array(result.partition["train"]).sum(1).tolist()  # type: ignore[union-attr]
    r_columns, r_rows = (f"r = {float(r):.2f}".replace("-", "−") for r in shown["correlation"])
    assert [panel.title.rpartition(", ")[2] for panel in figure.panels[1:]] == [r_columns, r_rows]
    assert f"({r_columns})" in figure.caption
    assert f"({r_rows})" in figure.caption


@pytest.mark.parametrize("method", ["pgfedmo", "pgfed-ce"])
def test_pgfeds_variants_have_its_figures(method: str, tmp_path: Path) -> None:
    ft.run(method, out=tmp_path / "run", **SMALL)
    (figure,) = prepare(read_runs([tmp_path])).sections[-1].figures
    assert figure.title == "Who helps whom, and what sample counts have to do with it"


def test_other_methods_figures_are_what_they_recorded(report: Report) -> None:
    results = {line.method: line.results[0] for line in report.summary.lines}
    (alpha,) = own(report, "pfedmb")
    assert len(alpha.panels) == 2  # layers of the mlp
    heat = alpha.panels[1].marks[0]
    assert isinstance(heat, Heat)
    assert list(heat.frames) == ["1", "2", "3"]
    order = [results["pfedmb"].names.index(name) for name in heat.rows]
    assert np.allclose(heat.frames["2"], results["pfedmb"].observed(2)["alpha"][order, 1])

    (similarity,) = own(report, "fedacs")
    network = similarity.panels[1].marks[0]
    assert isinstance(network, Network)
    weights = results["fedacs"].observed(3)["weights"].fill_diagonal_(0)
    at = [results["fedacs"].names.index(name) for name in network.nodes]
    for helper, helped, weight in network.edges:
        assert weight == pytest.approx(float(weights[at[helped], at[helper]]))
        assert weight >= float(weights[at[helped]].sort(descending=True).values[2])

    (mix,) = own(report, "apfl")
    lines = {mark.label: mark for mark in mix.panels[0].marks if isinstance(mark, Curve)}
    recorded = torch.stack([results["apfl"].observed(round)["alpha"] for round in (1, 2, 3)])
    assert np.allclose(lines["client 4"].y, recorded[:, 4])
    assert np.allclose(lines["mean"].y, recorded.mean(1))

    (clusters,) = own(report, "ifca")
    when, what = (panel.marks[0] for panel in clusters.panels)
    assert isinstance(when, Heat)
    assert isinstance(what, Heat)
    member = results["ifca"].observed(3)["cluster"]
    assert [when.kinds[int(kind)] for kind in when.last[:, -1]] == [
        f"cluster {int(member[results['ifca'].names.index(name)]) + 1}" for name in when.rows
    ]
    assert what.last.sum() == np.array(results["ifca"].partition["train"]).sum()


class Talkative(FedAvg):
    """Shows a bit of everything."""

    def observe(self, server: Server) -> Message:
        n = server.n_samples.double()
        return {"total": n.sum(), "samples": n, "pairs": torch.outer(n, n), "odd": torch.zeros(3, 2)}


def test_a_method_of_ones_own_gets_figures_of_what_it_shows(tmp_path: Path) -> None:
    ft.run(Talkative(), out=tmp_path / "run", **SMALL)
    report = prepare(read_runs([tmp_path]))
    figures = {figure.title: figure for figure in report.sections[-1].figures}
    assert figures.keys() == {"total", "samples", "pairs"}
    counts = np.array(report.summary.lines[0].results[0].partition["train"]).sum(1)
    assert figures["total"].panels[0].marks[0].y.tolist() == [counts.sum()] * 3  # type: ignore[union-attr]
    assert all("/" not in figure.name and ":" not in figure.name for figure in report.figures)


def test_all_that_is_drawn_in_the_page_is_valid_for_plotly(report: Report) -> None:
    drawn = {mark for figure in report.figures for panel in figure.panels for mark in map(type, panel.marks)}
    assert drawn == {Curve, Points, Bars, Heat, Network}
    for figure in report.figures:
        for panel in figure.panels:
            spec = chart(figure, panel)
            go.Figure({"data": spec["data"], "layout": spec["layout"]})  # refuses unknown names and values


def test_figures_for_a_paper_show_the_same_numbers(summary: Summary) -> None:
    by_rounds = curves(summary, look(summary))[0]
    axes = draw(by_rounds).axes[0]
    for mark, line in zip(by_rounds.panels[0].marks, axes.lines, strict=True):
        assert isinstance(mark, Curve)
        assert np.array_equal(line.get_ydata(), mark.y)
        assert line.get_color() == mark.style.colour
    figure = clients(summary, look(summary))
    assert figure is not None
    assert [patch.get_height() for patch in draw(figure).axes[1].patches] == pytest.approx([65, 65])
    (partition,) = partitions(summary)
    assert np.array_equal(draw(partition).axes[0].images[0].get_array(), [[10, 10], [10, 10]])


def test_every_figure_can_be_drawn_for_a_paper(report: Report, tmp_path: Path) -> None:
    for figure in report.figures:
        if figure.name.partition("-")[0] in OWN_FIGURES:
            draw(figure).draw_without_rendering()  # a glyph that the font does not have would be a warning
    (curves, *_) = report.figures
    files = [path.read_bytes() for path in save([curves], tmp_path / "one")]
    assert [file[:4] for file in files] == [b"\x89PNG", b"%PDF", b"<?xm"]
    assert [path.read_bytes() for path in save([curves], tmp_path / "two")] == files


def simulated(colour: str, vision: Any) -> Any:
    """A colour as somebody sees it, in CIELAB, where distances are what the eye sees."""
    channels = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    light = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(vision @ light, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    "vision",
    [
        pytest.param([[1, 0, 0], [0, 1, 0], [0, 0, 1]], id="full"),
        pytest.param([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]], id="protan"),
        pytest.param([[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]], id="deutan"),
        pytest.param([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]], id="tritan"),
    ],
)  # Machado et al. 2009
def test_colours_are_told_apart_with_any_vision(vision: list[list[float]]) -> None:
    seen = [simulated(colour, np.array(vision)) for colour in (*PALETTE, GREY)]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 17


def test_a_method_looks_the_same_everywhere_and_like_no_other() -> None:
    many = styles([("local", "local"), *((f"m{n}", f"m{n}") for n in range(24))])
    assert many["local"].colour == GREY
    assert len(set(many.values())) == 25


def test_long_things_are_thinned_evenly() -> None:
    assert evenly(5, 10) == [0, 1, 2, 3, 4]
    assert evenly(1000, 3) == [0, 500, 999]
    assert len(evenly(999, 250)) == 250

"""What is drawn: no label or legend is cut, and none lies on another, on paper and in a browser."""

from collections.abc import Iterator
from html import escape
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure as Drawing
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import fedtailor as ft
from fedtailor.reporting.figures import partition_in_words
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.interactive import chart
from fedtailor.reporting.marks import NAME, PALETTE, Curve, Figure, Panel, Style, band_fill, short_names
from fedtailor.reporting.page import html, prepare
from fedtailor.reporting.paper import SETTINGS, draw, drawn_labels
from tests.helpers import rewrite
from tests.reporting.browser import CHROMIUM, Browser
from tests.reporting.conftest import HOSPITALS
from tests.reporting.made_up import made_up

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PIXEL = 1.0  # boxes are rounded to it


def texts(drawing: Drawing) -> Iterator[tuple[str, Bbox]]:
    """Every text outside of the plots themselves, with its box: titles, labels of axes and ticks, and the legend's."""
    inside = {id(text) for axes in drawing.axes if axes.axison for text in axes.texts}
    hidden = {id(text) for axes in drawing.axes if not axes.get_visible() for text in axes.findobj(Text)}
    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            shown = {id(label) for label in drawn_labels(axis)}
            hidden |= {id(label) for label in axis.findobj(Text) if id(label) not in shown and label is not axis.label}
        hidden |= {id(text) for text in axes.findobj(Text) if not axes.axison and text not in axes.texts}
    for text in drawing.findobj(Text):
        if text.get_visible() and text.get_text() and id(text) not in inside | hidden:
            yield text.get_text(), text.get_window_extent()


def faults(figure: Figure) -> list[str]:
    """Name what is cut or lies on another."""
    with matplotlib.rc_context(SETTINGS):
        drawing = draw(figure)
        drawing.draw_without_rendering()
        found = list(texts(drawing))
    assert found
    canvas = drawing.bbox.padded(PIXEL)
    said = [f"{figure.name}: {text!r} is cut" for text, box in found
            if not (canvas.contains(*box.min) and canvas.contains(*box.max))]  # fmt: skip
    for (one, a), (other, b) in combinations(found, 2):
        shared = Bbox.intersection(a, b)
        if shared is not None and min(shared.width, shared.height) > PIXEL:
            said.append(f"{figure.name}: {one!r} lies on {other!r}")
    for legend in drawing.legends:
        box = legend.get_window_extent()
        if any(box.padded(-PIXEL).overlaps(axes.get_tightbbox()) for axes in drawing.axes if axes.get_visible()):
            said.append(f"{figure.name}: the legend lies on a plot")
    if min(axes.bbox.height for axes in drawing.axes if axes.get_visible()) < 0.3 * drawing.dpi:
        said.append(f"{figure.name}: a plot is less than 0.3 inches high")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("which", ["runs", "named", "many"])
def test_on_paper_no_label_is_cut_and_none_lies_on_another(which: str, request: pytest.FixtureRequest) -> None:
    report = prepare(read_runs([request.getfixturevalue(which)]))
    assert [fault for figure in report.figures for fault in faults(figure)] == []


CUT = """[...document.querySelectorAll(".chart")].flatMap((chart) => {
  const room = chart.getBoundingClientRect();
  return [...chart.querySelectorAll("svg text")]
    .filter((text) => text.textContent.trim() && getComputedStyle(text).visibility === "visible")
    .map((text) => [chart.id, text.textContent, text.getBoundingClientRect()])
    .filter(([, , box]) => box.width && (box.left < room.left - 1 || box.right > room.right + 1
                                         || box.top < room.top - 1 || box.bottom > room.bottom + 1))
    .map(([id, text]) => `${id}: ${text} is cut`);
})"""
TOUCHING = """[...document.querySelectorAll(".chart")].flatMap((chart) =>
  [".xtick text", ".ytick text"].flatMap((kind) => {
    const boxes = [...chart.querySelectorAll(kind)].filter((text) => text.textContent)
      .map((text) => [text.textContent, text.getBoundingClientRect()]);
    return boxes.slice(1).filter(([, b], n) => {
      const a = boxes[n][1];
      return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    }).map(([text]) => `${chart.id}: ${text} lies on its neighbour`);
  }))"""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("which", ["named", "many"])
def test_in_a_browser_no_label_is_cut_and_none_lies_on_another(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_text(html(prepare(read_runs([request.getfixturevalue(which)]))), encoding="utf-8")
    with Browser() as browser:
        for width in (1280, 420):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **metrics)
            browser.open(page)
            assert browser.run(CUT) == []
            assert browser.run(TOUCHING) == []
            assert browser.run("document.documentElement.scrollWidth") == width
        if which == "named":
            cells = browser.run("document.getElementById('chart-partition-seed0-0').data[0].customdata")
            assert sorted({row[0][0] for row in cells})[0] == escape(f"{sorted(HOSPITALS)[0]}", quote=False)
            ticks = browser.run(
                "[...document.querySelectorAll('#chart-clients-0 .xtick')].map(tick => tick.textContent)"
            )
            assert len(ticks) == len(set(ticks)) == 2 * len(HOSPITALS)
            assert max(map(len, ticks)) <= NAME
            whole = browser.run("[...document.querySelectorAll('#clients th.name')].map(name => name.title)")
            assert set(whole) >= set(HOSPITALS)


# --- names, bands, the partition ---


def test_long_names_are_cut_so_that_they_can_still_be_told_apart() -> None:
    assert short_names(["north", "South of the great lake"]) == ["north", "South of the gr…"]
    ends = short_names(["University Hospital North", "University Hospital South"])
    assert ends == ["Univers…al North", "Univers…al South"]
    same = [f"{'x' * 20}{n}{'y' * 20}" for n in range(3)]
    assert len(set(short_names(same))) == 3
    assert max(map(len, short_names([*same, *ends]))) <= NAME


@pytest.mark.parametrize("lines", [1, 3, 9, 26])
def test_bands_on_top_of_each_other_stay_faint_and_have_edges(lines: int) -> None:
    x, y = np.arange(3.0), np.ones(3)
    curves = [Curve(x, y, str(n), Style(PALETTE[n % len(PALETTE)]), y - 1, y + 1) for n in range(lines)]
    panel = Panel("", curves)
    covered = 1 - (1 - band_fill(curves)) ** lines  # what is left of the paper where all of them lie
    assert covered < 0.2
    figure = Figure("f", "", "", [panel])
    traces = chart(figure, panel)["data"]
    bands, drawn = traces[:lines], traces[lines:]
    assert all(trace["fill"] == "toself" and trace["line"]["width"] for trace in bands)
    assert not any("fill" in trace for trace in drawn)  # no band lies on a line
    (axes,) = draw(figure).axes
    assert all(band.get_linewidth()[0] > 0 for band in axes.collections)
    assert {round(float(band.get_facecolor()[0][3]), 6) for band in axes.collections} == {round(band_fill(curves), 6)}


def test_the_partition_that_was_used_is_said(named: Path, runs: Path, tmp_path: Path) -> None:
    """No experiment here asks for one."""
    by_data, drawn = (read_runs([folder]).results[0] for folder in (named, runs))
    assert by_data.experiment.partition is None
    assert partition_in_words(by_data) == "natural, the clients that the data itself names"
    assert partition_in_words(drawn).startswith("dirichlet:0.3, each class by Dirichlet(0.3)")
    page = html(prepare(read_runs([named])))
    assert page.count("artition: natural, the clients that the data itself names.") == 3  # above, and for each seed
    old = made_up(tmp_path / "old", "local", [[0.5, 0.6]])  # which did not write it down
    assert partition_in_words(old).startswith("the default (")
    rewrite(tmp_path / "old" / "partition.json", clients=["north", "south"])
    assert partition_in_words(ft.load(tmp_path / "old")).startswith("natural")

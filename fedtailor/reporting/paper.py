"""The same figures for a paper: PNG, PDF and SVG, drawn by matplotlib."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor._common.files import make_directory, writing
from fedtailor.reporting.figures import evenly
from fedtailor.reporting.marks import (
    EDGE,
    NAME,
    NODE_NAME,
    Bars,
    Curve,
    Dash,
    Figure,
    Heat,
    Mark,
    Network,
    Panel,
    Points,
    band_fill,
    short_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Drawing
    from matplotlib.text import Text

FORMATS = ("png", "pdf", "svg")
MOMENTS = 4  # of a matrix over rounds, side by side
WIDTH = 6.9  # inches: a page with two columns
LETTERS = 70  # of a line in the legend
MOST_NAMES = 30  # along an axis: of more, some are written
UPRIGHT = 3  # letters of a name that is not turned
SETTINGS: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7.5, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "axes.grid": True, "grid.color": "#e4e7eb", "grid.linewidth": 0.5, "axes.axisbelow": True, "lines.linewidth": 1.3,
    "savefig.dpi": 300, "pdf.fonttype": 42, "svg.hashsalt": "fedtailor",
}  # fmt: skip
LINE_STYLES: dict[Dash, Any] = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def check_matplotlib() -> None:
    """Refuse to go on without matplotlib, before any work, and say how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FedtailorError(f"--figures needs matplotlib: install it with {install_command('figures')}.") from None


def save(figures: Sequence[Figure], directory: Path) -> Iterator[Path]:
    """Draw each figure and write it in every format; yield the path of each file."""
    import matplotlib

    make_directory(directory)
    for figure in figures:
        with matplotlib.rc_context(SETTINGS):
            drawing = draw(figure)
            for ending in FORMATS:
                path = directory / f"{figure.name}.{ending}"
                # No time of day in the file: the same runs give the same bytes.
                metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(ending)
                with writing(path):
                    drawing.savefig(path, metadata=metadata)
                yield path


def draw(figure: Figure) -> "Drawing":
    """Draw a figure's panels in rows. A narrow matrix over rounds is drawn at a few of them, one row for each panel;
    any other at the last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing
    from matplotlib.ticker import MaxNLocator

    panels, columns = _laid_out(figure)
    rows = -(-len(panels) // columns)
    heights = [max(_height(panel, WIDTH / columns) for panel in panels[row * columns : (row + 1) * columns])
               for row in range(rows)]  # fmt: skip
    drawing = Drawing(figsize=(WIDTH if columns > 1 else 0.7 * WIDTH, sum(heights) + 0.3), layout="constrained")
    FigureCanvasAgg(drawing)  # which can measure
    places = drawing.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for axes, panel in zip(places, panels, strict=False):
        title = fill(_plain(panel.title), int(14 * (WIDTH / columns - 0.5)))
        axes.set(title=title, xlabel=_plain(panel.x), ylabel=_plain(panel.y))
        if panel.y_limits:
            axes.set_ylim(*panel.y_limits)
        for mark in panel.marks:
            _draw(mark, axes, band_fill(panel.marks))
        if panel.x == "round" and not isinstance(panel.marks[0], Heat):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, drawing)
    drawing.draw_without_rendering()  # lays the panels out, once for all formats
    for axes in drawing.axes:
        _break_long(axes)
    drawing.draw_without_rendering()  # again, as plots of another size have other ticks
    drawing.set_layout_engine("none")
    for axes in drawing.axes:
        _thin(axes)
    return drawing


def _laid_out(figure: Figure) -> tuple[list[Panel], int]:
    """The panels as they are printed, and how many stand side by side."""
    heats = [panel.marks[0] for panel in figure.panels]
    if len(figure.frames) < 2 or not all(isinstance(h, Heat) and len(h.columns) < len(h.rows) for h in heats):
        tall = any(panel.tall for panel in figure.panels)
        named = any(isinstance(heat, Heat) and _room(heat.rows) for heat in heats)
        return list(figure.panels), (2 if named else 3) if tall else min(figure.columns, len(figure.panels))
    panels = []
    for panel, heat in zip(figure.panels, heats, strict=True):
        assert isinstance(heat, Heat)
        rounds = list(heat.frames)
        for place in evenly(len(rounds), MOMENTS):
            moment = replace(heat, frames={rounds[place]: heat.frames[rounds[place]]}, limits=heat.range)
            panels.append(replace(panel, title=f"{panel.title}, round {rounds[place]}", marks=[moment]))
    return panels, min(MOMENTS, len(figure.frames))


def _height(panel: Panel, width: float) -> float:
    """In inches."""
    mark = panel.marks[0]
    if isinstance(mark, Network):
        return min(width, 3.2)
    if isinstance(mark, Heat):
        return _room(mark.columns) + (
            min(width, 3.2) if mark.square else min(max(0.11 * len(mark.rows) + 0.6, 1.4), 4.5)
        )
    return 1.3 + _room(mark.names) if isinstance(mark, Bars) else 2.3


def _room(names: Sequence[str]) -> float:
    """The height of names that stand upright below an axis, in inches."""
    longest = max((min(len(name), NAME) for name in names), default=0)
    return 0.05 * longest if longest > UPRIGHT else 0.0


def _draw(mark: Mark, axes: "Axes", fill: float) -> None:
    if isinstance(mark, Curve):
        _curve(mark, axes, fill)
    elif isinstance(mark, Points):
        axes.scatter(mark.x, mark.y, s=9, color=mark.style.colour, alpha=0.75, linewidths=0)
        if min(mark.y) < 0 < max(mark.y):
            axes.axhline(0, color="#5d6673", linewidth=0.6, zorder=1)
    elif isinstance(mark, Bars):
        axes.bar(np.arange(len(mark.y)), mark.y, color=mark.style.colour, width=1 if len(mark.y) > 40 else 0.9)
        _name(axes, "x", mark.names)
        axes.tick_params(axis="x", length=0, labelsize=6)
        axes.grid(axis="x", visible=False)
    elif isinstance(mark, Heat):
        _heat(mark, axes)
    else:
        _network(mark, axes)


def _name(axes: "Axes", axis: Literal["x", "y"], names: Sequence[str]) -> None:
    """Write names at the places 0, 1, … of an axis; upright below it where they are long."""
    upright = axis == "x" and any(len(name) > UPRIGHT for name in names)
    set_ticks = axes.set_xticks if axis == "x" else axes.set_yticks
    shown = range(0, len(names), -(-len(names) // MOST_NAMES) or 1)
    short = short_names(names)
    set_ticks(shown, [_plain(short[place]) for place in shown], rotation=90 if upright else 0)


def _break_long(axes: "Axes") -> None:
    """Break a title or label that is longer than its side of the plot into lines: the layout makes no room for it."""
    box = axes.bbox
    for text, room in ((axes.title, box.width), (axes.xaxis.label, box.width), (axes.yaxis.label, box.height)):
        found = text.get_window_extent()
        length = found.height if text is axes.yaxis.label else found.width
        if length > room:
            longest = max(map(len, text.get_text().splitlines()))
            text.set_text(fill(text.get_text(), max(8, int(longest * room / length))))


def drawn_labels(axis: "Axis") -> "list[Text]":
    """The labels of the ticks that are within sight: matplotlib makes some beyond, and does not draw them."""
    low, high = sorted(axis.get_view_interval())
    labels, places = axis.get_ticklabels(), [tick.get_loc() for tick in axis.get_major_ticks()]
    seen = zip(labels, places, strict=False)  # labels first: that brings the ticks up to date
    return [label for label, place in seen if low <= place <= high and label.get_text() and label.get_visible()]


def _thin(axes: "Axes") -> None:
    """Leave out so many of an axis's names, evenly, that no two touch."""
    for axis in (axes.xaxis, axes.yaxis):
        labels = drawn_labels(axis)
        boxes = [label.get_window_extent() for label in labels]
        steps = range(1, len(labels) + 1)
        step = next((n for n in steps if not any(a.overlaps(b) for a, b in pairwise(boxes[::n]))), 1)
        for place, label in enumerate(labels):
            label.set_visible(place % step == 0)


def _curve(mark: Curve, axes: "Axes", fill: float) -> None:
    many = mark.kind == "one of many"
    shape: dict[str, Any] = {"marker": "o", "markersize": 4} if len(mark.x) == 1 else {}
    axes.plot(
        mark.x, mark.y, LINE_STYLES[mark.style.dash], color=mark.style.colour, alpha=0.4 if many else 1,
        linewidth={"main": 1.4, "one of many": 0.5, "fit": 0.9}[mark.kind], **shape,
    )  # fmt: skip
    if mark.low is not None and mark.high is not None:
        colour, edge = ((mark.style.colour, opacity) for opacity in (fill, EDGE))
        axes.fill_between(mark.x, mark.low, mark.high, facecolor=colour, edgecolor=edge, linewidth=0.5)


def _heat(mark: Heat, axes: "Axes") -> None:
    from matplotlib.colors import ListedColormap

    low, high = mark.range
    options: dict[str, Any] = {"cmap": {"sequential": "Blues", "diverging": "RdBu_r"}.get(mark.scale)}
    if mark.scale == "kinds":
        options["cmap"] = ListedColormap(mark.colours)
        low, high = -0.5, len(mark.colours) - 0.5
    options |= {"aspect": "equal" if mark.square else "auto", "interpolation": "nearest"}
    drawn = axes.imshow(mark.last, vmin=low, vmax=high, **options)
    _name(axes, "x", mark.columns)
    _name(axes, "y", mark.rows)
    axes.tick_params(length=0, labelsize=6)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    if mark.written:
        for (row, column), value in np.ndenumerate(mark.last):
            if value:
                ink = "white" if value > low + 0.6 * (high - low) else "black"
                axes.text(column, row, f"{value:g}", ha="center", va="center", fontsize=5, color=ink)
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02, label=_plain(mark.measure))
    bar.outline.set_visible(False)
    if mark.scale == "kinds":
        bar.set_ticks(range(len(mark.kinds)), labels=[_plain(kind) for kind in mark.kinds])
        bar.set_label("")


def _network(mark: Network, axes: "Axes") -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Bow

    for start, end, weight in mark.edges:
        strength = mark.strength(weight)
        arrow = FancyArrowPatch(
            path=Bow(mark.path(start, end)), arrowstyle="-|>", mutation_scale=4 + 3 * strength, shrinkA=0, shrinkB=0,
            color=mark.style.colour, alpha=0.4 + 0.6 * strength, linewidth=0.4 + 1.2 * strength,
        )  # fmt: skip
        axes.add_patch(arrow)
    places = mark.places()
    largest = float(mark.sizes.max()) if len(mark.sizes) else 1.0
    axes.scatter(
        places[:, 0],
        places[:, 1],
        s=(10 + 50 * mark.sizes / max(largest, 1.0)) * min(1, 30 / len(mark.nodes)),
        color=mark.style.colour,
        zorder=3,
        linewidths=0,
    )
    wide = mark.reach(0.05)
    for node, name in enumerate(short_names(mark.nodes, NODE_NAME) if len(mark.nodes) <= 50 else ()):
        (x, y), (above, beside) = places[node], mark.side(node)
        # matplotlib says which side of the text is at the point, we on which side of the point the text is.
        va = {"top": "bottom", "bottom": "top", "middle": "center"}[above]
        ha = {"left": "right", "right": "left", "center": "center"}[beside]
        axes.text(1.1 * x, 1.1 * y, _plain(name), ha=ha, va=va, fontsize=6)
    axes.set(xlim=(-wide, wide), ylim=(-1.3, 1.3), aspect="equal")
    axes.set_axis_off()


def _legend(figure: Figure, drawing: "Drawing") -> None:
    """The methods, once, below all panels."""
    from matplotlib.lines import Line2D

    if len(figure.legend) < 2:
        return
    keys = [
        Line2D([], [], color=style.colour, linestyle=LINE_STYLES[style.dash], label=fill(_plain(label), LETTERS))
        for label, style in figure.legend.values()
    ]
    for ncols in range(min(len(keys), 5), 0, -1):
        legend = drawing.legend(handles=keys, loc="outside lower center", ncols=ncols, frameon=False)
        size = legend.get_window_extent()
        if size.width <= drawing.bbox.width or ncols == 1:
            break
        legend.remove()
    width, height = drawing.get_size_inches()
    drawing.set_size_inches(width, height + size.height / drawing.dpi)


def _plain(text: str) -> str:
    """Escape text, which matplotlib would otherwise take for mathematics."""
    return text.replace("$", r"\$")

"""Panels as plotly.js draws them: plain JSON values. Colours that depend on light and dark are the page's business."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from fedtailor.reporting.marks import (
    EDGE,
    NAME,
    NODE_NAME,
    Array,
    Bars,
    Curve,
    Figure,
    Heat,
    Mark,
    Network,
    Panel,
    Points,
    band_fill,
    short_names,
)

Spec = dict[str, Any]

LEVELS = 4  # widths of the arrows between nodes


def chart(figure: Figure, panel: Panel) -> Spec:
    """A panel's traces and layout, and its frames where it has several."""
    layout: Spec = {
        "margin": {"l": 60, "r": 14, "t": 10, "b": 48 if panel.x else 14},
        "xaxis": {"title": {"text": escaped(panel.x)}, "automargin": True},
        "yaxis": {"title": {"text": escaped(panel.y)}, "automargin": True},
        "showlegend": False,
        "bargap": 0 if any(isinstance(mark, Bars) and len(mark.y) > 40 for mark in panel.marks) else 0.1,
        "hovermode": "x unified" if _same_x(panel) else "closest",
    }
    if panel.x == "round" and max((mark.x.max() for mark in panel.marks if isinstance(mark, Curve)), default=99) <= 12:
        layout["xaxis"]["dtick"] = 1
    if panel.y_limits:
        layout["yaxis"] |= {"range": list(panel.y_limits)}
    spec: Spec = {"data": [], "layout": layout}
    for mark in panel.marks:
        traces, changes = _drawn(mark, panel)
        spec["data"] += traces
        for axis, settings in changes.items():
            layout[axis] = {**layout[axis], **settings}
        if isinstance(mark, Heat) and len(mark.frames) > 1:
            spec["frames"] = [_numbers(frame) for frame in mark.frames.values()]
    spec["data"].sort(key=lambda trace: trace.get("fill") != "toself")  # no band lies on a line
    return spec


def shape(figure: Figure, panel: Panel) -> str:
    """The size of a panel's drawing, as CSS. What is square by nature is never higher than it is wide."""
    square = any(isinstance(mark, Network) or (isinstance(mark, Heat) and mark.square) for mark in panel.marks)
    pixels = _height(figure, panel)
    return f"aspect-ratio:1.1;max-height:{pixels}px" if square else f"height:{pixels}px"


def _height(figure: Figure, panel: Panel) -> int:
    if panel.tall:
        return 520
    if any(other.tall for other in figure.panels):
        return 238
    kinds = {type(mark) for other in figure.panels for mark in other.marks}
    if Heat in kinds and Network not in kinds:
        rows = max(len(mark.rows) for other in figure.panels for mark in other.marks if isinstance(mark, Heat))
        return min(max(17 * rows + 80, 300), 640)
    longest = max((len(name) for mark in panel.marks if isinstance(mark, Bars) for name in mark.names), default=0)
    return 440 if Network in kinds else 190 + 6 * min(longest, NAME) if Bars in kinds else 360


def _same_x(panel: Panel) -> bool:
    """Find out whether all curves have the same x, so that one can point at all of them at once."""
    curves = [mark for mark in panel.marks if isinstance(mark, Curve) and mark.kind == "main"]
    longest = max((curve.x for curve in curves), key=len, default=np.zeros(0))
    return len(curves) == len(panel.marks) and all(np.array_equal(c.x, longest[: len(c.x)]) for c in curves)


def _drawn(mark: Mark, panel: Panel) -> tuple[list[Spec], dict[str, Spec]]:
    """A mark's traces, and the settings of the axes that it needs."""
    if isinstance(mark, Curve):
        return _curve(mark, panel), {}
    if isinstance(mark, Points):
        return [_points(mark, panel)], {}
    if isinstance(mark, Bars):
        return [_bars(mark)], {"xaxis": {"ticks": "", "showgrid": False, "showticklabels": False, **_bar_names(mark)}}
    if isinstance(mark, Heat):
        return [_heat(mark, panel)], _heat_axes(mark)
    bare, wide = {"visible": False}, mark.reach(0.085)
    axes = {"xaxis": {**bare, "range": [-wide, wide]}, "yaxis": {**bare, "range": [-1.25, 1.25], "scaleanchor": "x"}}
    return _network(mark), axes


def _curve(mark: Curve, panel: Panel) -> list[Spec]:
    named = [escaped(name) for bars in panel.marks if isinstance(bars, Bars) for name in bars.names]
    width = {"main": 2.4, "one of many": 1.2, "fit": 1.4}[mark.kind]
    trace: Spec = {
        "type": "scatter",
        "mode": "lines" if len(mark.x) > 1 else "markers",
        "x": [named[0], named[-1]] if named else _numbers(mark.x),  # a mean, from the first bar to the last
        "y": _numbers(mark.y),
        "name": escaped(mark.label),
        "line": {"color": mark.style.colour, "dash": mark.style.dash, "width": width},
        "opacity": 0.45 if mark.kind == "one of many" else 1,
    }
    if mark.kind == "fit":
        trace["hoverinfo"] = "skip"
    elif _same_x(panel):
        trace["hovertemplate"] = "%{y:.4g}"
    else:
        trace["hovertemplate"] = _pointed(f"<b>{escaped(mark.label)}</b>", panel)
    traces = [trace]
    if mark.low is not None and mark.high is not None and len(mark.x) > 1:
        band: Spec = {
            "type": "scatter",
            "mode": "lines",
            "x": _numbers(np.concatenate([mark.x, mark.x[::-1]])),
            "y": _numbers(np.concatenate([mark.high, mark.low[::-1]])),
            "fill": "toself",
            "fillcolor": _faint(mark.style.colour, band_fill(panel.marks)),
            "line": {"width": 1, "color": _faint(mark.style.colour, EDGE)},
            "hoverinfo": "skip",
        }
        traces = [band, trace]
    return [{**one, "legendgroup": mark.choice} for one in traces] if mark.choice else traces


def _points(mark: Points, panel: Panel) -> Spec:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _numbers(mark.x),
        "y": _numbers(mark.y),
        "text": [escaped(text) for text in mark.text],
        "marker": {"color": mark.style.colour, "size": 7, "opacity": 0.75},
        "hovertemplate": _pointed("<b>%{text}</b>", panel),
        **({"legendgroup": mark.choice} if mark.choice else {}),
    }


def _bars(mark: Bars) -> Spec:
    return {
        "type": "bar",
        **({"x": [escaped(name) for name in mark.names]} if mark.names else {}),
        "y": _numbers(mark.y),
        "text": [escaped(text) for text in mark.text],
        "textposition": "none",
        "marker": {"color": mark.style.colour, "line": {"width": 0}},
        "hovertemplate": "<b>%{text}</b><br>%{y:.4g}<extra></extra>",
    }


def _bar_names(mark: Bars) -> Spec:
    """The axis below bars that have names."""
    if not mark.names:
        return {}
    look = {"showticklabels": True, "tickangle": -90, "tickfont": {"size": 10}}
    return {"type": "category", **look, **_aliases(mark.names)}


def _aliases(names: Sequence[str]) -> Spec:
    """Shorten names that are too long for an axis."""
    short = zip(names, short_names(names), strict=True)
    aliases = {escaped(name): escaped(cut) for name, cut in short if name != cut}
    return {"labelalias": aliases} if aliases else {}


def _heat(mark: Heat, panel: Panel) -> Spec:
    low, high = mark.range
    where = f"{escaped(panel.y)}: %{{customdata[0]}}<br>{escaped(panel.x)}: %{{customdata[1]}}<br>"
    small = len(mark.rows) * len(mark.columns) <= 1600
    trace: Spec = {
        "type": "heatmap",
        "z": _numbers(mark.last),
        "x": [escaped(name) for name in mark.columns],
        "y": [escaped(name) for name in mark.rows],
        "zmin": low,
        "zmax": high,
        "meta": mark.scale,
        "xgap": int(small),
        "ygap": int(small),
        # Names are the page's business: %{x} and %{y} would be cut as those of the axes are.
        "hovertemplate": f"{where}{escaped(mark.measure)}: <b>%{{z:.4~g}}</b><extra></extra>",
        "colorbar": {
            "title": {"text": escaped(mark.measure), "side": "right"},
            "thickness": 11,
            "outlinewidth": 0,
            "len": 1,
            "xpad": 6,
        },
    }
    if mark.written:
        shown = [[f"{value:g}" if value else "" for value in row] for row in mark.last]
        trace |= {"text": shown, "texttemplate": "%{text}"}
    if mark.scale == "kinds":
        colours = mark.colours
        steps = [(place / len(colours), (place + 1) / len(colours), c) for place, c in enumerate(colours)]
        trace |= {
            "zmin": -0.5,
            "zmax": len(colours) - 0.5,
            "colorscale": [end for low, high, colour in steps for end in ([low, colour], [high, colour])],
            "text": [[escaped(mark.kinds[int(value)]) for value in row] for row in mark.last],
            "hovertemplate": f"{where}<b>%{{text}}</b><extra></extra>",
        }
        ticks = {"tickvals": list(range(len(mark.kinds))), "ticktext": [escaped(kind) for kind in mark.kinds]}
        trace["colorbar"] |= {"title": {"text": ""}, **ticks}
    return trace


def _heat_axes(mark: Heat) -> dict[str, Spec]:
    axis = {"type": "category", "showgrid": False, "ticks": "", "zeroline": False, "constrain": "domain"}
    axis |= {"ticklabelstandoff": 4}
    square = {"scaleanchor": "x"} if mark.square else {}
    rows, columns = _aliases(mark.rows), _aliases(mark.columns)
    return {"xaxis": {**axis, **columns}, "yaxis": {**axis, "autorange": "reversed", **square, **rows}}


def _network(mark: Network) -> list[Spec]:
    """Arrows in a few widths, and the nodes on top of them."""
    traces = []
    for level in range(LEVELS):
        here = [e for e in mark.edges if min(int(LEVELS * mark.strength(e[2])), LEVELS - 1) == level]
        if not here:
            continue
        x: list[float | None] = []
        y: list[float | None] = []
        sizes: list[float] = []
        for start, end, _ in here:
            path = mark.path(start, end)
            x += [*_numbers(path[:, 0]), None]
            y += [*_numbers(path[:, 1]), None]
            sizes += [0.0] * (len(path) - 1) + [7.0 + 2 * level, 0.0]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": x,
                "y": y,
                "line": {"color": mark.style.colour, "width": 0.8 + 0.7 * level},
                "marker": {
                    "symbol": "arrow",
                    "angleref": "previous",
                    "size": sizes,
                    "color": mark.style.colour,
                    "opacity": 1,
                    "line": {"width": 0},
                },
                "opacity": 0.45 + 0.18 * level,
                "hoverinfo": "skip",
            }
        )
    places = mark.places()
    largest = float(mark.sizes.max()) if len(mark.sizes) else 1.0
    nodes = {
        "type": "scatter",
        "mode": "markers",
        "x": _numbers(places[:, 0]),
        "y": _numbers(places[:, 1]),
        "text": [escaped(text) for text in mark.text],
        "marker": {
            "size": _numbers((7 + 13 * np.sqrt(mark.sizes / max(largest, 1.0))) * min(1, 30 / len(mark.nodes)) ** 0.6),
            "color": mark.style.colour,
            "opacity": 1,
            "line": {"width": 0},
        },
        "hovertemplate": "%{text}<extra></extra>",
    }
    names = short_names(mark.nodes, NODE_NAME) if len(mark.nodes) <= 50 else []
    labels = {
        "type": "scatter",
        "mode": "text",
        "x": _numbers(1.1 * places[:, 0]),
        "y": _numbers(1.1 * places[:, 1]),
        "text": [escaped(name) for name in names],
        "textposition": [" ".join(mark.side(place)) for place in range(len(names))],
        "hoverinfo": "skip",
    }
    return [*traces, nodes, labels]


def _pointed(head: str, panel: Panel) -> str:
    """The text that appears when one points at a mark."""
    x = f"<br>{escaped(panel.x)}: %{{x:.4~g}}" if panel.x else ""
    return f"{head}{x}<br>{escaped(panel.y)}: %{{y:.4g}}<extra></extra>"


def _faint(colour: str, share: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {share})"


def escaped(text: str) -> str:
    """Escape text, which plotly.js would otherwise take for its own little HTML."""
    return escape(text, quote=False).replace("\n", "<br>")


def _numbers(values: Array) -> Any:
    """Round to five digits, which are more than an eye can see and keep the page small; None for what is no number."""
    if values.ndim > 1:
        return [_numbers(row) for row in values]
    return [_short(float(value)) for value in values]


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short

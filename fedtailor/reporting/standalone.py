"""Figures that stand alone, as plotly's own objects: what a notebook shows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedtailor.reporting.interactive import Spec, chart, escaped
from fedtailor.reporting.marks import Figure, Heat, styles
from fedtailor.training.metrics import Metric

SCALES = {"sequential": "Blues", "diverging": "RdBu_r"}  # of a matrix, as figures for papers have them


def drawing(figure: Figure) -> Any:
    """Draw a figure with all its panels, side by side and below each other, with room between them for axes."""
    from plotly.graph_objects import Figure as Drawing

    scales = any(isinstance(mark, Heat) for panel in figure.panels for mark in panel.marks)  # beside their panels
    columns = 1 if scales else min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    wide, high = (0.82 / columns if columns > 1 else 1.0), (0.72 / rows if rows > 1 else 1.0)
    traces: list[Spec] = []
    layout: Spec = {"title": {"text": escaped(figure.title)}, "height": 80 + 360 * rows, "annotations": []}
    for place, panel in enumerate(figure.panels):
        row, column = divmod(place, columns)
        left, top = column / columns, 1 - row / rows
        right, bottom = left + wide, top - high
        spec, number = chart(figure, panel), str(place + 1) if place else ""
        traces += (_alone(trace, number, right, (top + bottom) / 2, top - bottom) for trace in spec["data"])
        for axis, other, ends in (("x", "y", [left, right]), ("y", "x", [bottom, top])):
            known = spec["layout"].pop(f"{axis}axis")
            anchors = {name: f"x{number}" for name in known if name == "scaleanchor"}
            layout[f"{axis}axis{number}"] = {**known, **anchors, "domain": ends, "anchor": f"{other}{number}"}
        layout = {**spec["layout"], **layout}
        where = {"x": (left + right) / 2, "y": top, "xref": "paper", "yref": "paper"}
        where |= {"xanchor": "center", "yanchor": "bottom"}
        layout["annotations"].append({"text": escaped(panel.title), "showarrow": False, **where})
    labels = {choice: label for choice, (label, _) in figure.legend.items()}
    layout |= {"showlegend": len(labels) > 1, "margin": {"t": 90}}
    return Drawing(data=list(_with_legend(traces, labels)), layout=layout)


def _alone(trace: Spec, number: str, right: float, middle: float, height: float) -> Spec:
    """Put a trace into its place. A matrix gets what the report's page would give it: its colours, and the names that
    appear when one points at a cell."""
    placed = {**trace, "xaxis": f"x{number}", "yaxis": f"y{number}"}
    if trace["type"] == "heatmap":
        placed["customdata"] = [[[row, column] for column in trace["x"]] for row in trace["y"]]
        placed["colorbar"] = {**trace["colorbar"], "x": right, "y": middle, "len": height}
        placed |= {"colorscale": SCALES[trace["meta"]]} if trace["meta"] in SCALES else {}
    return placed


def _with_legend(traces: Iterable[Spec], labels: Mapping[str, str]) -> Iterator[Spec]:
    """Name each line of a comparison once; a click there hides or shows all that belongs to it."""
    named = set[str]()
    for trace in traces:
        choice = trace.get("legendgroup", "")
        first = choice in labels and choice not in named and trace.get("fill") is None
        named |= {choice} if first else set()
        yield {**trace, "showlegend": first, **({"name": escaped(labels[choice])} if first else {})}


def histogram(runs: Mapping[str, Sequence[float]], metric: Metric) -> Any:
    """Draw how many clients of each run, by its name, have which value, as a figure of plotly."""
    from plotly.graph_objects import Figure as Drawing

    factor = 100 if metric.percent else 1
    values = {name: factor * np.array(of_run) for name, of_run in runs.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(values.values())), "auto")
    bars = [
        {
            "type": "bar",
            "name": escaped(name),
            "x": (edges[:-1] + edges[1:]) / 2,
            "y": np.histogram(of_run, edges)[0],
            "customdata": np.stack([edges[:-1], edges[1:]], axis=1),
            "hovertemplate": "%{y} clients: %{customdata[0]:.4g} to %{customdata[1]:.4g}",
            "marker": {"color": style.colour},
        }
        for (name, of_run), style in zip(values.items(), styles([(name, "") for name in values]).values(), strict=True)
    ]
    label = f"test {metric.title}{', %' if metric.percent else ''}"
    layout = {"xaxis": {"title": {"text": escaped(label)}}, "yaxis": {"title": {"text": "clients"}}, "bargap": 0.05}
    return Drawing(data=bars, layout=layout)

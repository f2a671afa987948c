"""Figures of papers, drawn again from our numbers: learning curves, and histograms of the clients' gains."""

from pathlib import Path

import numpy as np

from fedtailor.reporting.marks import Array, Curve, Figure, Panel, styles
from fedtailor.reporting.paper import save
from fedtailor.server.records import Plain


def draw_outcome(outcome: Plain, stem: Path) -> list[Path]:
    """Draw what a reproduced figure shows, in files beside its numbers; nothing without curves, or matplotlib."""
    figure = figure_of(outcome, stem.name)
    if figure is None:
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    return list(save([figure], stem.parent))


def figure_of(outcome: Plain, name: str) -> Figure | None:
    """Make a figure of an outcome's curves, and of its histogram; None without curves."""
    rows = [row for row in outcome["rows"] if row.get("curve")]
    if not rows:
        return None
    looks = styles([(row["title"], row["row"]) for row in rows])
    unit = "step" if outcome["measure"] == "explicit" else "epoch"
    curves = [
        Curve(np.arange(len(row["curve"])), np.array(row["curve"]), title, looks[title], choice=title)
        for row in rows
        if (title := row["title"])
    ]
    panels = [Panel("", curves, unit, "mean test accuracy in %")]
    if bins := outcome.get("bins"):
        outlines = [
            Curve(_outline(bins), np.repeat(row["histogram"], 2), title, looks[title], choice=title)
            for row in rows
            if (title := row["title"])
        ]
        panels.append(Panel("", outlines, "gain in points", "clients"))
    return Figure(name, outcome["title"], "", panels)


def _outline(bins: list[float]) -> Array:
    """Both ends of each bar of a histogram."""
    ends: Array = np.repeat(bins, 2)[1:-1]
    return ends

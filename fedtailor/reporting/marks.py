"""The content of figures as plain numbers: the HTML report and the figures for a paper are two drawings of the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Dash = Literal["solid", "dash", "dot", "dashdot"]

# As far apart as eight colours and a grey can be with any kind of colour vision, on white and dark pages alike.
PALETTE = ("#4286e9", "#d45c00", "#108d5f", "#bc72bd", "#e39d00", "#21b9f5", "#8b42b0", "#c0b054")
GREY = "#8a8f98"
EDGE = 0.45  # opacity of a band's edges
NAME, NODE_NAME = 16, 10  # letters of a client's name at an axis, and in a network, at most
DASHES: tuple[Dash, ...] = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Style:
    """The look of everything of one method, in all figures."""

    colour: str = GREY
    dash: Dash = "solid"


def styles(methods: Sequence[tuple[str, str]]) -> dict[str, Style]:
    """A style for each line of a comparison, given as (title, method): grey for Local, the reference, and colours in
    turn for the others."""
    local = [title for title, method in methods if method == "local"]
    others = [title for title, method in methods if method != "local"]
    grey = {title: Style(GREY, DASHES[place % len(DASHES)]) for place, title in enumerate(local)}
    return grey | {
        title: Style(PALETTE[place % len(PALETTE)], DASHES[place // len(PALETTE) % len(DASHES)])
        for place, title in enumerate(others)
    }


@dataclass(frozen=True)
class Curve:
    """A line, with a band around it where `low` and `high` are given. With `choice` it can be chosen by that name."""

    x: Array
    y: Array
    label: str
    style: Style = Style()
    low: Array | None = None
    high: Array | None = None
    choice: str | None = None
    kind: Literal["main", "one of many", "fit"] = "main"  # a fit is there to read others by


@dataclass(frozen=True)
class Points:
    x: Array
    y: Array
    text: Sequence[str]  # what is said of each
    style: Style = Style()
    choice: str | None = None
    label: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars of clients. `names` are written below them, and `text` is all that is said of each."""

    y: Array
    text: Sequence[str]
    style: Style = Style()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Heat:
    """A matrix as colours. `frames` are its versions by name, the last of which is shown first."""

    rows: Sequence[str]
    columns: Sequence[str]
    frames: dict[str, Array]
    measure: str  # what the values are
    scale: Literal["sequential", "diverging", "kinds"] = "sequential"
    limits: tuple[float, float] | None = None
    kinds: Sequence[str] = ()  # names of the values 0, 1, … where they are no amounts
    written: bool = False  # the values, in the cells

    @property
    def square(self) -> bool:
        return list(self.rows) == list(self.columns)

    @property
    def colours(self) -> list[str]:
        """The colours of the kinds: grey for the first."""
        return [f"{GREY}44", *(PALETTE[place % len(PALETTE)] for place in range(len(self.kinds) - 1))]

    @property
    def last(self) -> Array:
        return self.frames[next(reversed(self.frames))]

    @property
    def range(self) -> tuple[float, float]:
        """The values at the two ends of the colours; around 0 where they diverge."""
        if self.limits is None:
            values = np.concatenate([frame.ravel() for frame in self.frames.values()])
            values = values[np.isfinite(values)]
            low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
        else:
            low, high = map(float, self.limits)
        if self.scale == "diverging":
            high = max(abs(low), abs(high))
            low = -high
        return low, high if high > low else low + 1.0


@dataclass(frozen=True)
class Network:
    """Nodes on a circle, and weighted arrows between them: `edges` are (from, to, weight)."""

    nodes: Sequence[str]
    text: Sequence[str]
    sizes: Array
    edges: Sequence[tuple[int, int, float]]
    style: Style = Style()

    def strength(self, weight: float) -> float:
        """0 for the lightest arrow, 1 for the heaviest."""
        weights = [weight for _, _, weight in self.edges]
        return (weight - min(weights)) / (max(weights) - min(weights)) if max(weights) > min(weights) else 0.5

    def places(self) -> Array:
        """The nodes' places: (x, y), clockwise from the top."""
        turns = np.pi / 2 - 2 * np.pi * np.arange(len(self.nodes)) / max(len(self.nodes), 1)
        return np.stack([np.cos(turns), np.sin(turns)], axis=1)

    def side(self, node: int) -> tuple[str, str]:
        """On which side of a node its name is written, outside of the circle: vertically and horizontally."""
        x, y = self.places()[node].round(3)
        return (
            "top" if y > 0.3 else "bottom" if y < -0.3 else "middle",
            "right" if x > 0 else "left" if x < 0 else "center",
        )

    def reach(self, letter: float) -> float:
        """Measure the reach of the names from the centre to both sides, for letters of this width."""
        return 1.2 + letter * max((min(len(name), NODE_NAME) for name in self.nodes), default=0)

    def path(self, start: int, end: int, points: int = 40) -> Array:
        """A bow from node to node that bends towards the centre and stops short of the end."""
        places = self.places()
        a, c = places[start], places[end]
        b = 0.7 * (a + c) / 2
        t = np.linspace(0, 1, points)[:, None]
        bow: Array = (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t**2 * c
        free = (np.linalg.norm(bow - a, axis=1) > 0.06) & (np.linalg.norm(bow - c, axis=1) > 0.1)
        return bow[free] if free.sum() > 1 else bow


def band_fill(marks: Sequence["Mark"]) -> float:
    """The opacity of a panel's bands: the fainter the more there are, as many on top of each other would mix to grey.
    They can be told apart by their edges."""
    bands = sum(isinstance(mark, Curve) and mark.low is not None for mark in marks)
    return min(0.16, 0.2 / max(bands, 1))


def short_names(names: Sequence[str], most: int = NAME) -> list[str]:
    """Cut long names: at the end or, where they would then be the same, in the middle. Equals are numbered."""
    half, short = most // 2, list(names)
    for start, end in ((most - 1, 0), (most - half - 1, half)):
        short = [n if len(n) <= most else f"{n[:start].rstrip()}…{n[len(n) - end :]}" for n in names]
        if len(set(short)) == len(set(names)):
            return short
    return [n if len(n) <= most else f"{n[: half - 1]}…#{place}" for place, n in enumerate(names, 1)]


Mark = Curve | Points | Bars | Heat | Network


@dataclass(frozen=True)
class Panel:
    """One pair of axes. With `choice` the whole panel can be chosen by that name."""

    title: str
    marks: Sequence[Mark]
    x: str = ""
    y: str = ""
    choice: str | None = None
    y_limits: tuple[float, float] | None = None
    tall: bool = False  # as high as two others


@dataclass(frozen=True)
class Figure:
    """A figure and its caption."""

    name: str  # of its files
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 2  # panels side by side
    tab: str = ""  # its name among figures that take turns in one place

    @property
    def legend(self) -> dict[str, tuple[str, Style]]:
        """The label and the look of everything that can be chosen, by the name of the choice."""
        marks = [mark for panel in self.panels for mark in panel.marks if isinstance(mark, Curve | Points)]
        return {mark.choice: (mark.label, mark.style) for mark in marks if mark.choice}

    @property
    def frames(self) -> list[str]:
        """The names of the frames that the figure can show."""
        heats = [mark for panel in self.panels for mark in panel.marks if isinstance(mark, Heat)]
        return max((list(heat.frames) for heat in heats), key=len, default=[])

"""The architecture page: the package's rooms and their imports, drawn from the code in layers."""

import ast
import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from docs.building.imports import DOOR, PACKAGE, Graph, reduced, rooms
from docs.building.reference import table

GAP, HEIGHT, STEP = 18, 26, 62  # between neighbours of a layer; of a box; from layer to layer
SWEEPS = 12  # over all layers, to put what is connected above each other


def imports() -> str:
    """The picture, and a table of the rooms."""
    graph = rooms()
    rows = (
        [f"[`{name}`](../{_file(name)})", _summary(name), ", ".join(f"`{other}`" for other in sorted(graph[name]))]
        for name in sorted(graph, key=lambda name: (name != DOOR, name))
    )
    return f"{picture(graph)}\n\n## The rooms\n\n" + table(("room", "subject", "imports from"), rows)


def picture(graph: Graph) -> str:
    """The graph as SVG, the highest layer at the top."""
    edges = reduced(graph)
    levels = layered(edges)
    places = placed(edges, levels)
    width = max(x + _width(point) / 2 for point, (x, _) in places.items()) + GAP
    height = (max(levels.values()) + 1) * STEP
    lines = "".join(
        f'<path class="from-{name} to-{other}" d="{_curve([places[point] for point in _way(name, other, levels)])}"/>'
        for name in sorted(edges)
        for other in sorted(edges[name])
    )
    boxes = "".join(_box(name, places[name]) for name in sorted(graph))
    return (
        f'<div class="import-graph"><style>{_style(graph)}</style>'
        f'<svg viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img" '
        f'aria-label="The imports between the rooms of the package">{lines}{boxes}</svg></div>'
    )


def layered(edges: Graph) -> dict[str, int]:
    """The layer of each room: above all that it imports, and otherwise just below those that import it."""
    levels: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in levels:
            levels[name] = 1 + max((level(other) for other in edges[name]), default=-1)
        return levels[name]

    for name in edges:
        level(name)
    for name in sorted(levels, key=lambda name: -levels[name]):
        above = [levels[other] for other in edges if name in edges[other]]
        levels[name] = min(above) - 1 if above else levels[name]
    return levels


Point = tuple[float, float]


def placed(edges: Graph, levels: Mapping[str, int]) -> dict[str, Point]:
    """The place of each room, and of each crossing of a line with a layer between its ends (see `_way`)."""
    layers: dict[int, list[str]] = defaultdict(list)
    neighbours: dict[str, dict[int, list[str]]] = defaultdict(lambda: {1: [], -1: []})
    for name in sorted(edges):
        layers[levels[name]].append(name)
    for name in sorted(edges):
        for other in sorted(edges[name]):
            way = _way(name, other, levels)
            for depth, crossing in enumerate(way[1:-1], 1):
                layers[levels[name] - depth].append(crossing)
            for upper, lower in pairwise(way):
                neighbours[upper][-1].append(lower)
                neighbours[lower][1].append(upper)
    x = {point: 0.0 for layer in layers.values() for point in layer}
    for layer in layers.values():
        x |= dict(zip(layer, apart([0.0] * len(layer), layer), strict=True))
    for sweep in range(2 * SWEEPS):
        side = 1 if sweep % 2 == 0 else -1  # look at the layer above while going down, and the other way round
        for number in sorted(layers, reverse=side == 1):
            layer = layers[number]
            wanted = {point: fmean([x[other] for other in neighbours[point][side]] or [x[point]]) for point in layer}
            if sweep >= SWEEPS:  # the order stands; from now on both sides count
                both = {point: neighbours[point][1] + neighbours[point][-1] for point in layer}
                wanted = {point: fmean([x[other] for other in both[point]] or [x[point]]) for point in layer}
            else:
                layer.sort(key=lambda point: (wanted[point], point))
            x |= dict(zip(layer, apart([wanted[point] for point in layer], layer), strict=True))
    left = min(x[point] - _width(point) / 2 for point in x) - GAP
    top = max(levels.values())
    return {
        point: (x[point] - left, (top - number) * STEP + STEP / 2)
        for number, layer in layers.items()
        for point in layer
    }


def apart(wanted: Sequence[float], points: Sequence[str]) -> list[float]:
    """Place a layer's points as near to where they are wanted as their order and widths allow (least squares)."""
    offsets = [0.0]
    for one, other in pairwise(points):
        offsets.append(offsets[-1] + (_width(one) + _width(other)) / 2 + GAP)
    blocks: list[list[float]] = []  # of neighbours that touch: the mean, and how many
    for value, offset in zip(wanted, offsets, strict=True):
        blocks.append([value - offset, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, count = blocks.pop()
            before, n = blocks[-1]
            blocks[-1] = [(before * n + mean * count) / (n + count), n + count]
    means = [mean for mean, count in blocks for _ in range(int(count))]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _way(name: str, other: str, levels: Mapping[str, int]) -> list[str]:
    """A line from room to room, by way of a point in each layer between."""
    between = range(levels[name] - 1, levels[other], -1)
    return [name, *(f"{name}>{other}@{number}" for number in between), other]


def _width(point: str) -> float:
    return 2.0 if "@" in point else 8.0 * len(point) + 18


def _curve(points: Sequence[Point]) -> str:
    (x, y), *_ = points
    path, bend = f"M{x:.0f} {y + HEIGHT / 2:.0f}", STEP / 2
    for number, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        y0 += HEIGHT / 2 if number == 0 else 0
        y1 -= HEIGHT / 2 if number == len(points) - 2 else 0
        path += f"C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    return path


def _box(name: str, place: Point) -> str:
    x, y = place
    width = _width(name)
    kind = "room package" if (PACKAGE / name).is_dir() else "room"
    return (
        f'<g class="{kind}" id="room-{name}"><title>{html.escape(_summary(name))}</title>'
        f'<rect x="{x - width / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{width:.0f}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}">{name}</text></g>'
    )


def _style(graph: Graph) -> str:
    """Light up the lines of a room while the mouse is on it."""
    lit = "{stroke:var(--md-accent-fg-color);stroke-width:2.5}"
    return "".join(f"svg:has(#room-{name}:hover) :is(.from-{name},.to-{name}){lit}" for name in sorted(graph))


def _file(name: str) -> str:
    if name == DOOR:
        return f"{DOOR}/__init__.py"
    return f"{DOOR}/{name}" if (PACKAGE / name).is_dir() else f"{DOOR}/{name}.py"


def _summary(name: str) -> str:
    """The first sentence of a room's docstring."""
    path = PACKAGE.parent / _file(name)
    text = ast.get_docstring(ast.parse((path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8")))
    return " ".join((text or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")

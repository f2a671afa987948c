"""Shifts of features: what a client's own camera, sensor or laboratory does to all of its samples.

A shift is a function of (samples, values, stream). Which values a client has is drawn from a stream of its own, once,
when the federation is made; its samples are changed then, and nothing behind this module knows of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, cos, isfinite, radians, sin

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedtailor._common.errors import FedtailorError, listed, unknown
from fedtailor.data.columns import Column
from fedtailor.training.inputs import Inputs
from fedtailor.training.streams import numpy_stream

Shift = dict[str, list[float]]  # a client's, in the order in which they are applied: values by name
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Context:
    """Facts that a shift may need beside its values."""

    unit: Tensor  # of each channel or column, what counts as 1: the range of an image's pixels, else its deviation
    missing: float  # stands for a value that is not there
    rng: np.random.Generator


@dataclass(frozen=True)
class Kind:
    """A kind of shift. `apply(samples, values, context)` returns the samples as the client has them."""

    description: str
    apply: Callable[[Tensor, Tensor, Context], Tensor]
    neutral: float  # the value that changes nothing
    least: float
    most: float
    images: bool | None = None  # only for images, or only for others
    each: bool = False  # a value for each channel or column
    whole: bool = False


@dataclass(frozen=True)
class Values:
    """The values that clients draw from: one of several, or any from the first to the last."""

    values: tuple[float, ...]
    between: bool

    def draw(self, n: int, rng: np.random.Generator) -> list[float]:
        drawn = rng.uniform(self.values[0], self.values[-1], n) if self.between else rng.choice(self.values, n)
        return [float(value) for value in drawn]


@dataclass(frozen=True)
class Asked:
    """A shift as a partition asks for it, with the values for training clients and those for new ones."""

    name: str
    training: Values
    new: Values


# --- what is written: iid+rotate:0,90/180+noise:0..0.2 ---


def divided(partition: str) -> tuple[str, list[str]]:
    """Divide a partition into how samples are shared, and the shifts behind that."""
    pieces = partition.split("+")
    n = len(pieces)
    while n and pieces[n - 1].partition(":")[0] in SHIFTS:
        n -= 1
    return "+".join(pieces[:n]), pieces[n:]


def with_shifts(partition: str) -> tuple[str, list[Asked]]:
    """Read the shifts of a partition; return it without them."""
    shared, written = divided(partition)
    if written and not shared:
        raise FedtailorError(
            f"The partition {partition!r} says how features shift, but not how samples are shared: write for example "
            f"'iid+{partition}'."
        )
    last = shared.rpartition("+")[2]
    if "+" in shared.removeprefix("natural+") and ":" in last:  # otherwise a file may have this name
        raise unknown("shift", last.partition(":")[0], SHIFTS)
    asked = [_asked(text) for text in written]
    names = [one.name for one in asked]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FedtailorError(f"The partition {partition!r} has the shift {twice[0]!r} twice: give it once.")
    return shared, asked


def _asked(text: str) -> Asked:
    name, _, written = text.partition(":")
    training, slash, new = written.partition("/")
    read = _values(name, training, text)
    return Asked(name, read, _values(name, new, text) if slash else read)


def _values(name: str, written: str, text: str) -> Values:
    kind = SHIFTS[name]
    between = ".." in written
    try:
        values = tuple(map(float, written.split(".." if between else ",")))
    except ValueError:
        values = ()
    fits = all(isfinite(v) and kind.least <= v <= kind.most and not (kind.whole and v != int(v)) for v in values)
    if not values or not fits or (between and (len(values) != 2 or kind.whole or values[0] > values[1])):
        numbers = "whole numbers" if kind.whole else "numbers"
        example = f"{name}:{kind.least:g},{kind.least + 2:g}" if kind.whole else f"{name}:{kind.neutral:g},0.5"
        ways = "" if kind.whole else f", or a range, as in '{name}:0..0.5'"
        raise FedtailorError(
            f"The shift {text!r} needs {numbers} from {kind.least:g} to {kind.most:g}: write for example {example!r}"
            f"{ways}."
        )
    return Values(values, between)


# --- what is done ---


def shifted(
    x: Inputs,
    asked: Sequence[Asked],
    bounds: Tensor,
    new: frozenset[int],
    seed: int,
    name: str,
    columns: Sequence[Column] = (),
) -> tuple[Shift, ...]:
    """Draw each client's shifts and change its samples, in place. Return the shifts, client by client.

    Samples are floating-point numbers: images from 0 to 1, features, or the cells of a table's `columns`.
    """
    if not asked:
        return ()
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        raise FedtailorError(
            f"Features of {name!r} cannot be shifted, as they are no images or numbers in memory: leave "
            f"{asked[0].name!r} out of the partition."
        )
    for one in asked:
        _check(one, x, name, bool(columns))
    unit = torch.ones(x.shape[1], dtype=x.dtype)
    if x.ndim != 4:
        trains = torch.cat([torch.arange(start, end) for start, end in bounds[: len(bounds) - len(new), :2].tolist()])
        unit = _deviations(x[trains], columns)
    done = []
    for client, (start, *_, end) in enumerate(bounds.tolist()):
        shift: Shift = {}
        for one in asked:
            rng = numpy_stream(seed, "shift", one.name, client)
            shift[one.name] = values = _draw(one, client in new, x.shape[1], columns, rng)
            if one.name == "missing" or any(value != SHIFTS[one.name].neutral for value in values):
                drawn = torch.tensor(values, dtype=x.dtype)
                context = Context(unit, float("nan") if columns else 0.0, rng)
                x[start:end] = SHIFTS[one.name].apply(x[start:end], drawn, context)
        done.append(shift)
    return tuple(done)


def _draw(one: Asked, new: bool, width: int, columns: Sequence[Column], rng: np.random.Generator) -> list[float]:
    kind, values = SHIFTS[one.name], one.new if new else one.training
    if one.name == "missing":  # so many columns, drawn
        (n,) = values.draw(1, rng)
        return [float(place) for place in sorted(rng.choice(width, int(n), replace=False).tolist())]
    drawn = values.draw(width if kind.each else 1, rng)
    if kind.each and columns:  # categories have no scale
        drawn = [v if column.kind == "number" else kind.neutral for v, column in zip(drawn, columns, strict=True)]
    return drawn


def _check(one: Asked, x: Tensor, name: str, table: bool) -> None:
    kind, images = SHIFTS[one.name], x.ndim == 4
    if kind.images is not None and kind.images != images:
        samples = "images" if images else "rows of a table" if table else "no images"
        fitting = [other for other, its in SHIFTS.items() if its.images in (None, images)]
        raise FedtailorError(
            f"The shift {one.name!r} does not fit {name!r}, whose samples are {samples}: take one of {listed(fitting)}."
        )
    if one.name == "missing" and max(one.training.values + one.new.values) >= x.shape[1]:
        raise FedtailorError(f"All {x.shape[1]} columns of {name!r} would be missing: ask for fewer.")


def _deviations(x: Tensor, columns: Sequence[Column]) -> Tensor:
    """Compute the standard deviation of each column or channel; 0 for categories and what has no cells."""
    cells = x.double().transpose(0, 1).reshape(x.shape[1], -1).numpy()
    there = ~np.isnan(cells)
    count = np.maximum(there.sum(1), 1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.where(there, cells, 0.0).sum(1) / count
        spread = np.sqrt((np.where(there, cells - mean[:, None], 0.0) ** 2).sum(1) / count)
    if columns:
        spread[[column.kind != "number" for column in columns]] = 0.0
    return torch.from_numpy(spread).to(x.dtype)


# --- the kinds ---


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Shape a value for each channel (or one for all) so that it meets the samples' second dimension."""
    return values.view(-1, *(1,) * (x.ndim - 2))


def _rotate(x: Tensor, values: Tensor, context: Context) -> Tensor:
    """Turn images counter-clockwise about their middle; what comes in from outside repeats the edge. Quarter turns
    move pixels and change none."""
    angle, (n, channels, height, width) = float(values), x.shape
    if angle % (90 if height == width else 180) == 0:
        return torch.rot90(x, int(angle // 90), (2, 3))
    c, s = cos(radians(angle)), sin(radians(angle))
    turn = torch.tensor([[[c, -s * height / width, 0.0], [s * width / height, c, 0.0]]], dtype=x.dtype)
    flat = x.reshape(1, n * channels, height, width)  # one grid for all
    grid = functional.affine_grid(turn, list(flat.shape), align_corners=False)
    return functional.grid_sample(flat, grid, padding_mode="border", align_corners=False).view(x.shape)


def _contrast(x: Tensor, values: Tensor, context: Context) -> Tensor:
    mean = x.double().mean((1, 2, 3), keepdim=True).to(x.dtype)
    return mean + values * (x - mean)


def _blur(x: Tensor, values: Tensor, context: Context) -> Tensor:
    """Weigh each pixel with its neighbours, in rows and then in columns; beyond the edge are copies of it."""
    reach = ceil(3 * float(values))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / float(values)) ** 2)
    for dim in (2, 3):
        size = x.shape[dim]
        places = torch.arange(size)
        moved = (x.index_select(dim, (places + k).clamp(0, size - 1)) for k in range(-reach, reach + 1))
        x = sum((float(w) * m for w, m in zip(weights / weights.sum(), moved, strict=True)), torch.zeros_like(x))
    return x


def _resolution(x: Tensor, values: Tensor, context: Context) -> Tensor:
    """Give all pixels of a square the square's mean."""
    side = int(values)
    small = functional.avg_pool2d(x, side, ceil_mode=True)
    large = small.repeat_interleave(side, 2).repeat_interleave(side, 3)
    return large[:, :, : x.shape[2], : x.shape[3]]


def _scale(x: Tensor, values: Tensor, context: Context) -> Tensor:
    return x * _per_channel(values, x)


def _offset(x: Tensor, values: Tensor, context: Context) -> Tensor:
    return x + _per_channel(values * context.unit, x)


def _noise(x: Tensor, values: Tensor, context: Context) -> Tensor:
    return x + _per_channel(values * context.unit, x) * torch.from_numpy(
        context.rng.standard_normal(tuple(x.shape))
    ).to(x.dtype)


def _missing(x: Tensor, values: Tensor, context: Context) -> Tensor:
    return x.index_fill(1, values.long(), context.missing)


SHIFTS: dict[str, Kind] = {
    "rotate": Kind("images turned by so many degrees, counter-clockwise", _rotate, 0, -360, 360, images=True),
    "contrast": Kind("images' distance from their mean, times this", _contrast, 1, 0, 100, images=True),
    "brightness": Kind("images with this added, 1 from black to white", _offset, 0, -1, 1, images=True),
    "blur": Kind("images blurred by a Gaussian of so many pixels", _blur, 0, 0, 20, images=True),
    "resolution": Kind("images in squares of so many pixels a side", _resolution, 1, 1, 1000, images=True, whole=True),
    "scale": Kind("each colour, channel or column times this", _scale, 1, -1000, 1000, each=True),
    "offset": Kind("each colour, channel or column plus so many of its deviations", _offset, 0, -1000, 1000, each=True),
    "noise": Kind("Gaussian noise of so many deviations, in every sample anew", _noise, 0, 0, 1000),
    "missing": Kind(
        "so many columns missing, drawn at random; a sensor then shows 0", _missing, 0, 0, 10**6, False, whole=True
    ),
}


def in_words(shift: Shift, names: Sequence[str] = ()) -> str:
    """Say what a client's shift is; `names` are those of the columns."""
    return ", ".join(f"{name} {_said(name, values, names)}" for name, values in shift.items())


def _said(name: str, values: list[float], names: Sequence[str]) -> str:
    if name == "missing":
        gone = [names[int(place)] if names else str(int(place)) for place in values]
        return listed(gone) if gone else "nothing"
    if len(values) > 4:
        return f"{min(values):.3g} to {max(values):.3g}"
    return " ".join(f"{value:.3g}" for value in values)


def shifts_catalogue() -> Iterator[tuple[str, str]]:
    """List the shifts: how each is written, and one line on what it does."""
    for name, kind in SHIFTS.items():
        yield f"…+{name}:{'K,…' if kind.whole else 'VALUES'}", kind.description

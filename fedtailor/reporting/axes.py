"""The axes of curves: rounds, bytes, the time of this machine, or the virtual time of the clients' systems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.engines.result import RunResult
from fedtailor.reporting.marks import Array
from fedtailor.studies.summary import Summary

Along = Literal["rounds", "bytes", "time", "clock"]
BYTES = (("B", 1), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
TIMES = (("s", 1), ("min", 60), ("h", 3600))


@dataclass(frozen=True)
class Axis:
    """An axis of curves: `along` has its value at the end of each round of a run, NaN where it has none."""

    name: Along
    tab: str
    title: str
    along: Callable[[RunResult], Array]

    def at(self, result: RunResult, rounds: Sequence[int]) -> Array:
        """The values at some of a run's rounds."""
        known = dict(zip(_numbers(result), self.along(result), strict=True))
        return np.array([known.get(round, np.nan) for round in rounds], dtype=float)


def _numbers(result: RunResult) -> Array:
    return np.array([record.round for record in result.rounds], dtype=float)


ROUNDS = Axis("rounds", "over rounds", "round", _numbers)


def chosen_axis(summary: Summary, name: Along) -> Axis:
    """Find what curves are to be drawn over; refuse what these runs do not have."""
    if name not in (known := get_args(Along)):
        raise unknown("axis", name, known)
    if (axis := axes(summary).get(name)) is None:
        raise FedtailorError(
            "These runs have no virtual time, as their clients have no system: take --x rounds, bytes or time."
        )
    return axis


def axes(summary: Summary) -> dict[Along, Axis]:
    """List the axes of the curves of these runs: virtual time only where clients have a system."""
    others = (
        _in_units(summary, Axis("bytes", "over bytes", "sent up and down until then", _sent), BYTES),
        _in_units(summary, Axis("time", "over time", "time until then", _took), TIMES),
        _in_units(summary, Axis("clock", "over virtual time", "virtual time until then", _clock), TIMES),
    )
    return {axis.name: axis for axis in (ROUNDS, *others) if axis is not None}


def _in_units(summary: Summary, axis: Axis, units: Sequence[tuple[str, float]]) -> Axis | None:
    """Choose a unit for an axis by its largest value; None if no run has any."""
    results = [result for line in summary.lines for result in line.results]
    ends = [end for result in results if np.isfinite(end := axis.along(result)[-1])]
    if not ends:
        return None
    unit, size = next(((n, s) for n, s in reversed(units) if max(ends) >= 2 * s), units[0])
    return replace(axis, title=f"{axis.title}, {unit}", along=lambda result: axis.along(result) / size)


def _sent(result: RunResult) -> Array:
    return np.cumsum([float(record.bytes) for record in result.rounds])


def _took(result: RunResult) -> Array:
    return np.cumsum([float(record.seconds) for record in result.rounds])


def _clock(result: RunResult) -> Array:
    return np.array([np.nan if record.clock is None else record.clock for record in result.rounds])

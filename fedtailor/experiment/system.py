"""Uneven clients as a setting of the experiment: how fast each computes, sends and receives, and when it is there.

All of it is arithmetic on virtual seconds: nothing waits, and every machine finds the same numbers.
"""

import csv
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import field_validator

from fedtailor._common.errors import FedtailorError, shown
from fedtailor.experiment.parts import Parts
from fedtailor.training.streams import numpy_stream

if TYPE_CHECKING:
    import numpy as np

COLUMNS = ("client", "speed", "bandwidth", "there")  # of a file
PERIOD = 86400.0  # seconds after which presence repeats


class System(Parts):
    """The abilities of clients' machines.

    `speeds` are samples a second that a client computes gradients of, `bandwidth` bytes a second in each direction: a
    number for all clients, or a distribution over them, by its median or its bounds. `stragglers=0.1:10` makes a tenth
    of the clients ten times slower. `availability=0.5:3600` has a client there half of every hour, each from another
    minute on.
    """

    example: ClassVar[str] = "speeds=lognormal:0.5, bandwidth=1e6, stragglers=0.1:10, availability=0.5:3600"
    bare: ClassVar[bool] = False

    speeds: str
    bandwidth: str = "inf"
    stragglers: str = ""
    availability: str = ""

    @field_validator("speeds", "bandwidth", mode="before")
    @classmethod
    def _distribution(cls, value: Any) -> str:
        kind, *numbers = _numbers(value, "1000, lognormal:0.5:1000 (spread and median) or uniform:100:1000")
        fits = {
            "": len(numbers) == 1 and numbers[0] > 0,
            "lognormal": len(numbers) in (1, 2) and 0 <= numbers[0] < inf and all(0 < n < inf for n in numbers[1:]),
            "uniform": len(numbers) == 2 and 0 < numbers[0] <= numbers[1] < inf,
        }
        if not fits.get(kind, False):
            raise ValueError("1000, lognormal:0.5:1000 (spread and median) or uniform:100:1000")
        return str(value).strip()

    @field_validator("stragglers", mode="before")
    @classmethod
    def _stragglers(cls, value: Any) -> str:
        kind, *numbers = _numbers(value, "SHARE:TIMES, like 0.1:10")
        if kind or len(numbers) != 2 or not (0 < numbers[0] <= 1 <= numbers[1] < inf):
            raise ValueError("SHARE:TIMES, like 0.1:10")
        return str(value).strip()

    @field_validator("availability", mode="before")
    @classmethod
    def _availability(cls, value: Any) -> str:
        kind, *numbers = _numbers(value, "SHARE or SHARE:SECONDS, like 0.5:3600")
        if kind or len(numbers) not in (1, 2) or not 0 < numbers[0] <= 1 or not all(0 < n < inf for n in numbers[1:]):
            raise ValueError("SHARE or SHARE:SECONDS, like 0.5:3600")
        return str(value).strip()

    def machines(self, clients: int, seed: int) -> "Machines":
        """Draw the machines of so many clients: those of the first ones are the same however many follow."""
        import numpy as np

        speed = _drawn(self.speeds, numpy_stream(seed, "system", "speeds"), clients, 1000.0)
        bandwidth = _drawn(self.bandwidth, numpy_stream(seed, "system", "bandwidth"), clients, 1e6)
        if self.stragglers:
            _, share, times = _numbers(self.stragglers, "")
            count = max(1, round(share * clients))
            slow = numpy_stream(seed, "system", "stragglers").random(clients).argsort(kind="stable")[:count]
            speed[slow] /= times
            bandwidth[slow] /= times
        start, length, period = np.zeros(clients), np.full(clients, inf), np.full(clients, inf)
        if self.availability:
            _, share, *every = _numbers(self.availability, "")
            period[:] = every[0] if every else PERIOD
            length = share * period
            start = numpy_stream(seed, "system", "availability").random(clients) * period
        return Machines(speed, bandwidth, start, length, period)


@dataclass
class Machines:
    """The machines of all clients, a number each: samples a second, bytes a second, and the first time from which on,
    for how long, and after how many seconds again each is there."""

    speed: "np.ndarray"
    bandwidth: "np.ndarray"
    start: "np.ndarray"
    length: "np.ndarray"
    period: "np.ndarray"

    @classmethod
    def of(cls, system: str, names: list[str], seed: int) -> Self | "Machines":
        """Make the machines that a setting names: a file of them, or what is drawn for clients of these names."""
        if not names_file(system):
            return System.parse(system).machines(len(names), seed)
        return cls._read(Path(system), names)

    @classmethod
    def _read(cls, path: Path, names: list[str]) -> Self:
        """Read a CSV file with a line for each client."""
        import numpy as np

        rows = dict(_lines(path))
        found = {}
        for name in names:
            if name not in rows:
                raise FedtailorError(f"{path} has no line for the client {name}: it must have one for each client.")
            found[name] = rows[name]
        return cls(*(np.array(column, float) for column in zip(*found.values(), strict=True)))

    def absence(self, time: float) -> "np.ndarray":
        """Count the seconds from a time until each client is there; 0 for those that are, infinite if never again."""
        import numpy as np

        since = self._since(time)
        next_time = np.where(since < 0, -since, np.where(np.isinf(self.period), inf, self.period - since))
        return np.where((since >= 0) & (since < self.length - _close(time)), 0.0, next_time)

    def presence(self, client: int, time: float) -> float:
        """Count the seconds that a client which is there stays from a time on."""
        return float(self.length[client] - self._since(time)[client])

    def _since(self, time: float) -> "np.ndarray":
        """Count the seconds since each client's last coming: negative if it was not there yet. Who comes now is there,
        and who goes now is not, whatever was lost in rounding."""
        import numpy as np

        since, close = time - self.start, _close(time)
        repeats = np.isfinite(self.period)
        since[repeats] %= self.period[repeats]
        since[(np.abs(since) < close) | (repeats & (self.period - since < close))] = 0
        return since

    def seconds(self, client: int, down: int, differentiated: int, up: int) -> tuple[float, float]:
        """Count the seconds that a client's transfers take, and those of its computation."""
        bandwidth, speed = float(self.bandwidth[client]), float(self.speed[client])
        return (down + up) / bandwidth, differentiated / speed


def _close(time: float) -> float:
    """The seconds by which a time may be wrong: sums of many are rounded."""
    return 1e-9 * (1 + abs(time))


def names_file(system: str) -> bool:
    """Tell whether a setting names a file."""
    return system.lower().endswith(".csv")


def _numbers(value: Any, expected: str) -> tuple[Any, ...]:
    """Read `kind:number:number`, or numbers alone, for which the kind is empty."""
    kind, *rest = str(value).strip().split(":")
    try:
        return ("", *map(float, [kind, *rest])) if not kind.isalpha() or kind == "inf" else (kind, *map(float, rest))
    except ValueError:
        raise ValueError(expected) from None


def _drawn(text: str, stream: "np.random.Generator", clients: int, median: float) -> "np.ndarray":
    import numpy as np

    kind, *numbers = _numbers(text, "")
    if kind == "lognormal":
        spread, of = [*numbers, median][:2]
        drawn: np.ndarray = np.exp(float(spread) * stream.standard_normal(clients)) * float(of)
    elif kind == "uniform":
        drawn = float(numbers[0]) + stream.random(clients) * float(numbers[1] - numbers[0])
    else:
        drawn = np.full(clients, numbers[0])
    return drawn


def _lines(path: Path) -> list[tuple[str, list[float]]]:
    """Read the lines of a file: each client's name, and its numbers in the order of `Machines`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if missing := [name for name in COLUMNS[:2] if name not in (rows.fieldnames or [])]:
                raise FedtailorError(
                    f"{path} has no column {missing[0]!r}: it needs client and speed (samples a second), and may have "
                    "bandwidth (bytes a second) and there (like 0-3600, or 0-3600/86400 for every day)."
                )
            return [(str(row["client"]), _line(path, number, row)) for number, row in enumerate(rows, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedtailorError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _line(path: Path, number: int, row: dict[str, Any]) -> list[float]:
    found = []
    for name in ("speed", "bandwidth"):
        text = (row.get(name) or "").strip() or ("inf" if name == "bandwidth" else "")
        try:
            value = float(text)
        except ValueError:
            value = -1
        if not value > 0:
            raise FedtailorError(f"{path}, line {number}: its {name} is {shown(text)}, but must be a number above 0.")
        found.append(value)
    there = (row.get("there") or "").strip()
    window = re.fullmatch(r"([\d.]+)-([\d.]+)(?:/([\d.]+))?", there)
    try:
        start, end, period = (float(text) if text else inf for text in window.groups()) if window else (0.0, inf, inf)
    except ValueError:
        window, start, end, period = None, 0.0, inf, inf
    if there and (window is None or not start < end <= start + period):
        raise FedtailorError(
            f"{path}, line {number}: it is there {shown(there)}, but that must be like 0-3600 (from second to second), "
            "or 0-3600/86400 (again every day)."
        )
    return [*found, start, end - start, period]

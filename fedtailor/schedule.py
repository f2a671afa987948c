"""Hyper-parameters that may change from round to round.

A schedule is a number, or a text that says how it changes with the round t = 1, 2, …: so TOML, the command line and
Python hold it as it is.
"""

import re
from math import isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator

_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)"
_TIME = rf"(?:t|\(t\+{_NUMBER}\))"
_POWER = re.compile(rf"{_NUMBER}/{_TIME}(?:\^{_NUMBER})?")  # a / (t + c)^p
_GEOMETRIC = re.compile(rf"{_NUMBER}\*{_NUMBER}\^t")  # a * q^t
_FAR = 10**6  # rounds in which it must stay finite


def value_at(schedule: float | str, t: int) -> float:
    """Compute the value of a schedule in round t = 1, 2, …."""
    if not isinstance(schedule, str):
        return schedule
    text = re.sub(r"\s", "", schedule).lower().replace("sqrt(t)", "t^0.5")
    if power := _POWER.fullmatch(text):
        a, c, p = (float(number or default) for number, default in zip(power.groups(), (0, 0, 1), strict=True))
        return float(a / (t + c) ** p)
    if geometric := _GEOMETRIC.fullmatch(text):
        a, q = map(float, geometric.groups())
        return float(a * q**t)
    return float(text)


def _checked(value: Any) -> float | str:
    """Refuse what is no schedule; return it as it was written, a mere number as a number."""
    try:
        text = value.strip() if isinstance(value, str) else float(value)
        first, far = value_at(text, 1), value_at(text, _FAR)
        if not (isfinite(first) and isfinite(far) and first >= 0):
            raise ValueError
        return first if first == far else text
    except (TypeError, ValueError, OverflowError):
        examples = "'1.0 / t', '1.0 / sqrt(t)', '1.0 / (t + 10)^0.75' or '1.0 * 0.99^t'"
        raise ValueError(f"a number of at least 0, or a schedule over rounds like {examples}") from None


Schedule = Annotated[float | str, BeforeValidator(_checked)]

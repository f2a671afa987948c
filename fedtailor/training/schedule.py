"""Values that change with time: hyper-parameters of methods, and the factors of learning rates.

A schedule is a number, or a text that says how it changes with the round (or the step) t = 1, 2, …: so TOML, the
command line and Python hold it as it is.
"""

import re
from math import cos, isfinite, pi
from typing import Annotated, Any

from pydantic import BeforeValidator

_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)"
_COUNT = r"([1-9]\d{0,8})"
_TIME = rf"(?:t|\(t\+{_NUMBER}\))"
_POWER = re.compile(rf"{_NUMBER}/{_TIME}(?:\^{_NUMBER})?")  # a / (t + c)^p
_GEOMETRIC = re.compile(rf"{_NUMBER}\*{_NUMBER}\^t")  # a * q^t
_WARMUP = re.compile(rf"warmup:{_COUNT}(?:,((?!warmup).+))?")
_STEP = re.compile(rf"step:{_COUNT},{_NUMBER}")
_COSINE = re.compile(rf"cosine(?::{_NUMBER})?")
_FAR = 10**6  # rounds in which it must stay finite


def value_at(schedule: float | str, t: int) -> float:
    """Compute the value of a schedule in round t = 1, 2, …."""
    if not isinstance(schedule, str):
        return schedule
    text = _squeezed(schedule)
    if power := _POWER.fullmatch(text):
        a, c, p = (float(number or default) for number, default in zip(power.groups(), (0, 0, 1), strict=True))
        return float(a / (t + c) ** p)
    if geometric := _GEOMETRIC.fullmatch(text):
        a, q = map(float, geometric.groups())
        return float(a * q**t)
    return float(text)


def factor_at(schedule: str, total: int, t: int) -> float:
    """Compute the factor of a learning rate at t = 1, 2, … of `total` rounds or steps; before the first one it is 1.

    They are those of `torch.optim.lr_scheduler` in epoch t − 1: `step:EVERY,FACTOR` is StepLR, `cosine:END` is
    CosineAnnealingLR with T_max = total, `warmup:N` is LinearLR from 1/N to 1, and what follows it begins after N.
    """
    text = _squeezed(schedule)
    if text == "constant" or t < 1:
        return 1.0
    if warmup := _WARMUP.fullmatch(text):
        n = int(warmup[1])
        return t / n if t <= n else factor_at(warmup[2] or "constant", total - n, t - n)
    if step := _STEP.fullmatch(text):
        return float(step[2]) ** ((t - 1) // int(step[1]))
    if cosine := _COSINE.fullmatch(text):
        end, done = float(cosine[1] or 0), min((t - 1) / max(total, 1), 1.0)
        return end + (1 - end) * (1 + cos(pi * done)) / 2
    return value_at(text, t)


def needs_total(schedule: str) -> bool:
    """Find out whether the factors depend on the number of rounds: such a run cannot be made longer."""
    return "cosine" in _squeezed(schedule)


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text).lower().replace("sqrt(t)", "t^0.5")


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


def _checked_factors(value: Any) -> str:
    """Refuse what is no schedule of a learning rate; return it as it was written."""
    try:
        text = value.strip()
        first, far = factor_at(text, _FAR, 1), factor_at(text, _FAR, _FAR)
        if not (isfinite(first) and isfinite(far) and first > 0) or re.fullmatch(_NUMBER, text):
            raise ValueError
        return str(text)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(
            "constant, step:EVERY,FACTOR, cosine, cosine:END, warmup:N, both as in warmup:5,cosine, or a formula "
            "like 1.0 / sqrt(t)"
        ) from None


Schedule = Annotated[float | str, BeforeValidator(_checked)]
RateSchedule = Annotated[str, BeforeValidator(_checked_factors)]

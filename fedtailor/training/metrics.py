"""Metrics by name: which there are, for which targets they are defined, and which of two values is better.

How they are computed is in `predictions.py`. A run has one metric that decides: for its tables, its tests of
significance, the round that counts, targets, advice and early stopping.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log10
from typing import Any, Literal

from fedtailor._common.errors import FedtailorError, unknown

Targets = Literal["classes", "labels", "numbers"]  # one class a sample, several labels of 0 or 1, or a regression
AUTO = "auto"
NAMES = (
    "accuracy", "balanced_accuracy", "exact_match", "auc", "f1", "log_loss", "loss", "rmse", "mae", "r2",
)  # fmt: skip
OWN = re.compile(r"[^\s:]{1,200}:\S{1,200}")
OWN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,49}")  # of a metric of the user's own beside the one that decides
TITLES = {"log_loss": "log loss", "auc": "AUC", "f1": "F1", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}
ON_ONE_SCALE = ("auc", "f1", "r2")  # where 0.01 is a point, as in %
SMALL = 100  # below it, a plain number has four decimals


@dataclass(frozen=True)
class Metric:
    """A metric: its name (`module:function` for one of the user's own), its direction, and whether it is shown in %."""

    name: str
    higher_is_better: bool = True
    percent: bool = False
    more: bool = False  # one of the user's `metrics`, by its name there

    def __post_init__(self) -> None:
        own = OWN_NAME if self.more else OWN
        if (self.more or self.name not in NAMES) and not own.fullmatch(self.name):  # in a file of a stranger's
            raise ValueError("there is no such metric")

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """The name for people."""
        return TITLES.get(self.name, self.name.rpartition(":")[2].replace("_", " "))

    @property
    def unit(self) -> str:
        return " %" if self.percent else ""

    @cached_property
    def field(self) -> str:
        """The name of its values in a record."""
        return "own" if ":" in self.name else self.name

    def of(self, record: Any) -> float | None:
        """Get the value from a record of test metrics."""
        value: float | None = record.more.get(self.name) if self.more else getattr(record, self.field)
        return value

    def validation(self, record: Any) -> float | None:
        """Get the value on validation samples from a record of averages."""
        more, field = "validation_more", f"validation_{self.field}"
        value: float | None = getattr(record, more).get(self.name) if self.more else getattr(record, field)
        return value

    def gain(self, value: float, base: float) -> float:
        """Compute by how much a value is better than another one; below 0, it is worse."""
        return value - base if self.higher_is_better else base - value

    def score(self, value: float) -> float:
        """Turn a value into a number that is larger for better values; a second time, back."""
        return value if self.higher_is_better else -value

    def best(self, values: Iterable[float]) -> float | None:
        return (max if self.higher_is_better else min)(values, default=None)

    def worst(self, values: Iterable[float]) -> float | None:
        return (min if self.higher_is_better else max)(values, default=None)

    def worst_first(self, values: Iterable[float]) -> list[float]:
        return sorted(values, reverse=not self.higher_is_better)

    def reaches(self, value: float, target: float) -> bool:
        """Find out whether a value is as good as a target."""
        return value >= target if self.higher_is_better else value <= target

    def easier(self, value: float) -> float:
        """Round a value to one that is no harder to reach: to a whole percent, or to two digits."""
        if value == 0:
            return 0.0
        step = 0.01 if self.percent else 10.0 ** (floor(log10(abs(value))) - 1)
        steps = floor(value / step + 1e-7) if self.higher_is_better else ceil(value / step - 1e-7)
        return float(f"{steps * step:.12g}")

    def check_target(self, target: float | None) -> None:
        """Refuse a target that no run can reach."""
        if self.percent and target is not None and not 0 < target <= 1:
            raise FedtailorError(f"The target {self.title} is {target}, but it must be above 0 and at most 1.")

    def text(self, value: float | None, sign: str = "") -> str:
        """Format a value, in % or plain; a dash where there is none."""
        if value is None:
            return "–"
        if self.percent:
            return f"{100 * value:{sign}.2f}"
        return f"{value:{sign}.4f}" if abs(value) < SMALL else f"{value:{sign},.1f}"

    def shown(self, value: float | None) -> str:
        """Format a value with the metric's name and unit: accuracy 93.12 %."""
        return f"{self.title} {self.text(value)}{self.unit}"


IN_PERCENT = ("accuracy", "balanced_accuracy", "exact_match")
LOWER_IS_BETTER = ("log_loss", "loss", "rmse", "mae")
METRICS = {name: Metric(name, name not in LOWER_IS_BETTER, name in IN_PERCENT) for name in NAMES}
ACCURACY, LOSS = METRICS["accuracy"], METRICS["loss"]
# The metrics of each kind of targets. The first is the one of `auto`.
DEFINED: dict[Targets, tuple[str, ...]] = {
    "classes": ("accuracy", "balanced_accuracy", "auc", "f1", "log_loss", "loss"),
    "labels": ("f1", "accuracy", "exact_match", "auc", "loss"),
    "numbers": ("rmse", "mae", "r2", "loss"),
}
KINDS: dict[Targets, str] = {"classes": "classes", "labels": "several labels a sample", "numbers": "numbers"}


def find_metric(name: str, targets: Targets | None) -> Metric:
    """Find a metric of the catalogue that is defined for these targets. `targets` is None where the network's outputs
    are not one for each class or target: then there is the loss alone."""
    known = DEFINED[targets] if targets else ("loss",)
    if name == AUTO:
        return METRICS[known[0]]
    if name not in METRICS:
        raise unknown("metric", name, (*METRICS, AUTO))
    if name not in known:
        what = f"targets that are {KINDS[targets]}" if targets else "these outputs of the network"
        raise FedtailorError(f"The metric {name} is not defined for {what}: take one of {', '.join(known)}.")
    return METRICS[name]


def own_metric(name: str, function: Callable[..., Any], more: bool = False) -> Metric:
    """Describe a metric of the user's own, or one of `metrics` (`more`). A lower value is better if the function says
    `higher_is_better = False`."""
    return Metric(name, bool(getattr(function, "higher_is_better", True)), more=more)


def named_metrics(value: Any) -> dict[str, str] | None:
    """Read the user's metrics by name, from a text like missed=mine:missed or as a mapping; None if there are none."""
    if isinstance(value, str):
        value = dict([part.partition("=")[::2] for part in value.replace(" ", "").split(",")])
    if not value:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ValueError("names with functions, like missed=mine:missed")
    for name, function in value.items():
        if not OWN_NAME.fullmatch(name) or name in (*NAMES, AUTO, "own", "more"):
            raise ValueError("names of your own (letters, digits and _) that no other metric has")
        if not OWN.fullmatch(function):
            raise ValueError("names with functions as module:function, like missed=mine:missed")
    return dict(value)

"""The ranges in which settings are searched: `0.001..1:log`, `1..10`, or choices like `0|0.5|0.9`.

The same text stands in a method's `search`, on the command line and in Python.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, get_args

from pydantic.fields import FieldInfo

from fedtailor._common.errors import FedtailorError, shown, unknown
from fedtailor._common.toml import parse_toml
from fedtailor.experiment import SEARCH, Evaluation, Experiment
from fedtailor.methods import method_class

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

DIGITS = 3  # of a number that is proposed: settings that people can read and repeat


@dataclass(frozen=True)
class Range:
    """A range of numbers, or a list of choices."""

    text: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that must be allowed, for all others to be: both ends, or every choice."""
        return self.choices or (self.low, self.high)

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and not (self.whole and value != int(value))

    def rounded(self, value: Any) -> Any:
        """Round a proposed value, without leaving the range."""
        if self.choices or self.whole:
            return value
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def distribution(self) -> "BaseDistribution":
        """Return the range as Optuna has it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)


def parse_range(name: str, text: str, whole: bool = False) -> Range:
    """Read a range; `whole` if only whole numbers are meant."""
    wrong = FedtailorError(
        f"The range of {name} is {shown(text)}, but it must be like 0.001..1:log, 1..10 or, for choices, 0|0.5|0.9."
    )
    if not isinstance(text, str):
        raise wrong
    if "|" in text:
        return Range(text, choices=tuple(_value(word.strip()) for word in text.split("|")))
    numbers, _, scale = text.partition(":")
    try:
        low, high = (float(word) for word in numbers.split(".."))
    except ValueError:
        raise wrong from None
    log = scale.strip() == "log"
    if not (isfinite(low) and isfinite(high) and low < high and (log or not scale)):
        raise wrong
    if log and low <= 0:
        raise FedtailorError(f"The range of {name} is {text}, but with :log it must begin above 0.")
    if whole and not (low.is_integer() and high.is_integer()):
        raise FedtailorError(f"The range of {name} is {text}, but it must be one of whole numbers.")
    return Range(text, low, high, log, whole)


def _value(word: str) -> Any:
    """Read a choice as TOML would, or else as text."""
    try:
        return parse_toml(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        return word


def search_ranges(
    method: str, given: Mapping[str, str] | None = None, only: Sequence[str] | None = None
) -> dict[str, Range]:
    """Return the ranges in which a method's settings are searched: that of lr, the declared ones of its parameters, and
    those that are `given` for settings that it has. `only` names those that count."""
    own = method_class(method).model_fields
    wanted = {**SEARCH, **method_class(method).search, **(given or {})}
    ranges = {}
    for name, text in wanted.items():
        field = own.get(name) or _setting(name)
        if field is not None and text is not None and (only is None or name in only):
            ranges[name] = parse_range(name, text, _is_whole(field))
    return ranges


def check_only(only: Sequence[str], ranges: Mapping[str, Mapping[str, Range]]) -> None:
    """Refuse a name that no method searches."""
    known = {name for of_method in ranges.values() for name in of_method}
    for name in only:
        if name not in known:
            raise unknown("setting that is searched", name, known)


def _setting(name: str) -> FieldInfo | None:
    return Experiment.model_fields.get(name) or Evaluation.model_fields.get(name)


def _is_whole(field: FieldInfo) -> bool:
    kinds = {field.annotation, *get_args(field.annotation)}
    return int in kinds and float not in kinds

"""A method's trials: what each tried and came to, the one that is chosen, and the budget for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import Count
from fedtailor.engines.result import RunResult
from fedtailor.server.records import Record
from fedtailor.training.metrics import ACCURACY, Metric

TRIALS = 20  # unless said


@dataclass(kw_only=True)
class Trial(Record):
    """One choice of settings: its validation value after each evaluated round (more is better), and how it ended."""

    settings: dict[str, Any]
    state: Literal["done", "pruned", "failed"]
    values: dict[Count, float] = field(default_factory=dict)
    rounds: Count = 0  # that it ran
    reason: str = ""  # why it did not come to its end
    seconds: float = 0.0

    @property
    def value(self) -> float | None:
        """The validation value of a trial that came to its end."""
        return self.values[max(self.values)] if self.state == "done" else None


@dataclass(kw_only=True)
class Trials(Record):
    """All trials of a method, in their order."""

    trials: list[Trial]


@dataclass(frozen=True)
class Tuned:
    """A method's trials, the one that was chosen, and the runs of it, one a seed."""

    method: str
    trials: tuple[Trial, ...]
    results: tuple[RunResult, ...] = ()
    metric: Metric = ACCURACY

    @property
    def chosen(self) -> Trial | None:
        """The trial with the best validation value, the first of equals; None if all failed."""
        done = [trial for trial in self.trials if trial.value is not None]
        return max(done, key=lambda trial: trial.value or 0.0, default=None)

    @property
    def settings(self) -> dict[str, Any]:
        """The chosen settings and parameters: `fedtailor.run(method, **settings)` takes them."""
        return dict(self.chosen.settings) if self.chosen else {}

    @property
    def validation(self) -> float | None:
        """The metric of the chosen settings on validation data."""
        return self._value(self.chosen)

    @property
    def before(self) -> float | None:
        """The metric of the settings that tuning began with."""
        return self._value(self.trials[0]) if self.trials else None

    def _value(self, trial: Trial | None) -> float | None:
        """A trial's value has the sign that makes more of it better."""
        return None if trial is None or trial.value is None else self.metric.score(trial.value)

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials)


@dataclass(frozen=True)
class Budget:
    """The budget of every method: a number of trials, seconds, or whichever is used up first."""

    trials: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials is None and self.seconds is None:
            object.__setattr__(self, "trials", TRIALS)
        if self.trials is not None and self.trials < 1:
            raise FedtailorError(f"A method cannot be tuned in {self.trials} trials: give at least 1.")
        if self.seconds is not None and not self.seconds > 0:
            raise FedtailorError(f"A method cannot be tuned in {self.seconds:g} seconds: give more than 0.")

    def __str__(self) -> str:
        parts = [f"{self.trials} trials"] if self.trials is not None else []
        parts += [f"{self.seconds:g} seconds"] if self.seconds is not None else []
        return f"{' or '.join(parts)} a method"

    def seconds_left(self, trials: Sequence[Trial]) -> float:
        return (self.seconds or float("inf")) - sum(trial.seconds for trial in trials)

    def is_spent(self, trials: Sequence[Trial]) -> bool:
        return len(trials) >= (self.trials or float("inf")) or self.seconds_left(trials) <= 0

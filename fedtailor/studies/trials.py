"""A method's trials: what each tried and came to, the one that is chosen, the budget for them, and the next one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor._common.files import Count
from fedtailor.engines.result import RunResult
from fedtailor.server.records import Record
from fedtailor.studies.measures import LEVEL, holm, wilcoxon
from fedtailor.studies.ranges import Range
from fedtailor.training.metrics import ACCURACY, Metric
from fedtailor.training.streams import torch_seed

if TYPE_CHECKING:
    import optuna

TRIALS = 20  # unless said
RANDOM = 8  # trials before the sampler models what is good
SURE = 4  # trials that go to their end before any is pruned


@dataclass(kw_only=True)
class Trial(Record):
    """One choice of settings: its validation value after each evaluated round (more is better), and how it ended.

    Of the first one, the value of each client of each seed is kept; each other one has the p of Wilcoxon's test against
    these, 1 if more clients do worse.
    """

    settings: dict[str, Any]
    state: Literal["done", "pruned", "failed"]
    values: dict[Count, float] = field(default_factory=dict)
    rounds: Count = 0  # that it ran
    reason: str = ""  # why it did not come to its end
    seconds: float = 0.0
    clients: dict[str, float] = field(default_factory=dict)  # by seed and client, at the end
    p: float | None = None

    @property
    def value(self) -> float | None:
        """The validation value of a trial that came to its end."""
        return self.values[max(self.values)] if self.state == "done" else None


def p_of_more(clients: Mapping[str, float], first: Mapping[str, float]) -> float:
    """Compute the p of Wilcoxon's test for a trial whose clients do better than in the first one; 1 if fewer of them do
    better than worse."""
    both = clients.keys() & first.keys()
    better, worse = sum(clients[c] > first[c] for c in both), sum(clients[c] < first[c] for c in both)
    p = wilcoxon(clients, first)
    return 1.0 if p is None or better <= worse else p


@dataclass(kw_only=True)
class Trials(Record):
    """All trials of a method, in their order."""

    trials: list[Trial]


@dataclass(frozen=True)
class Tuned:
    """A method's trials, the one that was chosen, and the runs of it, one a seed.

    The best of many trials is better on validation data than what one began with, by chance alone. So the first one is
    chosen, but where others are better with a p of at most `level`, corrected for the number of trials.
    """

    method: str
    trials: tuple[Trial, ...]
    results: tuple[RunResult, ...] = ()
    metric: Metric = ACCURACY
    level: float = LEVEL

    @property
    def best(self) -> Trial | None:
        """The trial with the best validation value, the first of equals; None if all failed."""
        return max(self._done, key=lambda trial: trial.value or 0.0, default=None)

    @property
    def _done(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.value is not None]

    @property
    def _corrected(self) -> list[tuple[Trial, float]]:
        """The later trials that came to their end, with p corrected for their number by Holm's rule."""
        later = [trial for trial in self._done if trial is not self.trials[0]]
        known = [1.0 if trial.p is None else trial.p for trial in later]
        return list(zip(later, holm(known), strict=True))

    @property
    def chosen(self) -> Trial | None:
        """The first trial, or the best of those that are significantly better; None if all failed."""
        if not self.trials or self.trials[0].value is None:
            return self.best
        better = [trial for trial, p in self._corrected if p <= self.level]
        return max([self.trials[0], *better], key=lambda trial: trial.value or 0.0)

    @property
    def p(self) -> float | None:
        """The corrected p of the best trial against the first one; None if it is the first."""
        return next((p for trial, p in self._corrected if trial is self.best and trial.p is not None), None)

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

    @property
    def best_value(self) -> float | None:
        """The metric of the best trial, which need not be the chosen one."""
        return self._value(self.best)

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


# --- the next trial, by Optuna ---


def check_installed() -> None:
    """Refuse to go on without Optuna."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FedtailorError(f"Optuna is not installed: {install_command('tune')}.") from None


def propose(ranges: Mapping[str, Range], before: Sequence[Trial], seed: int, rounds: int) -> "optuna.Trial":
    """Propose the settings of the next trial, as a trial of Optuna that can be asked whether to prune it.

    It is made anew from the trials before, with a seed of its own number: so an interrupted study goes on as if it
    had never stopped. The first trials are the same for all methods, as far as these search the same settings.
    """
    from optuna import create_study
    from optuna.pruners import MedianPruner
    from optuna.samplers import TPESampler

    number = torch_seed(seed, "tuning", len(before)) % 2**32
    sampler = TPESampler(seed=number, n_startup_trials=RANDOM, multivariate=True, constant_liar=False)
    pruner = MedianPruner(n_startup_trials=SURE, n_warmup_steps=-(-rounds // 4))
    with _silent():
        study = create_study(direction="maximize", sampler=sampler, pruner=pruner)
        study.add_trials([_as_recorded(trial, ranges) for trial in before])
        return study.ask({name: searched.distribution() for name, searched in ranges.items()})


def _as_recorded(trial: Trial, ranges: Mapping[str, Range]) -> "optuna.trial.FrozenTrial":
    """Return a trial as Optuna has it. One that failed counts as pruned at once: the sampler keeps away from it."""
    from optuna.trial import TrialState, create_trial

    inside = {name: value for name, value in trial.settings.items() if value in ranges[name]}
    return create_trial(
        state=TrialState.COMPLETE if trial.state == "done" else TrialState.PRUNED,
        value=trial.value,
        params=inside,
        distributions={name: ranges[name].distribution() for name in inside},
        intermediate_values={} if trial.state == "failed" else dict(trial.values),
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Keep Optuna from telling of every study that it makes."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)

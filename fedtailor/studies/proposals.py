"""The next settings to try, and when to give them up: Optuna, behind one function of the trials before."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedtailor._common.errors import FedtailorError
from fedtailor.studies.ranges import Range
from fedtailor.studies.trials import Trial
from fedtailor.training.streams import torch_seed

if TYPE_CHECKING:
    import optuna

RANDOM = 8  # trials before the sampler models what is good
SURE = 4  # trials that go to their end before any is pruned


def check_installed() -> None:
    """Refuse to go on without Optuna."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise FedtailorError("Optuna is not installed: pip install 'fedtailor[tune]'.") from None


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

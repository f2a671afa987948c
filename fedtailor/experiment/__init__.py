"""An experiment: everything that decides a run's numbers, as one flat, validated file.

The same names serve the command line (`--lr 0.1`), Python (`fedtailor.run("fedavg", lr=0.1)`) and TOML (`lr = 0.1`).
Settings of the evaluation have flat names too (`fine_tune`, `evaluate_clients`); a written file has them in a section.
"""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedtailor._common.errors import FedtailorError, shown, unknown, wanted
from fedtailor._common.toml import read_toml, written_again
from fedtailor.experiment.keywords import EvaluationSettings, Settings
from fedtailor.experiment.settings import (
    DATA_SETTINGS,
    EVALUATION_NAMES,
    EXECUTION_ONLY,
    MOST,
    NEW_DATA_SETTINGS,
    NONE,
    SEARCH,
    SETTING_NAMES,
    TABLE_SETTINGS,
    Evaluation,
    Experiment,
)

__all__ = [
    "DATA_SETTINGS", "EVALUATION_NAMES", "EXECUTION_ONLY", "MOST", "NEW_DATA_SETTINGS", "NONE", "SEARCH",
    "SETTING_NAMES", "TABLE_SETTINGS", "Evaluation", "EvaluationSettings", "Experiment", "Settings",
    "deciding_settings", "experiment_hash", "first_difference", "flat", "in_sections", "make_experiment", "merged",
    "read_experiment",
]  # fmt: skip

# Settings that are younger than the names of recorded runs: with their defaults, these would be others.
YOUNGER = (
    "drop_unlabelled", "server_optimizer", "server_lr", "matmul_precision", "stack", "secure", "fairness", "system",
    "late",
)  # fmt: skip


def experiment_hash(experiment: Experiment, parameters: Mapping[str, Any]) -> str:
    """A checksum of all that decides a run's numbers: equal experiments have equal ones. `parameters` are the method's,
    complete."""
    settings = {**deciding_settings(experiment), "parameters": dict(parameters)}
    for name in YOUNGER:
        if settings[name] == Experiment.model_fields[name].default:
            del settings[name]
    if experiment.evaluation.metrics is None:  # likewise
        del settings["evaluation"]["metrics"]
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def deciding_settings(experiment: Experiment) -> dict[str, Any]:
    """All settings that decide a run's numbers, as JSON has them."""
    return experiment.model_dump(mode="json", exclude=EXECUTION_ONLY)


def first_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first setting in which two differ, with both values in words; None if they are the same."""
    there, here = dict(flat(before)), dict(flat(after))
    for name in (*here, *there):
        if there.get(name) != here.get(name):
            one, other = ("not set" if value is None else str(value) for value in (there.get(name), here.get(name)))
            return name, one, other
    return None


def flat(settings: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings, those of sections as `section.name`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{inside}{name}.")
        else:
            yield inside + name, value


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Settings over settings; sections are merged, not replaced."""
    sections = [name for name in over if isinstance(base.get(name), dict) and isinstance(over[name], dict)]
    return {**base, **over, **{name: {**base[name], **over[name]} for name in sections}}


def in_sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put the evaluation's settings into their section, where they stand among the others under their flat names."""
    flat = {name: value for name, value in settings.items() if name in EVALUATION_NAMES}
    rest = {name: value for name, value in settings.items() if name not in flat}
    section = rest.get("evaluation", {})
    if isinstance(section, Evaluation):
        section = section.model_dump(exclude_unset=True)
    if not flat or not isinstance(section, Mapping):
        return rest
    given = {name: (f"evaluation.{name}", value) for name, value in section.items()}
    for name, value in flat.items():
        before, there = given.setdefault(EVALUATION_NAMES[name], (name, value))
        if there != value:
            raise FedtailorError(f"{before} is {there!r}, but {name} is {value!r}: give one of the two.")
    return {**rest, "evaluation": {name: value for name, (_, value) in given.items()}}


def make_experiment(settings: Mapping[str, Any]) -> Experiment:
    """The experiment with these settings; the first that is wrong is named in the error."""
    try:
        experiment = Experiment.model_validate(in_sections(settings))
    except ValidationError as error:
        raise _setting_error(error) from None
    except RecursionError:
        raise FedtailorError("The settings are nested too deep: give plain values.") from None
    plain = experiment.model_dump(exclude_none=True, exclude={"parameters"})  # these are the method's to check
    if written_again(plain) != plain:
        name = next(name for name, value in plain.items() if written_again({name: value}) != {name: value})
        raise FedtailorError(
            f"The setting {name!r} is {shown(plain[name])}, which no experiment file can hold: give another value."
        )
    return experiment


def _setting_error(error: ValidationError) -> FedtailorError:
    first = error.errors()[0]
    in_evaluation = first["loc"][0] == "evaluation" and len(first["loc"]) > 1
    name = ".".join(map(str, first["loc"][: 2 if in_evaluation else 1]))
    if first["type"] == "extra_forbidden":
        section = [f"evaluation.{field}" for field in Evaluation.model_fields]
        return unknown("setting", name, section if in_evaluation else SETTING_NAMES)
    return FedtailorError(f"The setting {name!r} is {shown(first['input'])}, but it must be {wanted(first)}.")


def read_experiment(path: Path) -> dict[str, Any]:
    """The settings of an experiment file, those of the evaluation in their section."""
    return in_sections(read_toml(path, "experiment file"))

"""Checks that runs can be compared: the same clients, samples and evaluation protocol."""

import json
from collections.abc import Callable, Sequence

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.result import RunResult
from fedtailor.experiment import DATA_SETTINGS, EXECUTION_ONLY
from fedtailor.server.records import Plain


def check_comparable(results: Sequence[RunResult]) -> None:
    """Refuse runs with different clients, samples or evaluation protocols; the error names the setting."""
    of_seed: dict[int, RunResult] = {}
    for result in results:
        first, twin = results[0], of_seed.setdefault(result.experiment.seed, result)
        if _samples(twin) != _samples(result):
            _refuse(twin, result, _settings_of_data)
        if twin is result:
            _refuse_if_different(first, result, _settings_of_data)
        _refuse_if_different(first, result, _protocol)


def _samples(result: RunResult) -> Plain:
    """Return the partition, without the names of the data and of the partition, the checksum of the network and who is
    hostile."""
    left_out = ("data", "partition", "network", "hostile")
    return {name: value for name, value in result.partition.items() if name not in left_out}


def _settings_of_data(result: RunResult) -> Plain:
    names = [name for name in DATA_SETTINGS if name not in EXECUTION_ONLY]
    experiment = result.experiment.model_dump(include={*names, "dtype"})
    return {**{name: experiment[name] for name in names}, "clients": len(result.names), "dtype": experiment["dtype"]}


def _protocol(result: RunResult) -> Plain:
    """Return the evaluation settings that must agree. Fine-tuning may differ: it makes another method of it, and the
    line's title says so."""
    protocol = result.experiment.evaluation.model_dump(exclude={"fine_tune", "train"})
    return {f"evaluation.{name}": value for name, value in {**protocol, "metric": result.metric.name}.items()}


def _refuse_if_different(one: RunResult, other: RunResult, of: Callable[[RunResult], Plain]) -> None:
    if of(one) != of(other):
        _refuse(one, other, of)


def _refuse(one: RunResult, other: RunResult, of: Callable[[RunResult], Plain]) -> None:
    mine, theirs = of(one), of(other)
    name = next((name for name in mine if mine[name] != theirs[name]), None)
    if name is None:
        what = f"the samples themselves are others in {_where(one)} than in {_where(other)}"
    else:
        values = (mine[name], theirs[name])
        here, there = ("the default" if value is None else json.dumps(value) for value in values)
        what = f"{name} is {here} in {_where(one)} and {there} in {_where(other)}"
    raise FedtailorError(f"These runs cannot be compared: {what}.")


def _where(result: RunResult) -> str:
    return str(result.path or f"{result.experiment.method} with seed {result.experiment.seed}")

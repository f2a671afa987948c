"""What tests of reproductions share."""

from typing import Any

from fedtailor.studies.reproduction import Reproduction

SMALL: dict[str, Any] = {"data": "digits", "model": "mlp:16", "rounds": 3, "max_train": 30, "engine": "in-process"}


def work(reproduction: Reproduction) -> None:
    for path, experiment in reproduction.todo().items():
        reproduction.run(path, experiment, lambda record: None, lambda run: None)

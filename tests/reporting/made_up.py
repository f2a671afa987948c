"""Run directories with numbers that a test chooses: what the run of a federation would have written."""

from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import fedtailor as ft
from fedtailor._common.files import seal
from fedtailor._common.toml import write_toml
from fedtailor.experiment import deciding_settings, make_experiment
from fedtailor.methods import find_method
from fedtailor.server.run_directory import FORMAT, RunDirectory, versions

SAMPLES = 20  # each client's training samples


def made_up(
    path: Path,
    method: str,
    accuracies: list[list[float | None]],
    seed: int = 0,
    *,
    rounds: int | None = None,
    fingerprint: str = "",
    validation_accuracy: float | None = None,
    clock: list[float] | None = None,
    **settings: Any,
) -> ft.RunResult:
    """A run whose clients had these accuracies, round by round; 100 bytes up, 50 down and half a second a round.
    `clock` has the virtual seconds at the end of each round."""
    parameters = settings.pop("parameters", {})
    if ":" not in method:
        parameters = find_method(method, parameters).model_dump(exclude_none=True)
    asked = {"method": method, "seed": seed, "rounds": rounds or len(accuracies), "parameters": parameters, **settings}
    experiment = make_experiment(asked)
    path.mkdir(parents=True)
    (path / "experiment.toml").write_text(write_toml(experiment.model_dump()))
    clients = len(accuracies[0])
    partition = {
        "data": experiment.data,
        "classes": ["a", "b"],
        "clients": [str(client) for client in range(clients)],
        "new": [],
        **{split: [[SAMPLES // 2, SAMPLES // 2]] * clients for split in ("train", "validation", "test")},
        "fingerprint": fingerprint or f"of seed {seed}",
        "network": method,
    }
    (path / "partition.json").write_bytes(seal(partition))
    about = {"format": FORMAT, "versions": versions(), "experiment": deciding_settings(experiment)}
    (path / "about.json").write_bytes(seal(about))
    run = RunDirectory(path)
    for number, measured in enumerate(accuracies, 1):
        known = sorted(accuracy for accuracy in measured if accuracy is not None)
        record = {
            "round": number,
            "accuracy": fmean(known) if known else None,
            "accuracy_std": pstdev(known) if known else None,
            "accuracy_worst_decile": fmean(known[: max(1, len(known) // 10)]) if known else None,
            "validation_accuracy": validation_accuracy,
            "validation_loss": None,
            "loss": 1 / number,
            "balanced_accuracy": None,
            "auc": None,
            "evaluated": clients,
            "participants": list(range(clients)),
            "failed": [],
            "bytes_up": 100,
            "bytes_down": 50,
            "seconds": 0.5,
            "clock": None if clock is None else clock[number - 1],
        }
        results = {str(c): {"test": {"accuracy": accuracy, "loss": 1.0}} for c, accuracy in enumerate(measured)}
        run.append(record, {"round": number, "results": results})
    return ft.load(path)

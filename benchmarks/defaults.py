"""What the defaults are worth: every method with its defaults, and FedAvg fine-tuned, on the same federations.

    python -m benchmarks.defaults --data-dir DIR --out DIR

20 clients of Fashion-MNIST with two classes each, or by Dirichlet 0.3; all of them take part in a round, or a quarter.
Everything else is the experiment's default too. Finished runs stay in OUT/runs: called again, it goes on where it was.
The tables, one for each federation, are printed and written to OUT/defaults.md. Accuracies are those of the personal
models of all clients, means over the seeds.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment, make_experiment
from fedtailor.methods import all_methods, find_method
from fedtailor.studies.runner import PreparedRuns, perform, run_name

TUNED = "fedavg, fine-tuned"
LAST = 5  # rounds of which the mean is taken
CASES = [(partition, share) for partition in ("classes:2", "dirichlet:0.3") for share in ("all", "0.25")]


@dataclass(frozen=True)
class Found:
    """What one run came to: the mean accuracy of its last rounds, that of the last one, and its seconds."""

    mean: float
    last: float
    seconds: float


def experiments(arguments: argparse.Namespace) -> Iterator[tuple[tuple[str, str], str, Experiment]]:
    """Yield each federation, method and experiment, those on the same data together."""
    common: dict[str, Any] = {
        "data": arguments.data,
        "data_dir": arguments.data_dir,
        "clients": arguments.clients,
        "rounds": arguments.rounds,
        "max_train": arguments.max_train,
        "observe_every": arguments.rounds,
    }
    for partition in dict.fromkeys(partition for partition, _ in CASES):
        for seed in arguments.seeds:
            for share in (share for other, share in CASES if other == partition):
                for title in arguments.methods or [*all_methods(), TUNED]:
                    method = "fedavg" if title == TUNED else find_method(title).name
                    tuning = {"evaluation": {"fine_tune": 5}} if title == TUNED else {}
                    own = {"method": method, "partition": partition, "participation": share, "seed": seed}
                    yield (partition, share), title, make_experiment({**common, **own, **tuning})


def performed(experiment: Experiment, out: Path, prepared: PreparedRuns) -> Found | None:
    """Run an experiment, or load it; None if it cannot be run to its end."""
    try:
        rounds = perform(experiment, out / run_name(experiment), prepared.prepare).rounds
    except FedtailorError as error:
        print(f"  {error}", flush=True)
        return None
    measured = [record.accuracy for record in rounds if record.accuracy is not None]
    seconds = sum(record.seconds for record in rounds)
    return Found(fmean(measured[-LAST:]), measured[-1], seconds) if measured else None


def markdown(case: tuple[str, str], found: dict[str, list[Found | None]]) -> str:
    """Make the table of one federation, the best method first."""
    means = {title: means_of(runs) for title, runs in found.items()}
    local, average = (means.get(name) for name in ("local", "fedavg"))
    header = ["method", f"last {LAST} rounds", "last round", "− Local", "− FedAvg", "seconds"]
    lines = [f"## {case[0]}, participation {case[1]}", "", _row(header), _row(["---", *["--:"] * 5])]
    for title, mean in sorted(means.items(), key=lambda entry: -entry[1].mean if entry[1] else 1.0):
        if mean is None:
            lines.append(_row([title, "failed", "", "", "", ""]))
            continue
        apart = [f"{100 * (mean.mean - other.mean):+.2f}" if other else "" for other in (local, average)]
        lines.append(_row([title, f"{100 * mean.mean:.2f}", f"{100 * mean.last:.2f}", *apart, f"{mean.seconds:.0f}"]))
    return "\n".join(lines) + "\n"


def means_of(runs: Sequence[Found | None]) -> Found | None:
    """The means over seeds; None if one of them failed."""
    done = [run for run in runs if run is not None]
    if len(done) < len(runs):
        return None
    return Found(*(fmean(getattr(run, name) for run in done) for name in ("mean", "last", "seconds")))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist", help="another data set")
    parser.add_argument("--data-dir", help="where data sets lie [FEDTAILOR_DATA, else ./data]")
    parser.add_argument("--methods", nargs="+", help=f"some of the methods alone, or {TUNED!r}")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--max-train", type=int, default=300, help="training samples of a client at most")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("defaults"), help="where runs and tables go [defaults]")
    arguments = parser.parse_args(words)
    prepared, wanted = PreparedRuns(), list(experiments(arguments))
    found: dict[tuple[str, str], dict[str, list[Found | None]]] = {}
    for number, (case, title, experiment) in enumerate(wanted, 1):
        run = performed(experiment, arguments.out / "runs", prepared)
        found.setdefault(case, {}).setdefault(title, []).append(run)
        said = f"{100 * run.mean:.2f} % in {run.seconds:.0f} s" if run else "failed"
        print(f"{number}/{len(wanted)} {case[0]}, {case[1]}, seed {experiment.seed}: {title} {said}", flush=True)
    text = "\n".join(markdown(case, of_case) for case, of_case in found.items())
    (arguments.out / "defaults.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

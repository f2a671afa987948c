"""Released implementations as they are, repaired, and ours, on the same samples and from the same initial network.

    python -m benchmarks.released --list
    python -m benchmarks.released fedntd --source PATH_OF_A_CLONE_OF_PFLLIB

The source is a clone of the named project; docs/released-code.md says at which commit. Its files are copied, and a
repair is a named change of the copy: a flag of its command line, or a few characters. Trainings are of digits, 20
clients by Dirichlet(0.3), a dense network with 100 hidden units, 10 rounds of two epochs, all clients in each. They
print the accuracy in % on all clients' test samples, mean ± standard deviation over seeds. The others call a function
of the release and print what it returns.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import fedtailor as ft
from benchmarks.measuring import table
from benchmarks.released.cases import TRAININGS, Case
from benchmarks.released.functions import CHECKS
from benchmarks.released.surroundings import TASK
from fedtailor.methods import all_methods


def trained(case: Case, source: Path, seeds: Sequence[int], rounds: int) -> None:
    """Train every variant and ours, and print a line for each as it comes."""
    task, rows = {**TASK, **case.task, "rounds": rounds}, list[list[str]]()
    for variant in case.variants:
        try:
            runs = [case.runner.train(source, seed, variant, task) for seed in seeds]
            rows.append([f"{case.project}, {variant.label}", *scores([score for score, _ in runs])])
            said = runs[0][1]
        except AssertionError as error:  # how a release refuses its own defaults
            rows.append([f"{case.project}, {variant.label}", "stops", ""])
            said = f"AssertionError{f': {error}' if str(error) else ''}"
        print(" ".join(rows[-1]) + (f" ({said})" if said else ""), flush=True)
    for method, settings in case.ours:
        named = ", ".join([f"fedtailor, {method}", *(f"{name}={value}" for name, value in settings.items())])
        if method not in all_methods():
            print(f"{named}: not in this version")
            continue
        common = {**task, "evaluate_every": task["rounds"], "evaluate_average": case.average, "engine": "in-process"}
        runs_of_ours = [ft.run(method, **{**common, **settings, "seed": seed}) for seed in seeds]
        rows.append([named, *scores([100 * run.value for run in runs_of_ours if run.value is not None])])
        print(" ".join(rows[-1]), flush=True)
    print("\n" + table(["", "accuracy", "by seed"], rows))


def scores(values: Sequence[float]) -> tuple[str, str]:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}", " ".join(f"{value:.1f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.released", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=[*TRAININGS, *CHECKS], metavar="NAME", help="one of --list")
    parser.add_argument("--source", type=Path, help="a clone of the project")
    parser.add_argument("--seeds", default="0,1,2", help="of the trainings [0,1,2]")
    parser.add_argument("--rounds", type=int, default=TASK["rounds"], help=f"of the trainings [{TASK['rounds']}]")
    parser.add_argument("--list", action="store_true", help="name all, with their projects")
    given = parser.parse_args()
    if given.list:
        trainings = [[name, case.project, "training"] for name, case in TRAININGS.items()]
        checks = [[name, project, "function"] for name, (project, _) in CHECKS.items()]
        print(table(["name", "project", ""], trainings + checks))
        return
    if given.name is None or given.source is None:
        parser.error("give a name and --source, or --list.")
    torch.set_num_threads(1)
    source = given.source.expanduser().resolve()
    if given.name in CHECKS:
        for line in CHECKS[given.name][1](source):
            print(line, flush=True)
    else:
        trained(TRAININGS[given.name], source, [int(seed) for seed in given.seeds.split(",")], given.rounds)


if __name__ == "__main__":
    main()

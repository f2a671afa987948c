"""A million clients: the start of a run, its rounds, its memory and its directory, beside those of 100 clients.

    python -m benchmarks.million

Every client has four rows of 16 numbers; 100 take part in a round, by Ditto on the MLP of 200 units, for an epoch in
batches of 10, and are evaluated. States are on disk. Of the million clients 100,000 have one from the beginning, as
after a thousand rounds. Each federation has fresh processes of its own, and they take turns. The start is all that
comes before the first round, but for reading the data: partition, splits, network, run directory, first checkpoint.
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measuring import Goal, table
from benchmarks.scale import EVERY, Case, Measured, profile, take_turns
from fedtailor.data import Dataset

ROUND_GOAL, START_GOAL, MEMORY_GOAL = 1.5, 60.0, 3.0  # times, seconds, GiB


@dataclass(frozen=True)
class Rows(Case):
    """Clients with rows of a table in place of images."""

    def data(self) -> Dataset:
        n, generator = self.clients * self.samples, torch.Generator().manual_seed(0)
        x = torch.randn(n, 16, generator=generator)
        client, names = torch.arange(self.clients).repeat_interleave(self.samples), map(str, range(self.clients))
        return Dataset(
            "rows",
            x,
            (x[:, :2] > 0).long() @ torch.tensor([2, 1]),
            tuple("0123"),
            client=client,
            client_names=tuple(names),
        )


def run(repeat: int = 3, tiny: bool = False) -> list[Goal]:
    """Print what was measured, and return the goals."""
    many, begun = (200, 150) if tiny else (1_000_000, 100_000)
    few = Rows(100, 100, 4, 1 if tiny else EVERY, "disk", fresh=not tiny, model="mlp")
    case = Rows(many, 100, 4, few.rounds, "disk", fresh=not tiny, model="mlp", begun=begun)
    found = []
    for each in (few, case):
        found.append(Measured(each))
        found[-1].warm_up()
    for _ in range(repeat):
        take_turns(found)
    rows = []
    for one in found:
        one.end()
        start, per_client = one.start_up, one.size / one.case.clients
        size = f"{one.size / 1e6:,.0f} MB, {per_client:,.0f} B a client"
        rows.append([*one.row(), f"{start.wall:.1f} s", f"{start.cpu:.1f} s", size])
    header = [
        "a round of 100 of",
        "states",
        "clock",
        "median",
        "processors",
        "median",
        "peak memory",
        "start",
        "processors",
    ]
    print(table([*header, "directory"], rows), flush=True)
    times = statistics.median(b.wall / a.wall for a, b in zip(found[0].turns, found[1].turns, strict=True))
    return [
        Goal(f"a round of 100 of {many:,} clients against 100", times, ROUND_GOAL, why=partial(profile, case)),
        Goal(f"the start of a run of {many:,} clients, by the processor", found[1].start_up.cpu, START_GOAL, "s"),
        Goal(f"peak memory of all processes with {many:,} clients", found[1].peak, MEMORY_GOAL, "GiB"),
    ]


if __name__ == "__main__":
    for goal in run():
        print(*goal.row())

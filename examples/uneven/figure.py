"""Draw what stragglers cost: accuracy over virtual time, a panel for each method and a line for each rule.

    fedtailor compare examples/uneven/stragglers.toml --out comparisons/stragglers
    python examples/uneven/figure.py comparisons/stragglers stragglers.png

It needs matplotlib (the extra `figures`).
"""

import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedtailor as ft

RULES = {None: "waits for all 12", "first=10": "the first 10", "buffer=5": "asynchronous, 5"}


def draw(comparison: Path, picture: Path) -> None:
    """Draw each seed's curve, at every virtual second that was evaluated, on a logarithmic axis."""
    panels: dict[str, list[ft.RunResult]] = defaultdict(list)
    for run in sorted((comparison / "runs").iterdir()):
        result = ft.load(run)
        panels[result.method].append(result)
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3.2), sharey=True, layout="constrained")
    for axis, (method, results) in zip(axes, sorted(panels.items()), strict=True):
        for colour, (rule, words) in enumerate(RULES.items()):
            for result in (each for each in results if each.experiment.late == rule):
                points = [(record.clock, record.accuracy) for record in result.rounds if record.evaluated]
                seconds, accuracy = np.array(points, float).T
                label = words if result.experiment.seed == 0 else None
                axis.plot(seconds, 100 * accuracy, color=f"C{colour}", linewidth=1, label=label)
        axis.set(title=method, xscale="log", xlabel="virtual seconds", ylim=(50, 95))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[-1].legend(frameon=False, loc="lower right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))

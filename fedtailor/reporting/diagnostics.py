"""Figures of a method's diagnostics, as `observed/` has them: those of its paper where there are any, and otherwise a
plain figure of every vector or matrix over the clients."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.result import RunResult
from fedtailor.reporting.axes import ROUNDS, Axis
from fedtailor.reporting.figures import POINTS, evenly, in_order, left_out, regression, samples
from fedtailor.reporting.marks import Array, Curve, Figure, Heat, Network, Panel, Points, Style
from fedtailor.server.records import counted_classes
from fedtailor.studies.summary import Line

FRAMES = 20  # moments of a matrix over rounds, at most
NUMBERS = 60_000  # in all moments of one figure, at most
HELPERS, ARROWS = 3, 150  # of each client, and altogether, in the figure of who helps whom, at most


@dataclass(frozen=True)
class Shown:
    """The recorded diagnostics of one run."""

    line: Line
    result: RunResult
    style: Style
    axis: Axis

    @cached_property
    def rounds(self) -> list[int]:
        return self.result.observations.rounds()

    def at(self, round: int) -> dict[str, Array]:
        """Read the diagnostics of a round; clients that joined after it have NaN."""
        found = {name: tensor.double().numpy() for name, tensor in self.result.observations.get(round).items()}
        later = sum(len(join.clients) for join in self.result.partition["joined"] if join.after >= round)
        return {name: self._padded(array, later) for name, array in found.items()} if later else found

    def _padded(self, array: Array, later: int) -> Array:
        """Add so many clients to a tensor over all that there were, on both sides of a matrix of clients × clients."""
        before = len(self.result.names) - len(self.result.partition["new"]) - later
        if array.shape[:1] != (before,):
            return array
        sides = 2 if array.shape == (before, before) else 1
        return np.pad(array, [(0, later if axis < sides else 0) for axis in range(array.ndim)], constant_values=np.nan)

    @cached_property
    def last(self) -> dict[str, Array]:
        return self.at(self.rounds[-1])

    def frames(self, name: str) -> dict[str, Array]:
        """Read a tensor in some of the rounds, as many as a page can hold, by the round's number."""
        most = min(FRAMES, max(1, NUMBERS // max(self.last[name].size, 1)))
        chosen = [self.rounds[place] for place in evenly(len(self.rounds), most)] if most > 1 else self.rounds[-1:]
        return {str(round): self.at(round)[name] for round in chosen}

    @cached_property
    def order(self) -> list[int]:
        """The training clients, in the order of all figures."""
        return in_order(self.result, training=True)

    @cached_property
    def names(self) -> list[str]:
        return [self.result.names[client] for client in self.order]

    @property
    def helpers(self) -> int:
        """The number of helpers of each client that fit into the figure of who helps whom."""
        return max(1, min(HELPERS, ARROWS // max(len(self.order), 1)))

    @property
    def whose(self) -> str:
        """For a caption: which of several runs this is, and a note if not all clients are shown."""
        seed = f" Seed {self.result.experiment.seed}." if len(self.line.results) > 1 else ""
        return seed + left_out(self.result, self.order)

    def figure(self, name: str, title: str, caption: str, panels: list[Panel], columns: int = 2) -> Figure:
        slug = re.sub(r"[^\w.=-]+", "-", f"{self.line.title}-{name}").strip("-")
        return Figure(slug, title, caption + self.whose, panels, columns)

    def between(self, name: str, measure: str, diverging: bool = False) -> Heat:
        """Draw a matrix of clients × clients. The colours span the values off the diagonal, as a client's value for
        itself would outshine all others."""
        order = np.array(self.order)
        frames = {round: matrix[np.ix_(order, order)] for round, matrix in self.frames(name).items()}
        others = ~np.eye(len(order), dtype=bool)
        values = np.concatenate([matrix[others] for matrix in frames.values()]) if len(order) > 1 else np.zeros(1)
        limits = (float(np.nanmin(values)), float(np.nanmax(values)))
        return Heat(self.names, self.names, frames, measure, "diverging" if diverging else "sequential", limits)


def diagnostics(line: Line, style: Style, axis: Axis = ROUNDS) -> list[Figure]:
    """Draw the diagnostics of a line's first run that recorded any, their curves over this axis."""
    for result in line.results:
        there = np.isfinite(axis.along(result)).any()  # a run may have no virtual time, and others some
        shown = Shown(line, result, Style(style.colour), axis if there else ROUNDS)
        if shown.rounds:
            try:
                return BY_METHOD.get(line.method, anything)(shown)
            except (KeyError, IndexError, ValueError) as error:
                raise FedtailorError(
                    "the tensors of its rounds are not the ones that the method records, or change their shapes."
                ) from error
    return []


# --- the papers' ---


def pgfed(shown: Shown) -> list[Figure]:
    """The change of A, and the correlation of its columns and rows with sample counts (Figure 3 of the paper)."""
    change, order = shown.last["change"], shown.order
    counts = samples(shown.result)[: len(change)].astype(float)
    heat = Heat(shown.names, shown.names, {"": change[np.ix_(order, order)]}, "change of αᵢⱼ", "diverging")
    panels = [Panel("Change of A", [heat], "client j, who helps", "client i, who is helped", tall=True)]
    said = []
    for axis, title in ((0, "Column average: help given"), (1, "Row average: help needed")):
        averages = change.mean(axis)
        text = [f"client {name}" for name in shown.result.names[: len(change)]]
        marks: list[Points | Curve] = [Points(counts, averages, text, shown.style)]
        fitted = regression(counts, averages)
        if fitted is not None:
            marks.append(Curve(fitted[0], fitted[1], "least squares", shown.style, kind="fit"))
        said.append("no correlation" if fitted is None else f"r = {fitted[2]:.2f}".replace("-", "−"))
        panels.append(Panel(f"{title}, {said[-1]}", marks, "training samples of the client", "mean change"))
    caption = (
        f"Figure 3 of the paper, after round {shown.rounds[-1]}. Change of A: by how much the weight αᵢⱼ that client i "
        "gives to client j's risk has grown (red) or fallen (blue) since the start. Column average: the help that a "
        f"client gives against its training samples ({said[0]}). Row average: the help that it needs ({said[1]}). The "
        "paper finds a positive and a negative correlation: clients with much data help, those with little are helped."
    )
    return [shown.figure("change", "Who helps whom, and what sample counts have to do with it", caption, panels)]


def pfedmb(shown: Shown) -> list[Figure]:
    """α over rounds, a panel for each layer (Figure 3 of the paper)."""
    frames = shown.frames("alpha")
    layers, branches = shown.last["alpha"].shape[1:]
    columns = [str(branch + 1) for branch in range(branches)]
    panels = []
    for layer in range(layers):
        of_layer = {round: alpha[shown.order, layer] for round, alpha in frames.items()}
        heat = Heat(shown.names, columns, of_layer, "α", limits=(0, 1))
        panels.append(Panel(f"Layer {layer + 1}" if layers > 1 else "All layers", [heat], "branch", "client"))
    caption = (
        "Figure 3 of the paper: the weight α that each client gives to each branch of a layer; a row adds up to 1. "
        "Clients with similar data should come to prefer the same branches."
    )
    return [shown.figure("alpha", "Which client uses which branch", caption, panels, max(2, min(layers, 3)))]


def fedacs(shown: Shown) -> list[Figure]:
    similar = Panel("Cosine similarity of models", [shown.between("S", "similarity")], "client", "client")
    caption = (
        "Cosine similarity: how alike the clients' models are; blocks of high values are groups that are alike. "
        f"{_about_helpers(shown)}"
    )
    panels = [similar, _helpers(shown, "weights")]
    return [shown.figure("similarity", "Who is like whom, who helps whom", caption, panels)]


def fedamp(shown: Shown) -> list[Figure]:
    weights = Panel("Weights ξᵢⱼ", [shown.between("weights", "weight")], "client j, who attracts", "client i")
    caption = (
        "Weights: how much of client j's model (column) is in client i's mix (row). The colours are for the others, as "
        f"a client's own weight is by far the largest. {_about_helpers(shown)}"
    )
    return [shown.figure("weights", "Who attracts whom", caption, [weights, _helpers(shown, "weights")])]


def fedfomo(shown: Shown) -> list[Figure]:
    affinity = Panel("Affinity P", [shown.between("P", "Pᵢⱼ", diverging=True)], "client j, who helps", "client i")
    caption = (
        "Affinity: how useful client j's models (column) were to client i (row), over all its rounds: red lowered its "
        "validation loss, blue raised it, pale was hardly tried. The server sends a client the models with the largest "
        f"P. The colours are for others' models, not for a client's own. {_about_helpers(shown)}"
    )
    return [shown.figure("affinity", "Whose models were useful to whom", caption, [affinity, _helpers(shown, "P")])]


def _about_helpers(shown: Shown) -> str:
    strongest = f"{shown.helpers} strongest helpers" if shown.helpers > 1 else "strongest helper"
    return (
        f"Who helps whom, after round {shown.rounds[-1]}: arrows come to each client from its {strongest} "
        "with a positive weight, thicker where it is larger; larger dots have more training samples."
    )


def _helpers(shown: Shown, name: str) -> Panel:
    """Draw who helps whom, from the weights (helped × helper) of the last round."""
    order = shown.order
    weights = shown.last[name][np.ix_(order, order)].copy()
    np.fill_diagonal(weights, 0.0)
    edges, text = [], []
    for helped, row in enumerate(weights):
        best = [int(helper) for helper in np.argsort(-row, kind="stable")[: shown.helpers] if row[helper] > 0]
        edges += [(helper, helped, float(row[helper])) for helper in best]
        said = ", ".join(f"{shown.names[helper]} ({row[helper]:.3g})" for helper in best)
        text.append(f"client {shown.names[helped]}\nhelped by {said or 'nobody'}")
    sizes = samples(shown.result)[order].astype(float)
    return Panel("Who helps whom", [Network(shown.names, text, sizes, edges, shown.style)])


def apfl(shown: Shown) -> list[Figure]:
    caption = (
        f"αᵢ, the share of the local model in each client's mix, {shown.axis.tab}: thin lines are clients, the thick "
        "one is their mean. 1 is a client that has no use for the global model, 0 one that needs nothing else."
    )
    return [_over_rounds(shown, "alpha", "α", "How personal the mix is", caption, (0, 1))]


def _over_rounds(
    shown: Shown, name: str, symbol: str, title: str, caption: str, limits: tuple[float, float] | None = None
) -> Figure:
    """Draw a vector over the clients as lines over rounds, one for each client."""
    rounds = [shown.rounds[place] for place in evenly(len(shown.rounds), POINTS)]
    values, x = np.stack([shown.at(round)[name] for round in rounds]), shown.axis.at(shown.result, rounds)
    few = [shown.order[place] for place in evenly(len(shown.order), 100)]
    lines = [Curve(x, values[:, c], f"client {shown.result.names[c]}", shown.style, kind="one of many") for c in few]
    mean = Curve(x, np.nanmean(values, axis=1), "mean", shown.style)
    return shown.figure(name, title, caption, [Panel("", [*lines, mean], shown.axis.title, symbol, y_limits=limits)], 1)


def ifca(shown: Shown) -> list[Figure]:
    """Each client's cluster over rounds, and the clusters' data at the end."""
    rounds = [shown.rounds[place] for place in evenly(len(shown.rounds), POINTS)]
    found = np.stack([shown.at(round)["cluster"] for round in rounds], axis=1)[shown.order]
    member = np.nan_to_num(found, nan=-1).astype(int) + 1
    clusters = max(int(shown.result.experiment.parameters.get("clusters", 0)), int(member.max()))
    kinds = ["not called yet", *(f"cluster {number + 1}" for number in range(clusters))]
    when = Heat(shown.names, list(map(str, rounds)), {"": member}, "cluster", "kinds", (0, clusters), kinds)
    counts = np.array(shown.result.partition["train"])
    last = shown.last["cluster"].astype(int)
    held = np.stack([counts[: len(last)][last == number].sum(0) for number in range(clusters)])
    classes = counted_classes(shown.result.partition)
    sizes = [f"{number + 1} ({(last == number).sum()} clients)" for number in range(clusters)]
    what = Heat(sizes, classes or ["all"], {"": held}, "samples", limits=(0, held.max()), written=held.size <= 100)
    panels = [
        Panel("Clusters of the clients", [when], "round", "client"),
        Panel("Training samples of the clusters", [what], "class" if classes else "", "cluster"),
    ]
    by_class = ", by class; clusters that found something differ in them" if classes else ""
    caption = (
        "Clusters: the one that each client chose when it last took part, over rounds. Training samples: of the "
        f"clusters' members at the end{by_class}."
    )
    return [shown.figure("clusters", "Who is in which cluster", caption, panels)]


# --- everybody else's ---


def anything(shown: Shown) -> list[Figure]:
    """Draw vectors over the clients as lines over rounds, square matrices as heat maps, single numbers as a line."""
    figures, clients = [], len(shown.result.names) - len(shown.result.partition["new"])
    for name, tensor in shown.last.items():
        if tensor.shape == (clients, clients):
            panel = Panel("", [shown.between(name, name)], "client (column)", "client (row)")
            figures.append(shown.figure(name, name, f"The method's diagnostic {name}.", [panel]))
        elif tensor.shape == (clients,):
            figures.append(_over_rounds(shown, name, name, name, f"The method's diagnostic {name}, for each client."))
        elif tensor.size == 1:
            rounds = [shown.rounds[place] for place in evenly(len(shown.rounds), POINTS)]
            values = np.array([shown.at(round)[name].item() for round in rounds])
            curve = Curve(shown.axis.at(shown.result, rounds), values, name, shown.style)
            panel = Panel("", [curve], shown.axis.title, name)
            figures.append(shown.figure(name, name, f"The method's diagnostic {name}.", [panel], 1))
    return figures


BY_METHOD: dict[str, Callable[[Shown], list[Figure]]] = {
    "pgfed": pgfed,
    "pgfedmo": pgfed,
    "pgfed-ce": pgfed,
    "pfedmb": pfedmb,
    "fedacs": fedacs,
    "fedamp": fedamp,
    "fedfomo": fedfomo,
    "apfl": apfl,
    "ifca": ifca,
}

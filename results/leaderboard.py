"""Make docs/leaderboard.md from the records: every method on four federations, tuned and with its defaults; and with
its defaults on four others, whose clients differ in other ways."""

import json
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.make_methods_page import page_of
from fedtailor._common.text import human_bytes
from fedtailor.experiment.tuned import shipped
from fedtailor.methods import CATALOGUE, all_methods
from fedtailor.studies.measures import holm
from results.pairs import HEAD, Pair, of_clients, points, rows
from results.shipping import FRESH
from results.shipping import table as fresh_table

HERE = Path(__file__).parent
FEDERATIONS = {
    "digits": "digits (8×8), 20 clients by Dirichlet 0.3",
    "fashion-classes": "Fashion-MNIST, 20 clients with 2 classes and at most 100 training samples, half in a round",
    "fashion-dirichlet": "Fashion-MNIST, 20 clients by Dirichlet 0.3, at most 100 training samples, half in a round",
    "flights": "a table (New York's flights of 2013: is one late?), 16 airlines with 20 to 200 training samples each",
}
NATURAL = {
    "rotation": "digits (8×8), 20 clients that have all of them, each turned its own way, at most 30 training samples",
    "digit-4": "digits of four sources, five clients of each, at most 30 training samples",
    "watch": "exercises with a smartwatch, 10 people, tested on recordings that were not trained on (mean of 5 rounds)",
    "schools": "a test of mathematics (RMSE: less is better), 79 schools, at most 30 training samples, half in a round,"
    " `lr=0.0001`",
}
OPTIONS = {"choose": "choose", "every": "evaluate-every"}  # of the command line, for settings of the evaluation
AGAIN = ("digits", "flights")  # the federations whose column was run on another processor, too
COLUMN = "fedtailor compare results/tunings/FEDERATION/tuned.toml --seeds 0,1"
DIVERGED = 1000.0  # worse by so much is a training that went astray
OUTER = "pgfed"  # of the compositions
LEAST = 0.9  # share of Local's accuracy that a method must reach with its defaults, or its page says why not
Line = dict[str, Any]

INTRODUCTION = """\
# Leaderboard

<!-- Written by `python -m results`: change the records in results/, not this page. -->

{methods} of the {all} methods of the catalogue on four small real federations, **with settings tuned on validation
data** ({tuned}, the same budget for all); those that came later are below, [with the defaults](#with-the-defaults).
Accuracy in % of the personal models on test samples, mean over clients, after 20 rounds of 5 local epochs with `mlp`,
mean ± standard deviation over the seeds {seeds}. **Bold** is the best of a column; `≈`: no significant difference from
it (paired Wilcoxon test over the clients, corrected by Holm, 5 %). Tuning looked at seed 0 alone, at its validation
samples; with seed 1 the same samples are partitioned differently, so that a test sample may be one that tuning saw. A
rank says what a method is worth on such federations, with few samples, few rounds and a small network. It says nothing
about large ones, and differences without significance say nothing at all.

{federations}
"""


@cache
def result(kind: str, federation: str) -> dict[str, Any]:
    """Read the summary of one comparison."""
    content: dict[str, Any] = json.loads(path_of(kind, federation).read_text(encoding="utf-8"))
    return content


def path_of(kind: str, federation: str) -> Path:
    """Return the path of a comparison's summary."""
    return HERE / "comparisons" / f"{kind}-{federation}" / "result.json"


def lines(kind: str, federation: str) -> dict[str, Line]:
    """Return the lines of a comparison by method; with those of methods that came later, if it is of defaults."""
    kinds = ("later", kind) if kind == "defaults" and path_of("later", federation).exists() else (kind,)
    return {line["method"]: line for each in kinds for line in result(each, federation)["lines"]}


def leaderboard() -> str:
    """Write the whole page."""
    parts = [*_tuned(), *_fine_tuned(), *_fresh(), *_costs(), *_defaults(), *_natural(), *_compositions(), *_rounding()]
    return "\n".join(parts) + "\n"


def _tuned() -> Iterator[str]:
    first = result("leaderboard", "digits")
    said = [f"- **{name}**: {text}" for name, text in FEDERATIONS.items()]
    seeds = ", ".join(map(str, first["lines"][0]["seeds"]))
    found = {name: lines("leaderboard", name) for name in FEDERATIONS}
    ranks = {method: _mean_rank(method, found) for method in found["digits"]}
    counts = {"methods": len(ranks), "all": len(all_methods())}
    yield INTRODUCTION.format(tuned=shipped("digits").how, seeds=seeds, federations="\n".join(said), **counts)
    yield from _head(["method", *FEDERATIONS, "mean rank"])
    for method in sorted(ranks, key=lambda method: ranks[method]):
        cells = [_accuracy(of.get(method)) for of in found.values()]
        yield _row([f"[`{method}`]({page_of(CATALOGUE[method])})", *cells, f"{ranks[method]:.1f}"])
    yield "\nThe command behind a cell of each column:\n"
    yield from (f"    {command(name)}" for name in FEDERATIONS)
    yield "\nand behind a whole column:\n"
    yield f"    {COLUMN}\n"


def _fine_tuned() -> Iterator[str]:
    yield "## FedAvg, fine-tuned\n"
    yield "The baseline that a personalized method has to beat: FedAvg's model with 5 epochs of fine-tuning at each"
    yield "client before it is evaluated. Its settings are those above, which were tuned without that. It has no rank"
    yield "and no test of significance.\n"
    yield from _head(["", *FEDERATIONS])
    found = {name: lines("leaderboard", name) for name in FEDERATIONS}
    best = [next(method for method, line in of.items() if line["best"]) for of in found.values()]
    yield _row(["`local`", *(_number(of["local"]) for of in found.values())])
    yield _row(["`fedavg`", *(_number(of["fedavg"]) for of in found.values())])
    yield _row(["`fedavg`, fine-tuned", *(_number(fine_tuned(name)) for name in FEDERATIONS)])
    yield _row(["the best above", *(f"{_number(of[m])} (`{m}`)" for m, of in zip(best, found.values(), strict=True))])
    yield ""
    yield from (f"    {command(name, 'fedavg')} --grid 'fine_tune=0|5'" for name in FEDERATIONS)
    yield ""


def fine_tuned(federation: str) -> Line:
    """Return the line of FedAvg with fine-tuning."""
    return next(line for line in result("fine-tuned", federation)["lines"] if line["settings"]["fine_tune"])


def command(federation: str, method: str = "METHOD", seeds: str = "0,1") -> str:
    """Write the command of one cell."""
    asked = tomllib.loads((HERE / "federations" / f"{federation}.toml").read_text(encoding="utf-8"))
    options = {**asked, **{OPTIONS[name]: value for name, value in asked["evaluation"].items()}}
    words = ["fedtailor", "compare", method, "--settings", f"results/tunings/{federation}", "--seeds", seeds]
    for name, value in options.items():
        if name not in ("methods", "seeds", "evaluation", "parameters"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return " ".join(words)


def _mean_rank(method: str, found: dict[str, dict[str, Line]]) -> float:
    """Average a method's place over the federations; one that has no value there comes last."""
    places = []
    for of in found.values():
        values: dict[str, float] = {name: -1.0 if line["value"] is None else line["value"] for name, line in of.items()}
        mine = values.get(method, -1.0)
        places.append(1 + sum(value > mine for value in values.values()))
    return fmean(places)


def _accuracy(line: Line | None) -> str:
    if line is None or line["value"] is None:
        return "failed"
    text = _number(line)
    return f"**{text}**" if line["best"] else f"{text} ≈" if line["like_best"] else text


def _number(line: Line) -> str:
    return f"{100 * line['value']:.2f} ± {100 * (line['value_std'] or 0):.2f}"


def _fresh() -> Iterator[str]:
    yield "## Are the tuned settings better than the defaults?\n"
    seeds = FRESH.replace(",", ", ")
    yield f"The tunings' choices beside the methods' defaults, with the seeds {seeds}, which no tuning saw."
    yield "Differences are tuned less default, paired over clients ([how](results.md)). A method whose tuned settings"
    yield "are *behind* has its defaults in"
    yield "[`--settings tuned:NAME`](tuning.md#settings-that-come-with-fedtailor). Where a tuning chose the defaults"
    yield "there is nothing to compare.\n"
    for name in FEDERATIONS:
        yield from fresh_table(name)
    yield "The two commands behind a row:\n"
    for name in FEDERATIONS:
        tuned = command(name, seeds=FRESH)
        yield f"    {tuned}\n    {tuned.replace(f' --settings results/tunings/{name}', '')}"
    yield ""


def _costs() -> Iterator[str]:
    yield "## What it costs\n"
    yield "Bytes up and down in all 20 rounds, all clients together; training samples a second of the rounds on 2 cores"
    yield "(which did other work too: a measure of order, no more); passes over a participant's samples in a round."
    yield "Accuracies are not bought at the same price: compare the passes and the bytes, too.\n"
    columns = [f"{name}, {what}" for name in ("digits", "flights") for what in ("bytes", "samples/s")]
    yield from _head(["method", *columns, "passes"])
    for method in lines("leaderboard", "digits"):
        cells = []
        for name in ("digits", "flights"):
            line = lines("leaderboard", name).get(method)
            rate = line and line["samples_per_second"]
            cells += [human_bytes(line["bytes"]) if line else "–", f"{rate:,.0f}" if rate else "–"]
        line = lines("leaderboard", "digits").get(method)
        passes = line and line["passes"]
        yield _row([f"`{method}`", *cells, f"{passes:.1f}".removesuffix(".0") if passes else "–"])
    yield ""


def _defaults() -> Iterator[str]:
    yield "## With the defaults\n"
    yield "The same without tuning, seed 0: every setting as it is unless somebody changes it. In brackets the share"
    yield f"of Local's accuracy. Where it is below {LEAST:g} (`!`), the method's page says why. –: not run.\n"
    found = {name: lines("defaults", name) for name in FEDERATIONS}
    yield from _head(["method", *FEDERATIONS])
    for method in all_methods():
        yield _row([f"`{method}`", *(_share(of.get(method), of["local"]) for of in found.values())])
    yield "\n    fedtailor compare results/federations/FEDERATION.toml"


def _natural() -> Iterator[str]:
    found = {name: lines("natural", name) for name in NATURAL}
    yield "\n## Features that shift, and natural groups\n"
    yield "Four federations whose clients differ in what their samples look like, or are groups that exist, **with the"
    yield "methods' defaults**: nothing was tuned here, so these numbers stand beside the table above, not beside the"
    yield "first. 20 rounds of 5 local epochs with `mlp`, seed 0. In brackets: how much better a method is than"
    yield "`fedavg`, one model for all, on the same clients; ▲ and ▼ where it is decided (paired Wilcoxon test over the"
    yield "clients, corrected by Holm for the column, 5 %). –: not run. Of one seed, little is decided."
    yield "[What differs from label skew](data.md#does-personalization-still-pay) is in the guide.\n"
    yield from (f"- **{name}**: {text}" for name, text in NATURAL.items())
    yield ""
    yield from _head(["method", *NATURAL])
    better = {name: better_than("fedavg", name) for name in NATURAL}
    for method in all_methods():
        if any(method in of for of in found.values()):
            yield _row([f"`{method}`", *(_beside(of.get(method), better[name]) for name, of in found.items())])
    yield "\n    fedtailor compare results/federations/FEDERATION.toml"


def better_than(base: str, federation: str) -> dict[str, tuple[float, str]]:
    """Return by how much each method is better than one of them, and ▲ or ▼ where that is certain."""
    clients = result("natural", federation)["clients"]["clients"]
    pairs = []
    for method, line in lines("natural", federation).items():
        scale = 1.0 if line["metric"] == "accuracy" else -0.01  # pairs are in points; of an error, less is better
        mine, theirs = (
            {client: scale * value for client, value in of_clients(clients, name).items()} for name in (method, base)
        )
        if method != base and mine:
            pairs.append(Pair.of(method, mine, theirs))
    marks = {"ahead": " ▲", "behind": " ▼", "not decided": ""}
    corrected = holm([pair.p for pair in pairs])
    return {pair.title: (pair.mean, marks[pair.verdict(p)]) for pair, p in zip(pairs, corrected, strict=True)}


def _beside(line: Line | None, better: dict[str, tuple[float, str]]) -> str:
    if line is None:
        return "–"
    if line["value"] is None:
        return "failed"
    value = f"{line['value'] * (100 if line['metric'] == 'accuracy' else 1):,.2f}"
    if line["method"] not in better:
        return value
    difference, mark = better[line["method"]]
    if difference < -DIVERGED:
        return "diverged"
    return f"{value} ({points(difference)}{mark})"


def _compositions() -> Iterator[str]:
    yield "\n## Compositions\n"
    yield "What [PGFed's auxiliary risk](compositions.md) adds to other methods, all at their defaults, seed 0:"
    yield f"`{OUTER}+METHOD` beside METHOD on the same clients. p is Wilcoxon's, corrected by Holm for the lines of the"
    yield "table. Federations and methods without a line were not run.\n"
    yield from _head(list(HEAD))
    yield from map(_row, rows([pair for name in FEDERATIONS for pair in composed(name)]))
    yield "\n    fedtailor compare results/studies/compositions-FEDERATION.toml"


def composed(federation: str) -> list[Pair]:
    """Compare compositions with the methods alone, where they were run."""
    if not path_of("compositions", federation).exists():
        return []
    clients = result("compositions", federation)["clients"]["clients"]
    values = {name: of_clients(clients, name) for name in lines("compositions", federation)}
    methods = [name for name in values if f"{OUTER}+{name}" in values]
    return [Pair.of(f"{federation}, `{name}`", values[f"{OUTER}+{name}"], values[name]) for name in methods]


def _rounding() -> Iterator[str]:
    yield "\n## On another processor\n"
    yield "Two columns once more, with the same code, versions and seeds on a processor of another kind. It rounds"
    yield "differently, and training amplifies that: so many points are between the two numbers of a method. A smaller"
    yield "difference between methods says nothing.\n"
    yield from _head(["federation", "mean", "largest"])
    for name in AGAIN:
        moved = differences(name)
        most = max(moved, key=lambda method: moved[method])
        yield _row([name, f"{fmean(moved.values()):.2f}", f"{moved[most]:.2f} (`{most}`)"])
    yield f"\n    {COLUMN}"


def differences(federation: str) -> dict[str, float]:
    """Return how many points are between the two runs of a column, by method."""
    first, again = lines("leaderboard", federation), lines("again", federation)
    return {method: 100 * abs(line["value"] - again[method]["value"]) for method, line in first.items()}


def _share(line: Line | None, local: Line) -> str:
    if line is None:
        return "–"
    if line["value"] is None:
        return "failed !"
    share = line["value"] / local["value"]
    return f"{100 * line['value']:.2f} ({share:.2f}){' !' if share < LEAST else ''}"


def below(federation: str) -> dict[str, float]:
    """Return the share of Local's accuracy of the methods that end below the least with their defaults."""
    found = lines("defaults", federation)
    shares = {method: (line["value"] or 0.0) / found["local"]["value"] for method, line in found.items()}
    return {method: share for method, share in shares.items() if share < LEAST}


def _head(cells: list[str]) -> Iterator[str]:
    yield _row(cells)
    yield "| --- |" + " ---: |" * (len(cells) - 1)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"

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
from fedtailor._common.toml import parse_toml
from fedtailor.experiment.tuned import shipped
from fedtailor.methods import CATALOGUE, all_methods
from fedtailor.studies.measures import LEVEL, holm, wilcoxon
from results.pairs import HEAD, Pair, of_clients, points, rows
from results.shipping import FRESH, SHIPPED, TUNINGS
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
FINE_TUNED, EPOCHS = "fedavg, fine-tuned", 5  # a row of its own, and its epochs
LATER = ("latest", "later")  # comparisons with the defaults of methods that the first one did not have
LEAST = 0.9  # share of Local's accuracy that a method must reach with its defaults, or its page says why not
Line = dict[str, Any]

INTRODUCTION = """\
# Leaderboard

<!-- Written by `python -m results`: change the records in results/, not this page. -->

{methods} of the {all} methods of the catalogue on four small real federations, **with settings tuned on validation
data** ({tuned}, the same budget for all); those that came later are below, [with the defaults](#with-the-defaults).
Accuracy in % of the personal models on test samples, mean over clients, after 20 rounds of 5 local epochs with `mlp`,
mean ± standard deviation over the seeds {seeds}. **Bold** is the best of a column; `≈`: no significant difference from
it (paired Wilcoxon test over the clients, corrected by Holm, 5 %).

{saw} A rank says what a method is worth on such federations, with few samples, few rounds and a small network. It says
nothing about large ones, and differences without significance say nothing at all. `fedavg, fine-tuned` is the baseline
that a personalized method has to beat: FedAvg's model with 5 epochs of fine-tuning at each client before it is
evaluated, with FedAvg's settings, which were tuned without that.

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


def having(kind: str) -> list[str]:
    """List the federations for which there is a comparison of a kind."""
    return [name for name in FEDERATIONS if path_of(kind, name).is_file()]


def lines(kind: str, federation: str) -> dict[str, Line]:
    """Return the lines of a comparison by method; with those of methods that came later, if it is of defaults."""
    later = [each for each in LATER if kind == "defaults" and path_of(each, federation).exists()]
    return {line["method"]: line for each in (*later, kind) for line in result(each, federation)["lines"]}


def leaderboard() -> str:
    """Write the whole page."""
    parts = [*_tuned(), *_fresh(), *_costs(), *_defaults(), *_natural(), *_compositions(), *_rounding()]
    return "\n".join(parts) + "\n"


def _tuned() -> Iterator[str]:
    found = {name: ranked(name) for name in having("leaderboard")}
    first = next(iter(found))
    ranks = {row: _mean_rank(row, found) for row in found[first]}
    seeds = lines("leaderboard", first)["local"]["seeds"]
    yield INTRODUCTION.format(
        tuned=shipped(first).how,
        seeds=", ".join(map(str, seeds)),
        saw=_what_tuning_saw(seeds),
        methods=len(lines("leaderboard", first)),
        all=len(all_methods()),
        federations="\n".join(f"- **{name}**: {text}" for name, text in FEDERATIONS.items() if name in found),
    )
    yield from _head(["method", *found, "mean rank"])
    for row in sorted(ranks, key=lambda row: ranks[row]):
        method, comma, how = row.partition(", ")
        title = f"[`{method}`]({page_of(CATALOGUE[method])}){comma}{how}"
        yield _row([title, *(_accuracy(of.get(row)) for of in found.values()), f"{ranks[row]:.1f}"])
    yield "\nThe command behind a cell of each column:\n"
    yield from (f"    {command(name)}" for name in found)
    yield "\nbehind a whole column:\n"
    yield f"    {COLUMN}\n"
    yield f"and behind the row of `{FINE_TUNED}`:\n"
    yield from (f"    {command(name, 'fedavg')} --grid 'fine_tune=0|{EPOCHS}'" for name in found)
    yield ""


def _what_tuning_saw(seeds: list[int]) -> str:
    """Say which of the samples behind the numbers tuning has looked at."""
    tuned = parse_toml((TUNINGS / "digits" / "tuning.toml").read_text(encoding="utf-8"))["seeds"]
    both = [seed for seed in seeds if seed in tuned]
    which = "seed" if len(tuned) == 1 else "the seeds"
    same = (
        f"{'one' if len(both) == 1 else 'some'} of those here, too; with the others" if both else "none of those here:"
    )
    return (
        f"Tuning looked at validation samples of {which} {', '.join(map(str, tuned))}, {same} the same samples are "
        "partitioned differently, so that a test sample may be one that tuning saw."
    )


@cache
def ranked(federation: str) -> dict[str, Line]:
    """Return the rows of a column: the tuned methods, and FedAvg with fine-tuning among them. Which is best, and which
    cannot be told from it, is found anew."""
    kinds = dict.fromkeys(lines("leaderboard", federation), "leaderboard") | {FINE_TUNED: "fine-tuned"}
    found = {**lines("leaderboard", federation), FINE_TUNED: fine_tuned(federation)}
    values = {
        row: of_clients(result(kind, federation)["clients"]["clients"], found[row]["title"])
        for row, kind in kinds.items()
    }
    known = {row: line["value"] for row, line in found.items() if line["value"] is not None}
    top = max(known, key=lambda row: known[row])
    others = [row for row in known if row != top]
    ps = holm([1.0 if (p := wilcoxon(values[row], values[top])) is None else p for row in others])
    like = {row for row, p in zip(others, ps, strict=True) if p >= LEVEL}
    return {
        row: {**line, "best": known.get(row) == known[top], "like_best": row in like} for row, line in found.items()
    }


def fine_tuned(federation: str) -> Line:
    """Return the line of FedAvg with fine-tuning."""
    return next(line for line in result("fine-tuned", federation)["lines"] if line["settings"]["fine_tune"] == EPOCHS)


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
    yield "Differences are tuned less default, paired over clients ([how](results.md)). Only tuned settings that are"
    yield "*ahead* come with [`--settings tuned:NAME`](tuning.md#settings-that-come-with-fedtailor); the other methods"
    yield "have their defaults there. Where a tuning chose the defaults there is nothing to compare.\n"
    for name in SHIPPED:
        yield from fresh_table(name)
    yield "The two commands behind a row:\n"
    for name in SHIPPED:
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
    found = {name: lines("defaults", name) for name in having("defaults")}
    yield from _head(["method", *found])
    for method in all_methods():
        yield _row([f"`{method}`", *(_share(of.get(method), of["local"]) for of in found.values())])
    yield "\n    fedtailor compare results/federations/FEDERATION.toml"


def _natural() -> Iterator[str]:
    found = {name: lines("natural", name) for name in NATURAL}
    yield "\n## Features that shift, and natural groups\n"
    yield "Four federations whose clients differ in what their samples look like, or are groups that exist, **with the"
    yield "methods' defaults**: nothing was tuned here, so these numbers stand beside the table above, not beside the"
    yield "first. 20 rounds of 5 local epochs with `mlp`, the mean of three seeds (of the watch: seed 0 alone). In"
    yield "brackets: how much better a method is than `fedavg`, one model for all, on the same clients; ▲ and ▼ where"
    yield "it is decided (paired Wilcoxon test over the clients, corrected by Holm for the column, 5 %). –: not run;"
    yield "classifiers take no numbers as labels (schools). Failed: the training diverges."
    yield "[What differs from label skew](data.md#does-personalization-still-pay) is in the guide.\n"
    yield from (f"- **{name}**: {text}" for name, text in NATURAL.items())
    yield ""
    yield from _head(["method", *NATURAL])
    better = {name: better_than("fedavg", name) for name in NATURAL}
    for method in all_methods():
        if any(method in of for of in found.values()):
            cells = (
                "failed" if method in failed(name) else _beside(of.get(method), better[name])
                for name, of in found.items()
            )
            yield _row([f"`{method}`", *cells])
    yield "\n    fedtailor compare results/federations/FEDERATION.toml"


def failed(federation: str) -> set[str]:
    """The methods of which no run came to its end."""
    return {run.partition(",")[0] for run in result("natural", federation)["failed"]}


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

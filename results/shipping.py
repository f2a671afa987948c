"""Settings that come with fedtailor: a tuning's choice if clients of other seeds do better with it, else the defaults.

A tuning is kept for shipping only if it had several seeds and enough trials. Its choice is then run beside the defaults
with seeds that it never saw; where it is not significantly ahead, or was not run, the method ships with its defaults.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.toml import parse_toml, write_toml
from fedtailor.experiment.tuned import find_settings
from results.pairs import HEAD, Pair, decided, of_clients, rows

HERE = Path(__file__).parent
COMPARISONS, TUNINGS = HERE / "comparisons", HERE / "tunings"
SETTINGS = HERE.parent / "fedtailor" / "experiment" / "tuned"
SHIPPED = {  # tunings whose settings come with fedtailor, with the words for their data
    "digits": "digits (8×8)",
    "fashion-classes": "Fashion-MNIST, at most 100 training samples a client, half of the clients in a round",
    "fashion-dirichlet": "Fashion-MNIST, at most 100 training samples a client, half of the clients in a round",
    "flights": "a table (New York's flights of 2013: is one late?), at most 200 training samples an airline",
}
TRIALS, SEEDS = 16, 3  # the least of a tuning that is to be shipped
FRESH = "2,3,4"  # seeds that no tuning saw


def check_budget(name: str, question: dict[str, Any]) -> None:
    """Refuse to ship what rests on too little: the best of few trials on one seed is often worse than the default."""
    trials, seeds = question.get("trials") or 0, question["seeds"]
    if trials < TRIALS or len(seeds) < SEEDS:
        raise FedtailorError(
            f"{name} is shipped with fedtailor, and its tuning has {trials} trials on {len(seeds)} seed(s): make at "
            f"least {TRIALS} on {SEEDS}."
        )


def chose_other(name: str) -> list[str]:
    """List the methods of a tuning for which it chose something else than their defaults."""
    found, tuning = [], find_settings(TUNINGS / name)
    for method in tuning.methods:
        trials = json.loads((TUNINGS / name / "trials" / f"{method}.json").read_text(encoding="utf-8"))["trials"]
        if not trials[0]["settings"].items() <= tuning.of(method).items():  # the first trial has the defaults
            found.append(method)
    return found


def fresh_pairs(name: str) -> list[Pair]:
    """Compare each choice with the method's defaults, over the clients of the fresh seeds."""
    files = [COMPARISONS / f"fresh-{kind}-{name}" / "result.json" for kind in ("tuned", "defaults")]
    if not all(file.is_file() for file in files):
        return []
    tuned, default = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    theirs, pairs = {line["title"]: line for line in default["lines"]}, []
    for line in tuned["lines"]:
        other = theirs.get(line["title"])
        if other is not None and line["seeds"] == other["seeds"]:
            values = (of_clients(result["clients"]["clients"], line["title"]) for result in (tuned, default))
            pairs.append(Pair.of(line["method"], *values))
    return pairs


def unproven(name: str) -> list[str]:
    """List the methods whose tuned settings are not ahead of their defaults with the fresh seeds, or were not run."""
    ahead = [pair.title for pair in decided(fresh_pairs(name))]
    return [method for method in chose_other(name) if method not in ahead]


def shipped_text(name: str) -> str:
    """Write the file of settings that ships: the tuning's, without those that are not shown to be better."""
    content = parse_toml((TUNINGS / name / "tuned.toml").read_text(encoding="utf-8"))
    left = unproven(name)
    for section in ("settings", "parameters"):
        content[section] = {m: own for m, own in content.get(section, {}).items() if m not in left}
    note = (
        f"\n# Defaults, as what was tuned is not shown to be better with other seeds: {', '.join(left)}."
        if left
        else ""
    )
    return f"# {SHIPPED[name]}{note}\n{write_toml(content)}"


def table(name: str) -> Iterator[str]:
    """Write how the choices of a tuning do beside the defaults, and of which that is not known yet."""
    pairs = fresh_pairs(name)
    unknown = [method for method in chose_other(name) if method not in {pair.title for pair in pairs}]
    yield f"### {name}\n"
    if pairs:
        head = [name, *HEAD[1:]]
        yield f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}"
        yield from (f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in rows(pairs))
        yield ""
    if ahead := [pair.title for pair in decided(pairs)]:
        yield f"Shipped as tuned: {', '.join(f'`{method}`' for method in ahead)}.\n"
    if unknown:
        yield f"Not run yet, so not known: {', '.join(f'`{method}`' for method in unknown)}.\n"

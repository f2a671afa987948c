"""Settings that come with fedtailor: a tuning's choice, but the defaults where clients of other seeds do worse with it.

A tuning is kept for shipping only if it had several seeds and enough trials. Its choice is then run beside the defaults
with seeds that it never saw; where the choice is significantly behind, the method ships with its defaults.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.toml import parse_toml, write_toml
from fedtailor.experiment.tuned import find_settings
from fedtailor.studies.measures import holm
from results.pairs import HEAD, Pair, of_clients, rows

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


def worse(name: str) -> list[str]:
    """List the methods whose tuned settings are behind their defaults with the fresh seeds."""
    pairs = fresh_pairs(name)
    corrected = holm([pair.p for pair in pairs])
    return [pair.title for pair, p in zip(pairs, corrected, strict=True) if pair.verdict(p) == "behind"]


def shipped_text(name: str) -> str:
    """Write the file of settings that ships: the tuning's, without those of the methods that do worse with them."""
    content = parse_toml((TUNINGS / name / "tuned.toml").read_text(encoding="utf-8"))
    left = worse(name)
    for section in ("settings", "parameters"):
        content[section] = {m: own for m, own in content.get(section, {}).items() if m not in left}
    note = f"\n# Defaults, as what was tuned is behind them with other seeds: {', '.join(left)}." if left else ""
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
    if left := worse(name):
        yield f"Shipped with their defaults for that reason: {', '.join(f'`{method}`' for method in left)}.\n"
    if unknown:
        yield f"Not run yet, so not known: {', '.join(f'`{method}`' for method in unknown)}.\n"

"""Writes docs/methods.md: three tables with a row for every method of the catalogue, from its class, from a small run,
from what a run with it refuses, and from the records of the four federations.

    python -m docs.make_methods_page [--check]

With `--check` nothing is written, and the exit code is 1 if the page is not current. Bytes and passes are counted, not
timed: they are the same on every machine.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

import fedtailor as ft
from fedtailor.client.sites import Site
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.experiment import Experiment
from fedtailor.messages import Reply, Request, State, Train
from fedtailor.method import Method
from fedtailor.methods import all_methods
from fedtailor.server.setup import describe_uploads
from fedtailor.training.stack import Call, Stack

DOCS = Path(__file__).parent
PAGE = DOCS / "methods.md"
ROUND = 3  # the round that is measured: by then, every method sends all that it ever sends
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "clients": 6,
    "model": "mlp",
    "batch": "full",
    "participation": 0.5,
    "rounds": ROUND,
    "engine": "in-process",
    "evaluation": {"every": ROUND},
}
PARAMETERS: dict[str, dict[str, Any]] = {"lg-fedavg": {"warm_rounds": 0}}  # its first rounds are FedAvg's

INTRODUCTION = """\
# The methods

<!-- Written by docs/make_methods_page.py: change the classes, not this page. -->

Every method of the catalogue in one row; its own page says more. `fedtailor methods` lists their parameters.

**Leaves a client** names each tensor that a participant uploads, and what the server sees of it: the mean over the
clients that replied and nothing else (by their training samples, a plain mean, or one by weights that the clients
upload with it), or each client's own. With one participant, a mean is that client's own.

**Down** and **up** are what the server sends to a participant and gets from it in a round, in vectors of the model's
size d (4·d bytes); **both** is their sum, FedAvg's being 2. **Work** is how many samples a participant passes forwards
through the network in a round, relative to FedAvg; a pass through the head alone, on features that are kept, counts as
nothing, and so does evaluation. All are counted in round 3 of a run with the defaults on digits: `mlp` (d =
{size:,}), 6 clients of which 3 take part, 5 local epochs of one full batch (LG-FedAvg without its warm rounds, which
are FedAvg's). So a pass over all training samples beside the local epochs is 0.2.

"""
HEADER = """\
| method | paper | shared | each client's own | leaves a client | down | up | both | work | limits |
| --- | --- | --- | --- | --- | --: | --: | --: | --: | --- |
"""
TRIED: dict[str, dict[str, Any]] = {  # settings that a method may refuse, by column
    "robust rules": {"aggregation": "median"},
    "privacy of clients": {"privacy": "client, noise=1"},
    "privacy of samples": {"privacy": "sample, noise=1", "batch": 10},
    "secure aggregation": {"secure": True, "engine": "sites-in-memory"},
    "fine-tuning": {"evaluation": {"fine_tune": 1}},
}
DEFENCES = f"""
## What goes with it

Each cell was tried: a run with these settings is prepared, or refused in one sentence. [Robust rules](robust.md) are
`--aggregation median` and its kin, [privacy](privacy.md) is differential privacy of whole clients or [of single
samples](privacy-samples.md); with [secure aggregation](secure-aggregation.md) the server learns sums alone. A method
that cannot be fine-tuned predicts by more than one network's weights: it has no model file, and does not run at real
sites.
**Stacked** is the share of the gradients of a method's training that clients compute [together](accelerators.md) with
`--stack`, counted in a run. **New clients** is what a client predicts with that never took part.

| method | {" | ".join(TRIED)} | stacked | new clients |
| --- | {" | ".join(["---"] * len(TRIED))} | --: | --- |
"""
RESULTS = """
## On four small federations

Accuracy in % on test samples, mean over clients and seeds, from the records of the [leaderboard](leaderboard.md), which
has the federations, deviations and tests of significance. Defaults are those of the method and of the experiment, tuned
settings the choices of a tuning, of which
[those that are better than the defaults](leaderboard.md#are-the-tuned-settings-better-than-the-defaults) come with
`--settings tuned:NAME`. `–`: not run.

"""
REFUSALS = """
Every method trains with any [optimiser, schedule, clipping, label smoothing and class weights](training.md), but:

"""


@dataclass(frozen=True)
class Cost:
    """What one participant costs in a round: vectors down and up, and samples through the network."""

    down: float
    up: float
    passed: float
    size: int  # of the model, d


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """List the samples of each forward pass of the measured round's training work, as they come."""
    passes: list[int] = []
    work = Site.work

    def count(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        passes.append(len(outputs))

    def watched_work(site: Site, request: Request, state: State) -> tuple[Reply, State]:
        if not isinstance(request, Train) or request.round != ROUND:
            return work(site, request, state)
        network = site.terms.network
        hook = network.module.get_submodule(next(iter(network.layout.layers))).register_forward_hook(count)
        try:
            return work(site, request, state)
        finally:
            hook.remove()

    with patch.object(Site, "work", watched_work):
        yield passes


def measure(name: str) -> Cost:
    """Measure a short run of a method."""
    with counted_passes() as passes:
        result = ft.run(name, **SETTINGS, parameters=PARAMETERS.get(name, {}))
    record, size = result.rounds[ROUND - 1], len(result.simulation.server.initial)
    assert not record.failed, name
    participants = len(record.participants)
    vectors = 4 * size * participants
    return Cost(record.bytes_down / vectors, record.bytes_up / vectors, sum(passes) / participants, size)


def stacked(name: str) -> str:
    """Count the share of the gradients that are computed for several clients at once, in a short run; – without any."""
    shared, together = 0, Stack._together

    def counted(stack: Stack, run: list[Call]) -> Any:
        nonlocal shared
        before = sum(call.network.differentiated for call in run)
        answers = together(stack, run)
        shared += sum(call.network.differentiated for call in run) - before
        return answers

    with patch.object(Stack, "_together", counted), patch("fedtailor.training.stack.MANY", 1):  # as on an accelerator
        settings = {**SETTINGS, "stack": 3, "evaluation": {"every": 0}}  # records count no gradients of evaluations
        result = ft.run(name, **settings, parameters=PARAMETERS.get(name, {}))
    total = sum(record.differentiated for record in result.rounds)
    return f"{shared / total:.0%}" if total else "–"


def page() -> str:
    """Make the whole page."""
    methods = all_methods()
    costs = {name: measure(name) for name in methods}
    average = costs["fedavg"]
    rows = (row(method, costs[name], average.passed) for name, method in methods.items())
    return "".join(
        [
            *(INTRODUCTION.format(size=average.size), HEADER, *rows, REFUSALS, *refusals(methods)),
            *(DEFENCES, *map(goes_with, methods.values())),
            *(RESULTS, *results(methods)),
        ]
    )


def row(method: Method, cost: Cost, average: float) -> str:
    kind = type(method)
    cells = [
        f"[`{kind.name}`]({page_of(kind)})",
        citation(kind.paper),
        kind.shared_part,
        kind.own_part,
        uploads(method),
        f"{cost.down:.2f}",
        f"{cost.up:.2f}",
        f"{cost.down + cost.up:.2f}",
        f"{cost.passed / average:.2f}",
        limits(kind),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def refusals(methods: Mapping[str, Method]) -> Iterator[str]:
    """List the settings of local training that methods refuse, and why."""
    for name, method in methods.items():
        for reason in dict.fromkeys(method.refuses.values()):
            settings = [f"`{setting}`" for setting, why in method.refuses.items() if why == reason]
            yield f"- `{name}` refuses {' and '.join(settings)}: {reason}.\n"


def goes_with(method: Method) -> str:
    """Write the row of what goes with a method: what a run with it is not refused for."""
    cells = [f"`{type(method).name}`", *("yes" if allows(method, settings) else "no" for settings in TRIED.values())]
    return f"| {' | '.join([*cells, stacked(type(method).name), sentence(type(method), 'New clients')])} |\n"


def allows(method: Method, settings: Mapping[str, Any]) -> bool:
    """Find out whether a run of the method can have these settings."""
    try:
        prepare(Experiment(**{**SETTINGS, **settings, "method": type(method).name}), Objects(method=method))
    except ft.FedtailorError:
        return False
    return True


def results(methods: Mapping[str, Method]) -> Iterator[str]:
    """Write the rows of the results on the four federations, with defaults and with tuned settings."""
    from results.leaderboard import having, lines

    tuned = having("leaderboard")
    kinds = {"defaults": "defaults", "leaderboard": "tuned"}
    found = {f"{name}, {how}": lines(kind, name) for name in tuned for kind, how in kinds.items()}
    yield f"| method | {' | '.join(found)} |\n"
    yield f"| --- | {' | '.join(['--:'] * len(found))} |\n"
    for name in methods:
        values = [of.get(name, {}).get("value") for of in found.values()]
        yield f"| `{name}` | {' | '.join('–' if v is None else f'{100 * v:.1f}' for v in values)} |\n"


def page_of(kind: type[Method]) -> str:
    """Find the page of a method: its own, that of its file (FedAdam's is FedOpt's), or that of the method which it
    varies (PGFedMo's is PGFed's)."""
    bases = [base for base in kind.__mro__ if issubclass(base, Method) and base.name]
    names = [name for base in bases for name in (base.name, base.__module__.rpartition(".")[2])]
    return next(f"methods/{name}.md" for name in names if (DOCS / "methods" / f"{name}.md").exists())


def uploads(method: Method) -> str:
    """List what leaves a client, and what the server sees of it."""
    names: dict[str, list[str]] = {}
    for name, how in describe_uploads(method).items():
        weights = how.removeprefix("mean by ")
        how = f"mean by `{weights}`" if weights in method.uploaded else how
        names.setdefault(how, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(those)}: {how}" for how, those in names.items()) or "nothing"


def citation(paper: str) -> str:
    """Cut a reference down to author and year: «Li et al., Ditto: Fair and …, ICML 2021» is «Li et al., ICML 2021»."""
    first, _, rest = paper.partition(",")
    if not rest:
        return first or "—"
    authors = first if "et al." in first or "&" in first else f"{first} et al."
    last = rest.rsplit(", ", 1)[-1]
    return f"{authors}, {last}" if re.search(r"\b\d{4}$", last) else authors


def limits(kind: type[Method]) -> str:
    """Find what the docstring says of limit cases."""
    return sentence(kind, "Limits?")


def sentence(kind: type[Method], subject: str) -> str:
    """Find what the docstring says after «Limits:», up to the end of the paragraph or the next such word."""
    found = re.search(
        rf"{subject}(?P<where>, [^:]+:|:)\s(?P<text>.*?)(?=\n\n|\s+(?:Limits?|New clients|Deviations?)\b[^:.]*:|\Z)",
        inspect.cleandoc(kind.__doc__ or ""),
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"The docstring of {kind.__name__} says nothing of «{subject.rstrip('?')}:».")
    text = " ".join(f"{found['where'].lstrip(', :')} {found['text']}".split())
    return text if text[1:2] in " ." else text[0].upper() + text[1:]  # a symbol stays as it is


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/methods.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not current")
    check = parser.parse_args(arguments).check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/methods.md is not current: run python -m docs.make_methods_page.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

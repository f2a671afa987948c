"""`fedtailor site check`: the page that a hospital's engineer reads before anything is joined."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedtailor._common.errors import FedtailorError
from fedtailor.cli.display import json_text, marked, out, print_json, table_of, visible
from fedtailor.experiment.privacy import Privacy

if TYPE_CHECKING:
    from fedtailor.sites.findings import Findings
    from fedtailor.sites.preview import Preview
    from fedtailor.sites.rehearsal import Exchange, Sent

ASKED = {"train": "training", "evaluate": "evaluation", "evaluate shared": "evaluation"}
ASKED |= {"shares": "keys", "masked": "upload", "agree": "signing", "open": "opening"}  # of secure aggregation
ENTRIES = {
    "site": "its name",
    "run": "its name",
    "asked": "train or evaluate",
    "round": "its number",
    "client": "the site's number",
    "version": "the round of the site's state",
    "differentiated": "number of gradients computed",
    "seconds": "of work",
}
SHOWN_CLASSES = 20
CANNOT_JOIN = 1  # the exit code


def check(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="the site's own file")],
    json: Annotated[bool, typer.Option("--json", help="all of it, for programs")] = False,
) -> None:
    """Read the site's data, and show exactly what would leave. Nothing is sent.

    It says what was found in the data, what keeps the site from joining and how to mend it, each fact that the site
    declares, each tensor that goes up and down in the rounds, and what never leaves. Exit code 0: the site can join; 1:
    it cannot.

    [bold]Examples[/]
      fedtailor site check site.toml
      fedtailor site check site.toml --json
    """
    from fedtailor.sites.preview import preview
    from fedtailor.sites.site_file import read_site

    site = read_site(file)
    found = preview(site, site.read_plan())
    if json:
        print_json(found.plain())
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(CANNOT_JOIN)


def status(file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="the site's own file")]) -> None:
    """Show what private trainings have cost the site's data so far, in all runs and plans.

    The site writes it down before each one, and refuses those that would cost more than `epsilon` in its file.
    """
    from fedtailor.sites.ledger import account_of, answered_so_far, most, spent_so_far
    from fedtailor.sites.site_file import read_site

    site = read_site(file)
    plan, account = site.read_plan(), account_of(site)
    terms = plan.terms()
    _say(f"Site {site.name} in the federation {plan.name}. All plans and runs with its directory:", "bold")
    if terms.privacy is None or terms.epsilon == "inf":
        _say(f"{answered_so_far(account)}. This plan has no privacy: nothing bounds what its trainings cost.")
        return
    _say(f"{spent_so_far(account, Privacy.parse(terms.privacy))}.")
    limit = most(site, terms)
    what = "what one run of the plan costs (`fedtailor site check` computes it)" if limit is None else f"ε = {limit:g}"
    _say(f"All together may cost {what} at most (`epsilon` in site.toml).")


def leave(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="the site's own file")],
    yes: Annotated[bool, typer.Option("--yes", help="really remove states and keys")] = False,
) -> None:
    """Leave a federation: remove the site's states, keys and kit, and say what remains of its data elsewhere.

    Its models, its log and the ledger of private trainings stay. Ask the coordinator to revoke the certificate too.
    """
    from fedtailor.sites.kits.departure import leave as depart
    from fedtailor.sites.ledger import account_of, answered_so_far, spent_so_far
    from fedtailor.sites.site_file import read_site

    site = read_site(file)
    plan, account = site.read_plan(), account_of(site)
    if not yes:
        raise FedtailorError(f"This removes the states and keys of {site.name} for good: say --yes if you mean it.")
    took_part, removed = depart(site)
    _say(f"Removed: {', '.join(map(str, removed)) or 'nothing, as nothing was there'}.")
    _say(f"Models, log and ledger stay in {site.private}.\n")
    for run in took_part:
        last = f"trained last in round {run.round}" if run.round else "has no state of a finished round"
        _say(f"What remains elsewhere of the run {run.run} ({run.method}), in which {site.name} {last}:", "bold")
        for upload, what in run.uploads.items():
            _say(
                f"  {upload}: the server has {what}"
                + (", from which no part can be taken out." if "mean" in what else ".")
            )
        _say("  In the run directory: what the site declared, its metrics of every round, and when it took part.")
        _say("  In the others' models: what training made of the above. Only a run without this site is without it.")
    privacy = plan.terms().privacy
    _say(
        f"\n{spent_so_far(account, Privacy.parse(privacy))}: this bounds what all of it tells about the data."
        if privacy
        else f"\n{answered_so_far(account)}: without privacy in the plan nothing bounds what this tells about the data."
    )
    _say(f"The coordinator revokes what certificates there are: fedtailor deploy revoke KITS {site.name}")


def _show(found: "Preview") -> None:
    experiment, sites = found.plan.terms(), len(found.plan.sites)
    _say(f"Site {found.site} in the federation {found.plan.name}: {experiment.method}, {sites} sites.", "bold")
    _say("Nothing is sent, and nothing is written.\n")
    _show_data(found)
    if found.hello:
        _show_declared(found)
    if found.rehearsal:
        _show_rounds(found)
        _show_never()
    if found.problems:
        _say("")
        if not found.rehearsal:
            _say("What would leave is shown when these are mended:")
        for problem in found.problems:
            out.print(marked("✗", "bold red", problem))
        count = len(found.problems)
        _say(f"\nThe site cannot join yet: {count} thing{'s' if count > 1 else ''} to mend.", "bold red")
    else:
        _say("\nThe site can join.", "bold green")


def _say(text: str, style: str = "") -> None:
    out.print(Text(text, style=style))


# --- the data ---


def _show_data(found: "Preview") -> None:
    findings, hello = found.findings, found.hello
    if findings.dataset is None:
        _say(f"{found.data} could not be read.")
        return
    _say(f"1. Found in {visible(found.data)} (this part stays here)", "bold")
    split = ""
    if hello:
        own = any(one.kind == "split" for one in findings.columns)
        split = f": {hello.train:,} for training, {hello.validation:,} for validation, {hello.test:,} for testing, "
        split += "as the split column says" if own else "by a hash of each row"
    _say(f"{findings.rows:,} rows{split}.")
    if findings.classes:
        often = list(findings.classes.items())
        words = ", ".join(f"{visible(name)} ({count:,})" for name, count in often[:SHOWN_CLASSES])
        more = f" and {len(often) - SHOWN_CLASSES} more" if len(often) > SHOWN_CLASSES else ""
        where = next((f" in {visible(one.name)}" for one in findings.columns if one.kind == "label"), "")
        _say(f"{len(often)} classes{where}: {words}{more}.")
    if findings.columns:
        _show_columns(findings)
    for note in findings.notes:
        out.print(marked("Note:", "yellow", note))


def _show_columns(findings: "Findings") -> None:
    shown = [one for one in findings.columns if one.kind not in ("ignored", "label")]
    rows = [
        (visible(one.name), one.kind, *(f"{n:,}" if n else "·" for n in (one.missing, one.values, one.rare)))
        for one in shown
    ]
    _print_table(("column", "as", "missing", "values", "not declared"), rows, left=("column", "as"))
    if ignored := [visible(one.name) for one in findings.columns if one.kind == "ignored"]:
        _say(f"Ignored columns: {', '.join(ignored)}.")


# --- what leaves ---


def _show_declared(found: "Preview") -> None:
    hello = found.hello
    assert hello is not None
    _say("\n2. Leaves once, when the site joins: these facts, and no others", "bold")
    plain = hello.model_dump(mode="json")
    facts = plain.pop("facts")
    if not found.secret:
        plain["data"] = "a checksum with the site's own secret, which is made at its first start"
    rows = [(name, value if isinstance(value, str) else json_text(value, indent=None)) for name, value in plain.items()]
    _print_table(("fact", "value"), rows, left=("fact", "value"))
    if facts:
        _say("facts, of each column of the training rows:")
        names = list(facts[0])
        _print_table(names, [[_cell(fact[name]) for name in names] for fact in facts], left=("name", "kind", "values"))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(visible, value)) or "·"
    return visible(value)


def _show_rounds(found: "Preview") -> None:
    from fedtailor.sites.ledger import standing

    rehearsal = found.rehearsal
    assert rehearsal is not None
    others = [each for each in rehearsal.exchanges if each.asked.startswith("evaluate")]
    trained = [each for each in rehearsal.exchanges if each not in others]
    _say("\n3. Leaves in the rounds", "bold")
    _print_tensors([(f"{ASKED[each.asked]}, {_rounds(each.rounds)}", each.up) for each in trained], seen=True)
    if found.plan.terms().secure:
        _say(
            "Secure aggregation: the upload leaves as random numbers, and opened is nothing but the sum over at least "
            f"{rehearsal.together} sites."
        )
    else:
        _say(
            "The server receives every site's tensors. Of those of which it sees a mean, the method and the records "
            "get nothing else."
        )
    if found.budget and found.account:
        _say(found.budget.privacy.in_words(simulated=False, secure=found.plan.terms().secure))
        _say(standing(found.account, found.budget))
    for each in (*trained, *others):
        if each in others or each.metrics:
            _say(f"Evaluation, {_rounds(each.rounds)}: {_metrics(each, found.tells)}")
    entries = dict.fromkeys(name for each in rehearsal.exchanges for name in each.header)
    _say(f"Each letter also says: {', '.join(f'{name} ({ENTRIES[name]})' for name in entries)}.")
    _say(f"If something fails: nothing but one of these words: {', '.join(found.faults)}.")
    _say("At the end: that the site's model file is written, and nothing of it.")
    if found.open:
        _say(f"Sizes are as if all sites were like this one. They also depend on {'; '.join(found.open)}.", "yellow")
    _say("\n4. Comes down", "bold")
    down = [("at the beginning", rehearsal.begin)]
    down += [(f"{ASKED[each.asked]}, {_rounds(each.rounds)}", each.down) for each in (*trained, *others)]
    _print_tensors([(when, tensors) for when, tensors in down if tensors], seen=False)
    _say("Beside these, at the beginning: the experiment, the sites' names, the classes, the features' constants.")


def _metrics(each: "Exchange", tells: str) -> str:
    if not each.metrics:
        return "nothing but that it was done." if tells == "none" else "no metrics."
    how = {"exact": "as they are", "rounded": "rounded to two decimals"}.get(tells, tells)
    names = next(iter(each.metrics.values()))
    return f"{', '.join(names)} on the {' and '.join(each.metrics)} samples, {how}."


def _print_tensors(groups: Sequence[tuple[str, Sequence["Sent"]]], seen: bool) -> None:
    """List tensors by when they pass."""
    rows: list[list[str | Text]] = []
    for when, tensors in groups:
        if not tensors:
            rows.append([when, "none"])
        for number, one in enumerate(tensors):
            shape = "×".join(map(str, one.shape)) or "one number"
            cells = [visible(one.name), shape, one.dtype, f"{one.bytes:,}", *([one.seen] if seen else [])]
            rows.append(["" if number else when, *cells])
        if len(tensors) > 1:
            rows.append(["", *(Text(text, "dim") for text in ("in all", "", "", f"{sum(t.bytes for t in tensors):,}"))])
    columns = ("when", "tensor", "shape", "type", "bytes", *(["the server sees"] if seen else []))
    _print_table(columns, rows, left=[name for name in columns if name != "bytes"])


def _rounds(rounds: Sequence[int]) -> str:
    """Name rounds in words: round 1, rounds 2 to 30, rounds 2, 5, 6 … (12 rounds)."""
    first, last = rounds[0], rounds[-1]
    if first == last:
        return f"round {first}"
    if last - first + 1 == len(rounds):
        return f"rounds {first} to {last}"
    few = ", ".join(map(str, rounds[:5]))
    return f"rounds {few} … ({len(rounds)} rounds)" if len(rounds) > 5 else f"rounds {few}"


def _show_never() -> None:
    from fedtailor.sites.preview import NEVER_LEAVES

    _say("\n5. Never leaves", "bold")
    for words in NEVER_LEAVES:
        _say(f"- {words}")


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Sequence[str]) -> None:
    table = table_of(None, columns, rows, left)
    table.show_edge = False
    out.print(table)

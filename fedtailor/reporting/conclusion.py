"""The conclusion at the head of a report: what came out, in a few sentences made of the table's numbers."""

from collections.abc import Iterator, Sequence

from fedtailor._common.text import human_bytes
from fedtailor.studies.captions import test_finds_nothing
from fedtailor.studies.measures import LEVEL
from fedtailor.studies.summary import Line, Summary

NAMED = 4  # methods, or clients, by name in a sentence


def conclusion(summary: Summary) -> str:
    """Say who is best, whether that is more than chance, what it costs, and whom it harms."""
    first, lines = _ranked(summary)
    more = [*_costs(first[0], lines), *_harm(first[0])] if first else []
    return " ".join([verdict(summary), *more])


def verdict(summary: Summary) -> str:
    """Say who is best, and whether that is more than chance: the conclusion in one or two sentences."""
    first, lines = _ranked(summary)
    return " ".join([_best(summary, first, lines), *_chance(summary, lines)]) if first else _unranked(summary)


def _ranked(summary: Summary) -> tuple[list[Line], list[Line]]:
    """Find the lines that share the first place, and all that are ranked."""
    lines = [line for line in summary.lines if line.ranked]
    if len(summary.lines) == 1:
        lines = list(summary.lines)
    return [line for line in lines if line.best] or (lines if len(lines) == 1 else []), lines


def _unranked(summary: Summary) -> str:
    """Say why no line is the best."""
    if all(line.value is None for line in summary.lines):
        return f"No test {summary.metric.title} was measured, so there is no conclusion."
    return "There are several settings of a method and no validation data to choose one by: none is ranked."


def _value(line: Line) -> str:
    return line.metric.text(line.value) + line.metric.unit


def _best(summary: Summary, first: Sequence[Line], lines: Sequence[Line]) -> str:
    """Name the best line, and the second; a single one by its value alone."""
    metric, line, seeds = summary.metric, first[0], max(len(line.seeds) for line in summary.lines)
    over = f"a mean over {seeds} seeds" if seeds > 1 else "with one seed: another may turn out otherwise"
    if len(lines) == 1:
        return f"{line.label} has a test {metric.title} of {_value(line)} ({over})."
    superlative = "highest" if metric.higher_is_better else "lowest"
    if len(first) > 1:
        return f"{_listed(first)} share the {superlative} {metric.title}, {_value(line)} ({over})."
    second = [other for other in lines if other.second]
    are = "are" if len(second) > 1 else "is"
    behind = f"; {_listed(second)} {are} next with {_value(second[0])}" if second else ""
    return f"{line.label} has the {superlative} {metric.title}, {_value(line)}{behind} ({over})."


def _chance(summary: Summary, lines: Sequence[Line]) -> Iterator[str]:
    """Say from whom the best line differs by more than chance."""
    best, tested = summary.best, [line for line in lines if line.p is not None]
    if best is None or not tested:
        return
    if test_finds_nothing(summary):
        yield "There are too few clients for any difference to be significant."
        return
    like, unlike = ([line for line in tested if line.like_best is same] for same in (True, False))
    better = f"{best.label} is significantly better than"
    if not unlike:
        yield f"No method differs significantly from {best.label}: the differences may be chance."
    elif not like:
        yield f"{better} {'all others' if len(unlike) > 1 else unlike[0].label} (p < {LEVEL:g})."
    else:
        yield f"{better} {_listed(unlike)} (p < {LEVEL:g}), but its lead over {_listed(like)} may be chance."


def _costs(best: Line, lines: Sequence[Line]) -> Iterator[str]:
    """Say what the best line costs, beside the cheapest of the others that send anything."""
    others = [line for line in lines if line is not best and line.bytes]
    cheapest = min(others, key=lambda line: line.bytes, default=None)
    beside = f"; {cheapest.label}, the cheapest other that sends any, {_price(cheapest)}" if cheapest else ""
    if cheapest and cheapest.bytes >= best.bytes > 0:
        beside = "; no other method that sends anything sends less"
    yield f"{best.label} {_price(best)}{beside}."


def _price(line: Line) -> str:
    sends = f"sends {human_bytes(line.bytes)} in all" if line.bytes else "sends nothing"
    if not line.passes:
        return sends
    count = f"{line.passes:.1f}".removesuffix(".0")
    return f"{sends} and takes {count} pass{'' if count == '1' else 'es'} over a client's samples a round"


def _harm(best: Line) -> Iterator[str]:
    """Say how many clients do worse with the best line than with Local."""
    if best.method == "local":
        yield "No other method has a better mean than Local, where each client trains alone."
    elif best.losing is None:
        yield "Without a run of Local it is not known which clients would do better alone."
    elif not best.losing:
        yield f"None of {best.clients} clients does worse with {best.label} than with Local."
    else:
        number = f"{best.losing:.1f}".removesuffix(".0")
        mean = " on average over seeds" if len(best.seeds) > 1 else ""
        do = "does" if number == "1" else "do"
        yield f"{number} of {best.clients} clients {do} worse with {best.label} than with Local{mean}."


def _listed(lines: Sequence[Line]) -> str:
    """List lines in a sentence: all of a few, or the first of many and how many there are."""
    names = [line.label for line in lines]
    if len(names) > NAMED:
        names = [*names[: NAMED - 1], f"{len(names) - NAMED + 1} others"]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]

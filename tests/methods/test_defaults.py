"""Users judge a method by its defaults: with these, it is as good as doing without it, or its page says why not.

On two small federations with all settings at their defaults, no personalised method ends more than a point below Local,
and no global one more than two below FedAvg. A page that admits more says it in a paragraph of this form:

    **Below Local** with its defaults on digits: 8.7 points with `classes:2`. Why.
"""

import re
from statistics import fmean

import pytest

import fedtailor as ft
from fedtailor.methods import all_methods
from tests.methods.pages import page_of

LAST = 5  # rounds of which the mean is taken
PRECISION = 2.0  # points by which a page's figure may be off


def accuracy(method: str, partition: str) -> float:
    """In per cent, the mean of the last rounds: single ones go up and down."""
    result = ft.run(method, data="digits", partition=partition, engine="in-process")
    return 100 * fmean(record.accuracy or 0.0 for record in result.rounds[-LAST:])


def admitted(page: str, reference: str, partition: str) -> float | None:
    """The points below a reference that a page admits; None if it does not."""
    paragraph = re.search(rf"\*\*Below {reference}\*\*.*?(?=\n\n|\Z)", page, re.DOTALL)
    words = " ".join(paragraph[0].split()) if paragraph else ""
    found = re.search(rf"(\d+\.\d) points with `{re.escape(partition)}`", words)
    return float(found[1]) if found else None


def complaint(below: float, allowed: float, said: float | None) -> str:
    """What is wrong with a method that ends so many points below its reference, given what its page says."""
    if said is None:
        return f"it is {below:.1f} points below, and its page does not say so" if below > allowed else ""
    if below < 0:
        return f"its page says that it is {said:.1f} points below, but it is {-below:.1f} above"
    if abs(below - said) > PRECISION:
        return f"its page says that it is {said:.1f} points below, but it is {below:.1f}"
    return ""


@pytest.mark.long
@pytest.mark.parametrize("partition", ["classes:2", "dirichlet:0.3"])
def test_defaults_are_no_worse_than_doing_without(partition: str) -> None:
    methods = all_methods()
    found = {name: accuracy(name, partition) for name in methods}
    complaints = []
    for name, method in methods.items():
        reference, allowed = ("FedAvg", 2.0) if method.shares_model else ("Local", 1.0)
        below = found[reference.lower()] - found[name]
        if said := complaint(below, allowed, admitted(page_of(method), reference, partition)):
            complaints.append(f"{name}, against {reference}: {said}")
    assert not complaints, "\n".join(complaints)


def test_every_method_has_its_reference() -> None:
    shared = {name for name, method in all_methods().items() if method.shares_model}
    assert {"fedavg", "fedprox", "feddyn", "scaffold", "moon"} <= shared
    assert not shared & {"local", "ditto", "pgfed", "fedacs", "pfedmb", "pflego"}


def test_a_page_admits_in_one_paragraph() -> None:
    below = "**Below Local** with its defaults on\ndigits: 3.2\npoints with `a:1`, 0.4 points with `b`."
    page = f"Some.\n\n{below}\n\n9.9 points with `c`"
    assert admitted(page, "Local", "a:1") == 3.2
    assert admitted(page, "Local", "b") == 0.4
    assert admitted(page, "Local", "c") is None
    assert admitted(page, "FedAvg", "b") is None


@pytest.mark.parametrize(
    ("below", "said", "words"),
    [
        (0.9, None, ""),
        (1.1, None, "does not say so"),
        (-3.0, None, ""),
        (3.0, 2.0, ""),
        (0.5, 1.2, ""),
        (5.0, 2.0, "says that it is 2.0 points below, but it is 5.0"),
        (-0.5, 1.2, "but it is 0.5 above"),
    ],
)
def test_what_a_page_says_must_be_true(below: float, said: float | None, words: str) -> None:
    found = complaint(below, 1.0, said)
    assert words in found
    assert bool(words) == bool(found)

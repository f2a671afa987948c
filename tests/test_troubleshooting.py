"""Every message that docs/troubleshooting.md quotes is one that the code has: most are provoked, by real bad input, and
the others are found in the source."""

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from tests.cli.calling import Call, call
from tests.doc_pages import ROOT

__all__ = ["call"]

QUOTED = re.compile(r"^- (`+) ?(.+?) ?\1$", re.MULTILINE)
SHARE = 0.5  # of a quoted message that must be constant text of the source


def quotes(page: str) -> list[str]:
    """The messages that a page quotes, with … for what differs."""
    return [text for _, text in QUOTED.findall(page)]


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
QUOTES = quotes(PAGE)


def matches(quote: str, message: str) -> bool:
    """Find out whether a message is the quoted one."""
    return re.fullmatch(".+?".join(map(re.escape, quote.split("…"))), message, re.DOTALL) is not None


# --- messages in the source ---


def templates(source: str) -> Iterator[list[str]]:
    """Yield the constant pieces of every text and f-string of a module, between what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            pieces = [""]
            for part in node.values:
                if isinstance(part, ast.Constant):
                    pieces[-1] += str(part.value)
                else:
                    pieces.append("")
            yield pieces
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield [node.value]


SOURCE = [
    pieces
    for path in sorted((ROOT / "fedtailor").rglob("*.py"))
    for pieces in templates(path.read_text("utf-8"))
    if sum(map(len, pieces)) > 20
]


def in_source(quote: str, source: list[list[str]]) -> bool:
    """Find out whether a text of the source makes the quoted message, and not by what is filled in alone."""
    constant = len(quote.replace("…", ""))
    return any(
        sum(map(len, pieces)) >= SHARE * constant and re.fullmatch(".*?".join(map(re.escape, pieces)), quote, re.DOTALL)
        for pieces in source
    )


# --- messages that are provoked ---


@dataclass(frozen=True)
class Tools:
    """What provokes a message: the command line, and small data in the test's own directory."""

    call: Call
    monkeypatch: pytest.MonkeyPatch


SMALL: Mapping[str, Any] = {"clients": 4, "rounds": 1, "max_train": 20, "epochs": 1, "model": "mlp:8"}
Clients = list[tuple[Any, Any]]


def pair(samples: int = 40, y: Any = None) -> tuple[Tensor, Any]:
    x = torch.linspace(0, 1, samples * 3).reshape(samples, 3)
    return x, torch.arange(samples) % 2 if y is None else y


def clients(**change: Any) -> Clients:
    return [pair(**change), pair(**change)]


def table(text: str, name: str = "table.csv") -> str:
    Path(name).write_text(text)
    return name


def rows(age: Callable[[int], object], count: int = 40) -> str:
    return "\n".join(["age,ward,label", *(f"{age(n)},icu,{n % 2}" for n in range(count))]) + "\n"


def made(**change: Any) -> str:
    """A run directory."""
    ft.run("fedavg", **{**SMALL, **change}, out="run")
    return "run"


def spoiled(file: str, text: str, by: str) -> str:
    path = Path(made()) / file
    path.write_text(path.read_text("utf-8").replace(text, by), "utf-8")
    return "run"


class TwoOutputs(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


class NeedsMore(nn.Module):
    def __init__(self, *, secret: str) -> None:
        super().__init__()


class Raises(ft.Method):
    """A method that never works at client 1."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        if client.n_samples != 28:
            raise ValueError("no luck")
        return {"theta": message["theta"]}


def uneven() -> Clients:
    return [pair(40), pair(60)]


def grouped() -> list[dict[str, Any]]:
    """Two clients; all samples of the second are of one group."""
    return [{"x": pair()[0], "y": pair()[1], "group": group} for group in (range(40), [0] * 40)]


def changed_data(t: Tools) -> None:
    for start in (0, 1):
        np.savez("mine.npz", x=np.arange(start, 200 + start).reshape(40, 5) / 200, y=np.arange(40) % 2)
        if start:
            ft.resume("run", rounds=2)
        else:
            ft.run("fedavg", data="mine.npz", **SMALL, min_samples=1, out="run")


def too_large(t: Tools) -> None:
    np.savez("large.npz", x=np.zeros((1000, 100)), y=np.arange(1000) % 2)
    t.monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "0.0001")
    ft.run("fedavg", data="large.npz")


def pickled(t: Tools) -> None:
    np.savez("objects.npz", x=np.array([[1], [1, 2]], dtype=object), y=np.zeros(2))
    ft.run("fedavg", data="objects.npz")


def other_columns(t: Tools) -> None:
    result = ft.run("fedavg", data=table(rows(lambda n: 30 + n)), **SMALL, min_samples=1)
    (file, *_) = ft.export(result, to="models")
    ft.predict(file, {"ward": ["icu"]})


def other_shape(t: Tools) -> None:
    (file, *_) = ft.export(ft.run("fedavg", **SMALL), to="models")
    ft.predict(file, torch.zeros(2, 3))


def exported_twice(t: Tools) -> None:
    result = ft.run("fedavg", **SMALL)
    ft.export(result, to="models")
    ft.export(result, to="models")


def another_comparison(t: Tools) -> None:
    for lr in (0.1, 0.2):
        ft.compare(["local", "fedavg"], **{**SMALL, "lr": lr}, seeds=[0], out="comparison")


def only_in_python(t: Tools) -> object:
    ft.compare(["local"], data=clients(), model=lambda: nn.Linear(3, 2), seeds=[0], rounds=1, out="comparison")
    return command(t, "compare", "comparison/comparison.toml", "--seeds", "0,1", "--out", "comparison")


def site(t: Tools, name: str) -> None:
    table("age,diagnosis\n" + "".join(f"{30 + n},{'yes' if n % 2 else 'no'}\n" for n in range(60)), "patients.csv")
    plan = 'name = "heart"\nserver = "localhost"\nadmin = "a@example.org"\nsites = ["north", "south"]\n'
    Path("federation.toml").write_text(
        f'{plan}classes = ["no", "yes"]\n[features]\nage = "number"\n[experiment]\nrounds = 1\n'
    )
    Path("site.toml").write_text(f'name = "{name}"\ndata = "patients.csv"\nlabel_column = "diagnosis"\n')
    command(t, "site", "check", "site.toml")


def command(t: Tools, *words: object) -> None:
    answer = t.call(*words)
    assert answer.code == 2, answer
    raise ft.FedtailorError(answer.err.removeprefix("Error: ").rstrip("\n"))


def as_object(t: Tools) -> None:
    ft.run("fedavg", data=clients(), rounds=1, out="run")
    ft.resume("run", rounds=2)


def own_code(t: Tools) -> None:
    ft.run(Raises(), data=[pair(), pair()], rounds=1, out="run")
    ft.load("run")
    ft.resume("run", rounds=2, data=[pair(), pair()])


def weights(t: Tools) -> None:
    torch.save({}, "mine.pt")
    ft.run("fedavg", weights="mine.pt", **SMALL)


def read_only(t: Tools) -> None:
    Path("file").write_text("")
    ft.run("fedavg", **SMALL, out="file/run")


PROVOKED: dict[str, Callable[[Tools], object]] = {
    "There is no file …, neither": lambda t: ft.run("fedavg", data="nothing.csv"),
    "The data set … is missing": lambda t: ft.run("fedavg", data="mnist", data_dir="nowhere"),
    "say which one holds the labels": lambda t: ft.run("fedavg", data=table("a,b\n1,2\n")),
    "where most cells are numbers": lambda t: ft.run("fedavg", data=table(rows(lambda n: "12 mg" if n == 7 else n))),
    "cells, but the header": lambda t: ft.run("fedavg", data=table("a,label\n1,2\n1,2,3\n")),
    "are not all finite": lambda t: ft.run("fedavg", data=[(np.full((4, 2), np.nan), np.arange(4) % 2)]),
    "holds pickled objects": pickled,
    "would take … GB": too_large,
    "too few for": lambda t: ft.run("fedavg", clients=1000),
    "did not give every client": lambda t: ft.run("fedavg", clients=80, partition="dirichlet:0.001"),
    "names no clients: choose": lambda t: ft.run("fedavg", partition="natural"),
    "these targets are floating-point": lambda t: ft.run("fedavg", data=clients(y=torch.linspace(0, 1, 40))),
    "have no test samples": lambda t: ft.run("fedavg", data=grouped(), rounds=1),
    "The setting … is": lambda t: ft.run("fedavg", rounds=0),
    "There is no method": lambda t: ft.run("dito"),
    "There is no parameter or setting": lambda t: command(t, "run", "fedavg", "--set", "lam=1"),
    "cannot take part in a round": lambda t: ft.run("fedavg", clients=20, participation="30"),
    "The device": lambda t: ft.run("fedavg", device="mps" if torch.cuda.is_available() else "cuda", **SMALL),
    "A deadline needs": lambda t: ft.run("fedavg", deadline=5, engine="in-process", **SMALL),
    "No client has test samples": lambda t: ft.run("fedavg", test=0, **SMALL),
    "No client has validation samples to choose": lambda t: ft.run(
        "fedavg", validation=0, choose="best-validation", **SMALL
    ),
    "is no method: put spaces": lambda t: command(t, "run", "local,ditto"),
    "is for images": lambda t: ft.run("fedavg", data=clients(), model="lenet"),
    "The model gives": lambda t: ft.run("fedavg", data=clients(), model=lambda: nn.Linear(3, 1)),
    "The model returns": lambda t: ft.run("fedavg", data=clients(), model=TwoOutputs),
    "cannot be built": lambda t: ft.run("fedavg", data=clients(), model=NeedsMore),
    "do not fit together": lambda t: ft.run("fedavg", data=clients(), model=lambda: nn.Linear(5, 2)),
    "BatchNorm needs": lambda t: ft.run(
        "fedavg", data=clients(), model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), batch=1
    ),
    "for the head": lambda t: ft.run("fedavg", head="classifier", **SMALL),
    "are a pickle": weights,
    "no client could do its work": lambda t: ft.run("fedavg", **{**SMALL, "rounds": 5}, lr=1e30),
    "left out": lambda t: ft.run(Raises(), data=uneven(), rounds=1),
    "cannot train with": lambda t: ft.run("scaffold", optimizer="adam", **SMALL),
    "FedBN is FedAvg": lambda t: ft.run("fedbn", **SMALL),
    "is a run already": lambda t: (made(), made()),
    "was edited": lambda t: ft.resume(spoiled("experiment.toml", "epochs = 1", "epochs = 2"), rounds=2),
    "The data are not those": changed_data,
    "as a Python object": as_object,
    "No import finds": only_in_python,
    "names code of its own": own_code,
    "rounds already": lambda t: ft.resume(made(rounds=3), rounds=2),
    "is damaged (…)": lambda t: ft.load(spoiled("partition.json", '"0"', '"9"')),
    "cannot be written": read_only,
    "is another comparison": another_comparison,
    "allow it with --overwrite": exported_twice,
    "which the model was trained with": other_columns,
    "was made for": other_shape,
    "The plan … has no site": lambda t: site(t, "west"),
    "Privacy needs noise": lambda t: ft.run("fedavg", privacy="client", **SMALL),
    "BatchNorm's buffers": lambda t: ft.run(
        "fedavg",
        data=clients(),
        model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)),
        privacy="client, noise=1",
    ),
    "take a method whose uploads are means": lambda t: ft.run("pgfed", privacy="client, noise=1", **SMALL),
    "The rule": lambda t: ft.run("fedavg", aggregation="krum:2", **SMALL),
}


@pytest.mark.parametrize("words", PROVOKED)
def test_a_quoted_message_is_what_bad_input_gets(words: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    (quote,) = [quote for quote in QUOTES if words in quote]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            PROVOKED[words](Tools(call, monkeypatch))
        except ft.FedtailorError as error:
            said = [str(error)]
        else:
            said = [str(warning.message) for warning in warned]
    assert any(matches(quote, message) for message in said), said
    assert warned or "no client" in words or not re.search(r"[.?!] [A-Z]", said[0]), "more than one sentence"


@pytest.mark.parametrize("quote", [quote for quote in QUOTES if not any(words in quote for words in PROVOKED)])
def test_a_message_that_is_hard_to_provoke_is_in_the_source(quote: str) -> None:
    assert in_source(quote, SOURCE)


def test_the_page_is_read_as_it_is_written() -> None:
    assert len(QUOTES) == len(set(QUOTES)) == len(re.findall(r"^- ", PAGE, re.MULTILINE))
    assert quotes("- `A … b.`\n\n  Why.\n- `` Say `c`. ``\n") == ["A … b.", "Say `c`."]


def test_a_message_that_the_code_does_not_have_is_seen() -> None:
    source = list(templates('raise E(f"There is no {kind} here: look for {name!r} elsewhere, " "or go.")\nf"{a}: {b}"'))
    assert in_source("There is no … here: look for … elsewhere, or go.", source)
    assert not in_source("There is no … here: look for … elsewhere, or stay.", source)
    assert not in_source("Nothing: at all.", source)  # though the last one could make anything
    assert matches("The … is gone: take ….", "The cat is gone: take a dog.")
    assert not matches("The … is gone: take ….", "The cat is here: take a dog.")

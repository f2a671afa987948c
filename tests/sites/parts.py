"""Federations of sites with tables of their own, in memory: the real coordinator and the real sites, and no network."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import ClientFailure, ClientNote
from fedtailor._common.toml import write_toml
from fedtailor.engines.channel import InMemory
from fedtailor.engines.result import RunResult
from fedtailor.engines.simulation import Simulation
from fedtailor.messages import NEVER
from fedtailor.messages.letters import read_letter
from fedtailor.sites.coordinator import Coordinator
from fedtailor.sites.local_site import LocalSite
from fedtailor.sites.plan import Plan, read_plan
from fedtailor.sites.site_file import read_site

NAMES = ("north", "south", "west")
SETTINGS: dict[str, Any] = {"rounds": 3, "lr": 0.05, "epochs": 1, "batch": 16, "seed": 3}


def table(seed: int, rows: int = 80, numbers: int = 4) -> pd.DataFrame:
    """A table with numbers of different scales, a category, missing cells and a label that follows from some."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, numbers)) * 10.0 ** np.arange(numbers) + seed
    columns: dict[str, Any] = {f"f{place}": x[:, place] for place in range(numbers)}
    columns["sex"] = rng.choice(["f", "m"], rows)
    columns["ward"] = rng.choice(["a", "b", "c"], rows, p=[0.5, 0.3, 0.2])
    noise = rng.normal(size=rows)
    columns["label"] = np.where(x[:, 0] - seed + (columns["sex"] == "m") + 0.5 * noise > 0.4, "ill", "well")
    frame = pd.DataFrame(columns)
    frame.loc[rng.random(rows) < 0.2, "f1"] = np.nan
    return frame


def tables(names: Sequence[str] = NAMES, **more: Any) -> dict[str, pd.DataFrame]:
    return {name: table(seed, rows=60 + 30 * seed, **more) for seed, name in enumerate(names)}


@contextmanager
def heard() -> Iterator[list[str]]:
    """All that was said of clients: who was left out and why, who is back, who tells nothing."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield said
    for each in told:
        assert issubclass(each.category, (ClientFailure, ClientNote)), each
        said.append(str(each.message))


@dataclass
class Recorded(InMemory):
    """An in-memory channel that writes down all letters and answers, and may change or drop answers.

    `change(site, kind, round, answer)` returns what arrives of an answer: bytes, or the reason why nothing does.
    """

    sites: Mapping[str, Any]
    change: Callable[[str, str, int, bytes], bytes | str] = lambda site, kind, round, answer: answer
    letters: list[tuple[str, bytes]] = field(default_factory=list)
    answers: list[tuple[str, bytes]] = field(default_factory=list)

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        for name, letter in letters.items():
            self.letters.append((name, letter))
            answer = self.sites[name].answer(letter)
            self.answers.append((name, answer))
            asked = read_letter(letter)
            kind = str(asked.header.get("asked", asked.kind))
            yield name, self.change(name, kind, int(asked.header.get("round", 0)), answer)


class Federation:
    """A plan, and a directory with a table and a file of its own for each site."""

    def __init__(
        self,
        root: Path,
        data: Mapping[str, pd.DataFrame] | None = None,
        method: str = "pgfed",
        plan: Mapping[str, Any] | None = None,
        site: Mapping[str, Any] | None = None,
        **experiment: Any,
    ) -> None:
        self.root, self.data = root, dict(tables() if data is None else data)
        self.settings = {**SETTINGS, **experiment}
        self.method = method
        content = {"name": "trial", "sites": list(self.data), **(plan or {})}
        content["experiment"] = {"method": method, **self.settings}
        root.mkdir(parents=True, exist_ok=True)
        (root / "federation.toml").write_text(write_toml(content))
        for name, frame in self.data.items():
            (root / name).mkdir(exist_ok=True)
            frame.to_csv(root / name / "patients.csv", index=False)
            own = {"name": name, "plan": "../federation.toml", "data": "patients.csv", **(site or {})}
            (root / name / "site.toml").write_text(write_toml(own))

    @property
    def plan(self) -> Plan:
        return read_plan(self.root / "federation.toml")

    def sites(self) -> dict[str, LocalSite]:
        """The sites, as if each had just been started."""
        return {name: LocalSite(read_site(self.root / name / "site.toml")) for name in self.data}

    def run(self, channel: Any = None, **more: Any) -> RunResult:
        """Run the plan, or go on with it."""
        return Coordinator(self.plan, self.root / "run", channel or InMemory(self.sites())).run(**more)

    def simulated(self, **more: Any) -> RunResult:
        """The same data and experiment, simulated."""
        terms = self.plan.terms()
        same = {"split": terms.split, "rare": terms.rare, "engine": "in-process", **self.settings, **more}
        return ft.run(self.method, data=self.data, **same)

    def personal(self, number: int, result: RunResult, sites: Mapping[str, LocalSite] | None = None) -> Tensor:
        """The vector that a site predicts with at the end: it is computed at the site."""
        site = (sites or self.sites())[self.plan.sites[number]]
        run = result.simulation
        _, answering = site._run(next((self.root / site.site.name / "private" / "runs").iterdir()).name)
        answering.sites.store.recall(number, run.loop.versions.get(number, NEVER))
        return answering.sites.personal_model(number, run.finished, run.loop.method.broadcast(run.server))


def same_server(one: Simulation, other: Simulation) -> bool:
    """Compare all that two servers hold, to the bit."""
    mine, theirs = one.server.state, other.server.state
    numbers = range(one.server.n_clients)
    kept = [(one.server.store.get(number), other.server.store.get(number)) for number in numbers]
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in [(mine, theirs), *kept]
    )


def close_metrics(one: RunResult, other: RunResult, tolerance: float = 1e-6) -> bool:
    """Compare the metrics of all rounds."""
    names = ("accuracy", "loss", "validation_loss", "balanced_accuracy")
    pairs = [
        (getattr(a, name), getattr(b, name)) for a, b in zip(one.rounds, other.rounds, strict=True) for name in names
    ]
    return all((a is None) == (b is None) and (a is None or abs(a - b) <= tolerance) for a, b in pairs)


def samples(features: int, clients: int = 4) -> list[tuple[Any, Any]]:
    """Clients of different sizes, whose samples begin anywhere in one tensor if nobody takes care."""
    rng = np.random.default_rng(features)
    found = []
    for client in range(clients):
        x = rng.normal(size=(23 + 10 * client, features)).astype(np.float32) + client / 4
        found.append((x, (x[:, 0] + x[:, 1] > client / 3).astype(np.int64) + (x[:, 2] > 1)))
    return found

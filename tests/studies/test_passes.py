"""The cost of a method's local work, counted and not timed: gradients of training samples."""

from typing import Any

import pytest

import fedtailor as ft
from fedtailor.reporting.tables import FORMATS
from fedtailor.studies.summary import summarize

SETTINGS: dict[str, Any] = {"data": "digits", "clients": 5, "max_train": 40, "rounds": 3, "model": "mlp:8", "epochs": 5}
# Five epochs; two models; five steps on each batch; one joint gradient; one more pass for ∇f; two gradients a batch; an
# epoch of the body.
PASSES = {"fedavg": 5, "ditto": 10, "pfedme": 25, "pflego": 1, "pgfed": 6, "per-fedavg": 10, "fedrep": 1, "local": 5}


@pytest.mark.parametrize("engine", ["in-process", "processes"])
@pytest.mark.parametrize("method", PASSES)
def test_passes_of_a_round(method: str, engine: str) -> None:
    result = ft.run(method, **SETTINGS, participation=0.5, engine=engine)
    (line,) = summarize([result]).lines
    # PGFed, PFLEGO: of all training samples; per batch in the others, whose last batch may be smaller.
    assert line.passes == PASSES[method]
    trained = sum(len(result.data.train(c)[1]) for record in result.rounds for c in record.participants)
    assert sum(record.differentiated for record in result.rounds) == PASSES[method] * trained


def test_the_exact_hessian_is_twice_the_work() -> None:
    (line,) = summarize([ft.run("per-fedavg", **SETTINGS, first_order=False, engine="in-process")]).lines
    assert line.passes == 20


def test_the_table_shows_them() -> None:
    summary = summarize([ft.run(method, **SETTINGS, engine="in-process") for method in ("fedavg", "pfedme")])
    assert "Passes: how often a participant computes the gradient" in summary.caption
    for ending, make in FORMATS.items():
        assert "passes" in make(summary), ending
    rows = [
        line.split() for line in FORMATS["txt"](summary).splitlines() if line.strip().startswith(("FedAvg", "pFedMe"))
    ]
    assert [row[-2] for row in rows] == ["5", "25"]

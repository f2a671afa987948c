"""The benchmarks stay alive: their functions run at a tiny size. What they measure is nobody's business here."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks import costs, overhead


def real(seconds: costs.Seconds) -> bool:
    return 0 <= seconds.cpu < math.inf and 0 < seconds.wall < math.inf


def test_overhead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(overhead, "CLIENTS", 2)
    monkeypatch.setattr(overhead, "SAMPLES", 25)
    monkeypatch.setattr("sys.argv", ["overhead.py", "--rounds", "1", "--repeat", "1"])
    overhead.main()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_visit_with_pfedmb_and_with_pflego() -> None:
    for found in (costs.branches(samples=20, counts=(1, 3), repeat=1), costs.inner_steps(20, (1, 3), repeat=1)):
        assert len(found) == 2
        assert all(real(seconds) for seconds in found.values())


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_server_of_fedacs(on_disk: bool, tmp_path: Path) -> None:
    directory = tmp_path if on_disk else None
    models = costs.ServerOfModels(clients=5, participants=2, model="mlp:3", directory=directory)
    rows, mixing = models.a_round()
    assert real(rows)
    assert real(mixing)
    assert len(list(tmp_path.iterdir())) == (5 if on_disk else 0)  # a model of every client is kept
    S = models.server.state["S"]
    assert S.shape == (5, 5)
    torch.testing.assert_close(S, S.T)


def test_costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole script, with other measurements."""
    some = {"one": costs.Seconds(1.0, 1.0), "another": costs.Seconds(1.4, 1.2)}
    for name in ("branches", "inner_steps", "server_steps"):
        monkeypatch.setattr(costs, name, lambda *arguments, **settings: some)
    monkeypatch.setattr("sys.argv", ["costs.py", "--repeat", "1"])
    costs.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "goal" in line]
    assert [line.partition(": ")[2] for line in lines] == ["met by the processor's time only", "met", "met"]

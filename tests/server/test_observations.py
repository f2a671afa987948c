"""What methods show of themselves is recorded, within bounds, and again the same after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.server.records import RoundRecord
from tests.helpers import files

SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "model": "mlp:8", "rounds": 4, "epochs": 1,
                         "engine": "in-process"}  # fmt: skip


def test_what_a_method_shows_is_recorded_every_so_many_rounds(tmp_path: Path) -> None:
    result = ft.run("pgfed", out=tmp_path / "run", observe_every=2, **SMALL)
    assert set(files(tmp_path / "run/observed")) == {"round-2.safetensors", "round-4.safetensors"}
    assert torch.equal(result.observed(4)["A"], result.server_state["A"])
    assert not torch.equal(result.observed(2)["A"], result.observed(4)["A"])
    assert result.observed(3) == {}
    in_memory = ft.run("pgfed", observe_every=2, **SMALL)
    assert torch.equal(in_memory.observed(2)["A"], result.observed(2)["A"])


def test_a_method_with_nothing_to_show_writes_nothing(tmp_path: Path) -> None:
    ft.run("fedavg", out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run/observed").exists()


@pytest.mark.parametrize("out", [True, False])
def test_the_limit_holds_and_is_said_once(out: bool, tmp_path: Path) -> None:
    limit = (
        (5.5 if out else 2.5) * (2 * 5 * 5 + 2) * 4 / 1e6
    )  # A, its change and two numbers, twice; files have headers
    with pytest.warns(UserWarning, match="recorded up to round 2 only") as warned:
        result = ft.run("pgfed", out=tmp_path / "run" if out else None, observe_limit=limit, **SMALL)
    if out:
        assert sum(map(len, files(tmp_path / "run/observed").values())) <= limit * 1e6
    assert len([w for w in warned if "recorded up to" in str(w.message)]) == 1
    assert result.observed(1) != {}
    assert result.observed(4) == {}


def test_a_resumed_run_shows_the_same(tmp_path: Path) -> None:
    def stop(record: RoundRecord) -> None:
        if record.round == 3:
            raise RuntimeError("the power went off")

    ft.run("fedacs", out=tmp_path / "whole", **SMALL, checkpoint_every=2)
    with pytest.raises(RuntimeError):
        ft.run("fedacs", out=tmp_path / "halves", on_round=stop, **SMALL, checkpoint_every=2)
    ft.resume(tmp_path / "halves")
    assert files(tmp_path / "halves/observed") == files(tmp_path / "whole/observed")

"""A warning shows the line of the user's code that called the library, and no line of the library."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft

SMALL: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 1, "epochs": 1, "model": "mlp:4"}
PROGRAM = """
import fedtailor as ft

class Failing(ft.Method):
    def train(self, client, message):
        assert client.id != 1, "no luck"
        return {"theta": client.descend(message["theta"])}

settings = {"data": "digits", "clients": 3, "rounds": 1, "epochs": 1, "model": "mlp:4", "engine": "in-process"}
ft.run(Failing(), **settings)  # HERE
"""


class Failing(ft.Method):
    """FedAvg whose client 1 fails."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        assert client.id != 1, "no luck"
        return {"theta": client.descend(message["theta"])}


@pytest.mark.parametrize("engine", ["in-process", "processes"])
def test_a_failure_is_shown_at_the_users_call(engine: str, tmp_path: Path) -> None:
    with pytest.warns(ft.ClientFailure) as caught:
        ft.run(Failing(), engine=engine, out=tmp_path / "run", **SMALL)
    assert {warning.filename for warning in caught} == {__file__}
    with pytest.warns(ft.ClientFailure) as caught:
        ft.resume(tmp_path / "run", method=Failing(), rounds=2)
    assert len(caught) == 2  # the failure, and how often there was one
    for warning in caught:
        assert warning.filename == __file__
        assert "ft.resume" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


def test_so_is_a_limit_that_is_reached() -> None:
    with pytest.warns(UserWarning, match="diagnostics are recorded up to round 0 only") as caught:
        ft.run("pgfed", engine="in-process", observe_limit=0, **SMALL)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.slow
def test_what_python_prints_has_no_line_of_the_library(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM)
    errors = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stderr
    warning, line = errors.splitlines()
    number = 1 + PROGRAM.splitlines().index("ft.run(Failing(), **settings)  # HERE")
    assert warning.startswith(f"{program}:{number}: ClientFailure: Failing, round 1: client 1 left out: AssertionError")
    assert line.strip() == "ft.run(Failing(), **settings)  # HERE"

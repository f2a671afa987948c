"""The notebooks run, and show the cells of their scripts."""

import json
import sys
from pathlib import Path

import pytest

from notebooks.make import HERE, NOTEBOOKS, cells, main, main_module, run


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_cells_of_its_script(name: str) -> None:
    made = json.loads((HERE / f"{name}.ipynb").read_text(encoding="utf-8"))
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]]
    assert found == list(cells((HERE / f"{name}.py").read_text(encoding="utf-8"))), "run make notebooks"
    assert all(cell["outputs"] for cell in made["cells"][-2:] if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The column 'patient'", "ignore::DeprecationWarning")  # SQLAlchemy's, of MLflow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(variable, "")  # what a notebook sets is gone after it
    with main_module() as names:
        for kind, text in cells((HERE / f"{name}.py").read_text(encoding="utf-8")):
            if kind == "code":
                run(text, names)


def test_every_notebook_is_listed() -> None:
    assert {path.stem for path in HERE.glob("*.ipynb")} == set(NOTEBOOKS)
    assert {path.stem for path in HERE.glob("*.py")} == {*NOTEBOOKS, "make", "__init__"}


def test_a_notebook_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match=r"There is no notebook first_step: they are first_steps, .*"):
        main(["first_steps", "first_step"])

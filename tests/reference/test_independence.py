"""The slow versions share no code with what they check, and there is one for every method."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

from fedtailor.methods import CATALOGUE

HERE = Path(__file__).parent
ELSEWHERE = {  # variants beside their method
    **dict.fromkeys(("fedprox", "fedavg-ft"), "fedavg"),
    **dict.fromkeys(("pgfedmo", "pgfed-ce"), "pgfed"),
    **dict.fromkeys(("fedavgm", "fedadagrad", "fedyogi", "fedadam"), "fedopt"),
}
MODULES = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))


@cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports, by their full names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_slow_version_knows_nothing_of_fedtailor(path: Path) -> None:
    assert {name.split(".")[0] for name in imported(path)} <= {*sys.stdlib_module_names, "numpy", "torch", "tests"}
    within = {name for name in imported(path) if name.startswith("tests")}
    assert all(name.startswith("tests.reference.") for name in within)


@pytest.mark.parametrize("method", list(CATALOGUE))
def test_every_method_has_one_that_its_tests_use(method: str) -> None:
    module = ELSEWHERE.get(method, method.replace("-", "_"))
    assert HERE / f"{module}.py" in MODULES
    users = (HERE.parent / "methods").glob("test_*.py")
    assert any(f"tests.reference.{module}" in imported(path) for path in users)


def test_no_test_module_imports_another() -> None:
    for path in HERE.parent.rglob("*.py"):
        assert not [name for name in imported(path) if name.startswith("tests.") and ".test_" in name], path

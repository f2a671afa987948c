"""The package as it is installed: what it declares is what it needs, and no more."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedtailor

ROOT = Path(__file__).parent.parent
PACKAGE = Path(fedtailor.__file__).parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = SETTINGS["project"]
IMPORTED_BY_TORCH = {"onnxscript", "tensorboard"}  # by its exporter, by its writer of events
IMPORTED_BY_MLFLOW = {"sqlalchemy", "alembic"}  # for the file in which it keeps runs by default
BROUGHT_BY = {"mlflow": "mlflow-skinny"}  # where a package that may be missing is named otherwise


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


NEEDED = declared(PROJECT["dependencies"])
EXTRAS = {name: declared(of) for name, of in PROJECT["optional-dependencies"].items()}
INSTALLED = packages_distributions()
OPTIONAL = set.union(*(of for name, of in EXTRAS.items() if name not in ("dev", "docs")))


def imported(tree: ast.AST) -> Iterator[str]:
    """The top packages that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def foreign_imports() -> set[str]:
    """The packages of others that the package imports."""
    files = PACKAGE.rglob("*.py")
    found = {name for file in files for name in imported(ast.parse(file.read_text("utf-8")))}
    return found - sys.stdlib_module_names - {"fedtailor"}


def distributions(modules: set[str]) -> set[str]:
    """Who brings these modules."""
    return {
        canonicalize_name(name)
        for module in modules
        for name in INSTALLED.get(module, [BROUGHT_BY.get(module, module)])
    }


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    used = distributions(foreign_imports())
    assert used - NEEDED - OPTIONAL - {"pytest"} == set()  # `fedtailor.testing` is for those who have pytest
    assert (NEEDED | OPTIONAL) - used - IMPORTED_BY_TORCH - IMPORTED_BY_MLFLOW == set()
    assert not NEEDED & OPTIONAL


def test_the_table_of_extras_has_them_all() -> None:
    page = (ROOT / "docs" / "installing.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| \d+ \| \d+ \|$", page, re.MULTILINE)
    assert {name: {canonicalize_name(one) for one in of.split(", ")} for name, of in rows} == EXTRAS


def test_everything_names_the_same_version() -> None:
    named = {
        "CITATION.cff": re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE),
        "CHANGELOG.md": re.search(
            r"^## \[?(\d\S+?)\]?(?: |$)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
        ),
    }
    assert {file: found and found[1] for file, found in named.items()} == dict.fromkeys(named, fedtailor.__version__)
    assert "version" in PROJECT["dynamic"]  # pyproject.toml has none of its own


def test_every_file_of_the_package_is_installed() -> None:
    """`make package` looks into the wheel itself."""
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["fedtailor"]
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others - {path for pattern in patterns for path in PACKAGE.glob(pattern)} == set()


# --- without what is not needed ---


def output(program: str, *words: str, cwd: Path) -> str:
    """The output of a program in a process of its own, that complains of nothing."""
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def in_a_process_without_extras(program: str, *words: str, cwd: Path) -> str:
    """The output of a program for which nothing is installed but what the package declares as needed."""
    absent = {name for name in foreign_imports() if not distributions({name}) & NEEDED}
    absent |= {"sklearn", *IMPORTED_BY_TORCH}
    assert {"matplotlib", "nvflare", "pandas", "ray"} <= absent
    blocked = f"import sys\nfor name in {sorted(absent)}:\n    sys.modules[name] = None\n"
    return output(blocked + program, *words, cwd=cwd)


@pytest.mark.parametrize("data", [["digits"], ["table.csv", "--label-column", "sick", "--client-column", "site"]])
def test_a_run_needs_no_extra_and_no_scikit_learn(data: list[str], tmp_path: Path) -> None:
    rows = [f"{'abc'[k % 3]},{k * 7 % 11 or ''},{'xyz'[k % 7 % 3]},{'no' if k % 2 else 'yes'}" for k in range(90)]
    (tmp_path / "table.csv").write_text("\n".join(["site,age,ward,sick", *rows]))
    waits = "sys.modules['plotly'] = sys.modules['scipy'] = None\n"  # nor for those that only studies and reports need
    program = waits + "from fedtailor.cli import main\nmain()"
    words = ["run", "fedavg", "--data", *data, "--rounds", "1", "--out", "here", "--quiet"]
    assert "Recorded in here" in in_a_process_without_extras(program, *words, cwd=tmp_path)


@pytest.mark.slow
def test_only_the_modules_of_an_extra_need_it(tmp_path: Path) -> None:
    program = (
        "import importlib, pkgutil, fedtailor\n"
        "for found in pkgutil.walk_packages(fedtailor.__path__, 'fedtailor.', onerror=lambda name: None):\n"
        "    try:\n"
        "        found.name.endswith('__main__') or importlib.import_module(found.name)\n"
        "    except (ImportError, fedtailor.FedtailorError):\n"
        "        print(found.name)\n"
    )
    assert set(in_a_process_without_extras(program, cwd=tmp_path).split()) == {
        "fedtailor.sites.kits",  # says that NVFlare is missing
        *(f"fedtailor.sites.nvflare.{name}" for name in ("controller", "executor")),
        *(f"fedtailor.engines.ray_{name}" for name in ("actors", "parcels", "session")),
    }


def test_the_package_is_imported_without_any_other(tmp_path: Path) -> None:
    program = "import sys\nfound = set(sys.modules)\nimport fedtailor\nprint(*set(sys.modules) - found)"
    loaded = {name.split(".")[0] for name in output(program, cwd=tmp_path).split()}
    assert loaded - sys.stdlib_module_names == {"fedtailor"}

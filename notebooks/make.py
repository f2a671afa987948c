"""Make a notebook of each script here: the same cells, with what they print.

    python -m notebooks.make              all of them (make notebooks)
    python -m notebooks.make first_steps  one of them

A notebook is written as a script whose cells begin with `# %%` (code) or `# %% [markdown]` (text).
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
NOTEBOOKS = (  # a path, and then examples
    "first_steps",
    "comparing",
    "recorded_comparison",
    "own_data_and_network",
    "writing_a_method",
    "sites",
    "hospitals",
    "wearables",
    "next_character",
    "adapters",
)


def cells(script: str) -> Iterator[tuple[str, str]]:
    """Yield the cells of a script: "markdown" or "code", and the text."""
    for kind, text in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.DOTALL | re.MULTILINE):
        if kind:
            yield "markdown", re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)
        else:
            yield "code", text.strip()


@contextlib.contextmanager
def main_module() -> Iterator[dict[str, Any]]:
    """An empty module `__main__`, as a notebook has one: a class of a cell can be imported from it."""
    before = sys.modules["__main__"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield module.__dict__
    finally:
        sys.modules["__main__"] = before


def run(code: str, names: dict[str, Any]) -> str:
    """Run a cell, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "cell", "exec"), names)
    return printed.getvalue()


def notebook(script: str) -> dict[str, Any]:
    """Make a notebook of a script, in Jupyter's format 4, and run its cells in a directory of its own."""
    made: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), main_module() as names:
        for number, (kind, text) in enumerate(cells(script)):
            cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": _lines(text)}
            if kind == "code":
                printed = run(text, names)
                shown = {"output_type": "stream", "name": "stdout", "text": _lines(printed)}
                cell |= {"execution_count": None, "outputs": [shown] if printed else []}
            made.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def make(name: str) -> None:
    """Run a script and write its notebook beside it."""
    made = notebook((HERE / f"{name}.py").read_text(encoding="utf-8"))
    (HERE / f"{name}.ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{name}.ipynb")


def main(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in NOTEBOOKS]:
        sys.exit(f"There is no notebook {unknown[0]}: they are {', '.join(NOTEBOOKS)}.")
    os.environ["COLUMNS"] = "120"
    for name in names or NOTEBOOKS:
        make(name)


if __name__ == "__main__":
    main(sys.argv[1:])

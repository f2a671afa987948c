"""Make a notebook of each script here: the same cells, with what they print.

    python -m notebooks.make  (make notebooks)

A notebook is written as a script whose cells begin with `# %%` (code) or `# %% [markdown]` (text).
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOTEBOOKS = ("hospitals", "wearables", "next_character", "adapters")


def cells(script: str) -> Iterator[tuple[str, str]]:
    """Yield the cells of a script: "markdown" or "code", and the text."""
    for kind, text in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.DOTALL | re.MULTILINE):
        if kind:
            yield "markdown", re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)
        else:
            yield "code", text.strip()


def run(code: str, names: dict[str, Any]) -> str:
    """Run a cell, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "cell", "exec"), names)
    return printed.getvalue()


def notebook(script: str) -> dict[str, Any]:
    """Make a notebook of a script, in Jupyter's format 4, and run its cells in a directory of its own."""
    made: list[dict[str, Any]] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
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


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    for name in NOTEBOOKS:
        made = notebook((HERE / f"{name}.py").read_text(encoding="utf-8"))
        (HERE / f"{name}.ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}.ipynb")

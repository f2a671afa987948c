"""Pages that are made of files outside docs/: the notebooks, and the files at the root that every project has."""

import json
import re
from typing import Any

from docs.building import ROOT
from notebooks.make import HERE, NOTEBOOKS

PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")


def notebooks() -> dict[str, tuple[str, str]]:
    """Every notebook as a page: its place in the site, the file that it is made of, and its text."""
    return {
        f"notebooks/{name}.md": (
            f"notebooks/{name}.ipynb",
            notebook_page(name, json.loads((HERE / f"{name}.ipynb").read_text(encoding="utf-8"))),
        )
        for name in NOTEBOOKS
    }


def notebook_page(name: str, notebook: dict[str, Any]) -> str:
    """Write the cells of a notebook one below the other, and below each what it printed."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            printed = "".join("".join(output["text"]) for output in cell["outputs"])
            parts += [_fenced(text, "python"), *([_fenced(printed.rstrip("\n"), "text")] if printed else [])]
    title, *rest = parts
    note = f"*A notebook: [`{name}.ipynb`]({name}.ipynb), made of the script [`{name}.py`]({name}.py).*"
    heading, _, below = title.partition("\n")
    return "\n\n".join([heading, note, below.strip(), *rest]) + "\n"


def _fenced(text: str, language: str) -> str:
    longest = max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def project() -> dict[str, tuple[str, str]]:
    """The files at the root as pages: their place in the site, their name, and their text."""
    return {
        f"project/{name.lower().replace('_', '-')}": (name, (ROOT / name).read_text(encoding="utf-8"))
        for name in PROJECT
        if (ROOT / name).exists()  # else the navigation, which names them, has a dead link
    }

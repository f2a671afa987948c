"""The documentation site: what mkdocs needs beside the pages of docs/. `make docs` builds it.

`hooks` has the events of a build; the other modules make what it puts in: equations, links, and the pages that are read
off the code.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

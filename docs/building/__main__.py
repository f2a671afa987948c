"""Build the site, with warnings as errors, and check it.

python -m docs.building [DIR]  (make docs: into site/)
"""

import os
import sys
from pathlib import Path

from docs.building import ROOT
from docs.building.checking import problems

os.environ["NO_MKDOCS_2_WARNING"] = "1"  # the theme's note about other programs, in every build


def main() -> int:
    from mkdocs.__main__ import cli

    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    settings = ["--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(site)]
    cli(["build", *settings], standalone_mode=False)
    found = list(problems(site))
    print(*found, f"{len(list(site.rglob('*.html')))} pages, {len(found)} problems: {site / 'index.html'}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

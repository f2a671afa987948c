"""Make docs/results.md, docs/leaderboard.md and the settings that come with fedtailor from the records.

python -m results             write the pages and the settings
python -m results --check     say whether they are current: the exit code is 1 if not
python -m results keep DIR    take over the records of finished runs and comparisons from a working directory
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from results.keeping import keep_comparisons, keep_runs, keep_tunings
from results.leaderboard import leaderboard
from results.page import COMPARISONS, HERE, PAPERS, page
from results.shipping import SETTINGS, SHIPPED, shipped_text

DOCS = HERE.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["pages", "keep"], default="pages", help="what to do [pages]")
    parser.add_argument("directory", nargs="?", type=Path, help="with keep: reproductions, comparisons or tunings")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.what == "keep":
        if arguments.directory is None or not arguments.directory.is_dir():
            parser.error("keep needs a directory with runs, comparisons or tunings")
        print(*keep(arguments.directory), sep="\n")
        return
    stale = []
    made = {DOCS / "results.md": page(), DOCS / "leaderboard.md": leaderboard()}
    made |= {SETTINGS / f"{name}.toml": shipped_text(name) for name in SHIPPED}
    for path, text in made.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    print(f"{'not current' if arguments.check else 'written'}: {', '.join(stale)}" if stale else "current")
    sys.exit(1 if stale and arguments.check else 0)


def keep(source: Path) -> Iterator[Path]:
    """Take over all records of a directory: those of comparisons or of tunings without their runs."""
    if any(source.glob("*/comparison.toml")):
        yield from keep_comparisons(source, COMPARISONS)
    elif any(source.glob("*/tuning.toml")):
        yield from keep_tunings(source, HERE / "tunings")
    else:
        yield from keep_runs(source, PAPERS)


if __name__ == "__main__":
    main()

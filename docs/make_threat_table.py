"""Writes the table of docs/threat-model.md: what the server gets of a site, for every method of the catalogue.

    python docs/make_threat_table.py [--check]

With `--check` nothing is written, and the exit code is 1 if the table is not current.
"""

import sys
from pathlib import Path

from fedtailor.method import Method
from fedtailor.methods import all_methods
from fedtailor.server.setup import describe_uploads

PAGE = Path(__file__).parent / "threat-model.md"
BEGIN, END = "<!-- Written by docs/make_threat_table.py -->\n", "<!-- end -->\n"
HEADER = """\
| method | of each site singly | as a mean or sum alone | each site's own part | a site predicts with |
| --- | --- | --- | --- | --- |
"""


def table() -> str:
    """Make the table."""
    return HEADER + "".join(f"| {' | '.join(row(name, method))} |\n" for name, method in all_methods().items())


def row(name: str, method: Method) -> list[str]:
    """Describe one method."""
    single: list[str] = []
    together: list[str] = []
    for upload, how in describe_uploads(method).items():
        (single if how == "each client's own" else together).append(f"`{upload}`")
    return [f"`{name}`", ", ".join(single) or "–", ", ".join(together) or "–", type(method).own_part, predicts(method)]


def predicts(method: Method) -> str:
    """Say where the model comes from that a site predicts with."""
    if method.keeps_model or not method.uploads:
        return "its own state"
    return "the broadcast" if method.shares_model else "the broadcast, and its own state or rows"


def main() -> int:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    current = before + BEGIN + table() + END + rest.partition(END)[2]
    if "--check" in sys.argv[1:]:
        if current != text:
            print("docs/threat-model.md is not current: run python docs/make_threat_table.py.", file=sys.stderr)
        return int(current != text)
    PAGE.write_text(current, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

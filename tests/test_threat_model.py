"""The page on threats: its table is what the methods declare."""

from pathlib import Path

from docs.make_threat_table import table
from fedtailor.methods import all_methods

DOCS = Path(__file__).parent.parent / "docs"


def test_the_table_is_current() -> None:
    page = (DOCS / "threat-model.md").read_text("utf-8")
    assert table() in page, "run python docs/make_threat_table.py"
    assert [name for name in all_methods() if f"\n| `{name}` |" not in page] == []

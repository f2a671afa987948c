"""The page on threats: its table is what the methods declare."""

import subprocess
import sys
from pathlib import Path

from fedtailor.methods import all_methods

DOCS = Path(__file__).parent.parent / "docs"


def test_the_table_is_current() -> None:
    done = subprocess.run([sys.executable, DOCS / "make_threat_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (DOCS / "threat-model.md").read_text("utf-8")
    assert [name for name in all_methods() if f"\n| `{name}` |" not in page] == []

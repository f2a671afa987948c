"""The methods' pages in the documentation."""

from pathlib import Path

from fedtailor.method import Method

DOCS = Path(__file__).parents[2] / "docs" / "methods"


def page_of(method: Method) -> str:
    """The text of the page of a method, or of the method which it varies."""
    names = [kind.name for kind in type(method).__mro__ if issubclass(kind, Method) and kind.name]
    return next((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in names if (DOCS / f"{name}.md").exists())

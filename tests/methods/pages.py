"""The methods' pages in the documentation."""

from docs import make_methods_page
from fedtailor.method import Method


def page_of(method: Method) -> str:
    """The text of the page of a method, or of the method which it varies."""
    return (make_methods_page.DOCS / make_methods_page.page_of(type(method))).read_text(encoding="utf-8")

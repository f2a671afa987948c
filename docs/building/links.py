"""Links of pages: those that leave docs/ go to the repository's address, after a look that the file exists.

A page is written to be read on GitHub, too, so its links are relative to its own file. Pages that are made of other
files of the repository (a notebook, the changelog) have theirs relative to these.
"""

import posixpath
from collections.abc import Mapping
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.exceptions import PluginError

from docs.building import ROOT

BRANCH = "main"


class Links(Extension):
    """Rewrite the links of the page at hand. `pages` is the page that is made of a file of the repository."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address.rstrip("/")
        self.pages: Mapping[str, str] = {}
        self.source = self.page = ""  # the file of the page at hand, and its place in the site

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Rewriting(self, md), "repository_links", 1)  # before mkdocs', which has 0

    def rewritten(self, target: str) -> str:
        """The link as the site needs it."""
        parts = urlsplit(target)
        if parts.scheme or parts.netloc or not parts.path:
            return target
        there = posixpath.normpath(posixpath.join(posixpath.dirname(self.source), parts.path))
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        if there in self.pages:
            return posixpath.relpath(self.pages[there], posixpath.dirname(self.page) or ".") + anchor
        if there.startswith("..") or not (ROOT / there).exists():
            raise PluginError(f"{self.source} links to {target}, which is not in the repository.")
        return f"{self.address}/{'tree' if (ROOT / there).is_dir() else 'blob'}/{BRANCH}/{there}{anchor}"


class _Rewriting(Treeprocessor):
    def __init__(self, links: Links, md: Markdown) -> None:
        super().__init__(md)
        self.links = links

    def run(self, root: Element) -> None:
        for element in root.iter():
            for name in ("href", "src"):
                if element.tag in ("a", "img") and name in element.attrib:
                    element.set(name, self.links.rewritten(element.attrib[name]))

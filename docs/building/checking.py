"""The built site, checked as a browser without a network would see it: every link leads somewhere, and nothing is
loaded from elsewhere."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ELSEWHERE = re.compile(r"(?:https?:)?//")
_IN_STYLES = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]*)""")


@dataclass
class Found(HTMLParser):
    """The names of places in a page, the links that it has, and what its browser loads."""

    places: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.places |= {has[name] for name in ("id", "name") if name in has and (name == "id" or tag == "a")}
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        elif tag == "link" and has.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(has.get("href", ""))
        self.loads += [has[name] for name in ("src", "data", "poster") if name in has]
        self.loads += [part.split()[0] for part in has.get("srcset", "").split(",") if part.strip()]
        self.loads += _IN_STYLES.findall(has.get("style", ""))


def problems(site: Path) -> Iterator[str]:
    """Yield a sentence for every dead link, and for everything that a page loads from elsewhere."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        here = path.relative_to(site)
        for target in (*page.links, *page.loads):
            parts = urlsplit(target)
            if _ELSEWHERE.match(target):
                if target in page.loads:
                    yield f"{here} loads {target}."
            elif not parts.scheme:
                beside = site if parts.path.startswith("/") else path.parent
                there = (beside / unquote(parts.path).lstrip("/")).resolve() if parts.path else path.resolve()
                there = there / "index.html" if there.is_dir() else there
                if not there.is_file():
                    yield f"{here} links to {target}, which is not there."
                elif parts.fragment and there.suffix == ".html":
                    known = pages[site / there.relative_to(site.resolve())].places
                    if unquote(parts.fragment) not in known:
                        yield f"{here} links to {target}: that page has no such place."
    for path in sorted(site.rglob("*.css")):
        for target in _IN_STYLES.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {target}."


def _read(path: Path) -> Found:
    found = Found()
    text = path.read_text(encoding="utf-8")
    found.feed(text)
    for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL):
        found.loads += _IN_STYLES.findall(style)
    return found

"""The documentation site, built and opened in a browser."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.building import ROOT
from docs.building.checking import problems
from docs.building.imports import PACKAGE
from docs.building.pages import PROJECT
from fedtailor.methods import all_methods
from notebooks.make import NOTEBOOKS
from tests.reporting.browser import CHROMIUM, Browser

pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
OPENED = (
    "index.html",
    "methods/pgfed.html",
    "methods.html",
    "reference/settings.html",
    "reference/commands.html",
    "reference/api/method.html",
    "architecture.html",
    "results.html",
    f"notebooks/{NOTEBOOKS[0]}.html",
)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` made, if nothing has changed since; else one that is built now."""
    built = ROOT / "site"
    sources = [ROOT / "mkdocs.yml", *(ROOT / name for name in PROJECT)]
    sources += [path for top in (ROOT / "docs", ROOT / "notebooks", PACKAGE) for path in top.rglob("*.*")]
    newest = max(path.stat().st_mtime for path in sources if "__pycache__" not in path.parts and path.exists())
    if (built / "sitemap.xml").exists() and (built / "sitemap.xml").stat().st_mtime > newest:
        return built
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "docs.building", built], capture_output=True, text=True, cwd=ROOT, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def open_page(browser: Browser, path: Path) -> None:
    browser.call("Page.navigate", url=path.resolve().as_uri())
    browser.until("document.readyState === 'complete'")


def test_it_is_complete_and_no_link_is_dead(site: Path) -> None:
    assert list(problems(site)) == []
    there = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    guides = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert there >= {path.as_posix() for path in guides} | set(OPENED)
    assert there >= {f"notebooks/{name}.html" for name in NOTEBOOKS}
    assert there >= {f"project/{name.lower().replace('_', '-').replace('.md', '.html')}" for name in PROJECT}


def test_equations_are_drawn_without_a_script(site: Path) -> None:
    """No LaTeX is left in any page, and every page of a method with equations has MathML."""
    left = [path for path in site.rglob("*.html") if 'class="arithmatex"' in path.read_text(encoding="utf-8")]
    assert left == []
    for source in sorted((ROOT / "docs" / "methods").glob("*.md")):
        if "$$" in source.read_text(encoding="utf-8"):
            page = (site / "methods" / source.name).with_suffix(".html").read_text(encoding="utf-8")
            assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block"' in page, source.name


def test_every_method_is_in_the_navigation(site: Path) -> None:
    page = (site / "methods.html").read_text(encoding="utf-8")
    for source in (ROOT / "docs" / "methods").glob("*.md"):
        assert f'href="methods/{source.stem}.html" class="md-nav__link"' in page
    assert len(all_methods()) >= len(list((ROOT / "docs" / "methods").glob("*.md")))


@needs_browser
@pytest.mark.parametrize("page", OPENED)
def test_a_browser_finds_no_fault(page: str, site: Path, browser: Browser) -> None:
    """No errors in the console, no request but for files of the site, and nothing wider than a telephone."""
    browser.messages.clear()
    browser.requests.clear()
    open_page(browser, site / page)
    assert browser.messages == []
    elsewhere = [url for url in browser.requests if not url.startswith((site.resolve().as_uri(), "data:", "blob:"))]
    assert elsewhere == []
    browser.call("Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=1, mobile=False)
    try:
        assert browser.run("document.documentElement.scrollWidth") <= 420
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


@needs_browser
def test_the_search_finds_a_method(site: Path, browser: Browser) -> None:
    """From the disk, where browsers start no workers."""
    browser.messages.clear()
    open_page(browser, site / "index.html")
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="PGFed")
    browser.run("document.querySelector('[data-md-component=search-query]').dispatchEvent(new Event('keyup'))")
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    assert browser.until(f"{links}.some(href => href.includes('methods/pgfed.html'))")
    assert browser.messages == []

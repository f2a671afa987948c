"""What happens in a build of the site beside mkdocs' own work: pages made of code, links, equations."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from docs.building import architecture, pages, reference
from docs.building.equations import with_mathml
from docs.building.links import Links

# What a page has from the code, in the place of a comment that names it and the paragraph below, which is for GitHub.
FROM_CODE = {
    "settings": reference.settings,
    "commands": reference.commands,
    "names": reference.names,
    "imports": architecture.imports,
}
_FROM_CODE = re.compile(r"^<!-- from the code: (\w+) -->\n.*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
_made_of: dict[str, str] = {}  # the file of the repository that a page is made of, by the page's place in the site
_links: list[Links] = []


def on_config(config: MkDocsConfig) -> None:
    """Have links rewritten."""
    _links[:] = [Links(str(config.repo_url))]
    config.markdown_extensions.append(_links[0])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of something else, and give those that the navigation names by a pattern."""
    made = {uri: (f"docs/{uri}", text) for uri, text in reference.api_pages().items()}
    made |= pages.notebooks() | pages.project()
    for uri, (_, text) in made.items():
        files.append(File.generated(config, uri, content=text))
    _made_of.update({uri: source for uri, (source, _) in made.items()})
    there = [file.src_uri for file in files if file.inclusion is not InclusionLevel.EXCLUDED]
    _links[0].pages = {_source(uri): uri for uri in there}
    config.nav = list(expanded(config.nav or [], there))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is read off the code."""
    _links[0].page, _links[0].source = page.file.src_uri, _source(page.file.src_uri)
    return _FROM_CODE.sub(lambda found: FROM_CODE[found[1]](), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the equations."""
    try:
        return with_mathml(html)
    except ValueError as error:
        raise PluginError(f"{_source(page.file.src_uri)}: {error}") from error


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the theme from asking GitHub for the repository's number of stars, from every reader's browser."""
    return output.replace('data-md-component="source"', "")


def _source(uri: str) -> str:
    return _made_of.get(uri, f"docs/{uri}")


def expanded(nav: Sequence[Any], there: Sequence[str]) -> Iterator[Any]:
    """Put the pages that fit a pattern in its place."""
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            pages_inside = inside if isinstance(inside, list) else [inside]
            alone = isinstance(inside, str) and "*" not in inside
            yield {title: inside if alone else list(expanded(pages_inside, there))}
        elif "*" in entry:
            yield from (uri for uri in there if fnmatch(uri, entry))
        else:
            yield entry

r"""The equations of the documentation, which are LaTeX in Markdown: `$…$` in a line, `$$` on lines of their own.

They are read in two places. The site turns them into MathML by latex2mathml, which leaves what it does not know as it
is. GitHub first reads a page as Markdown and only then looks for equations: an underscore after a brace may begin an
emphasis, and a backslash before a sign (`\\`, `\,`, `\{`) is dropped. So rows of `align*` end with `\cr`, a space is
`\ ` or `\quad`, and a subscript stands behind a letter: `\hat s_{ij}`, not `\hat{s}_{ij}`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
METHODS = [page for page in PAGES if page.parent.name == "methods"]
REFUSED = {"operatorname", "mbox", "hbox", "phantom", "def", "newcommand"}  # by GitHub (github/markup#1688)

_CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|(`+).+?(?<!`)\1(?!`)", re.DOTALL | re.MULTILINE)
_EQUATION = re.compile(r"^\$\$\n(?P<display>.+?)\n\$\$$|\$(?P<inline>[^$\n]+)\$", re.DOTALL | re.MULTILINE)
_AS_TEXT = re.compile(r"^(?: {4}|\t).*[=←].*[α-ωΑ-ΩΣ∑∇]|^(?: {4}|\t).*[α-ωΑ-ΩΣ∑∇].*[=←]", re.MULTILINE)


@dataclass(frozen=True)
class Equation:
    """An equation, the line of the page that it begins in, and the characters before and behind it."""

    latex: str
    display: bool
    line: int
    before: str
    behind: str

    @property
    def source(self) -> str:
        return f"$$\n{self.latex}\n$$" if self.display else f"${self.latex}$"


def without_code(text: str) -> str:
    """Fill code and comments with backticks: every line stays where it is."""
    return _CODE.sub(lambda found: re.sub(r"[^\n]", "`", found[0]), text)


def equations(text: str) -> Iterator[Equation]:
    text = without_code(text)
    for found in _EQUATION.finditer(text):
        before, behind = text[: found.start()], text[found.end() :]
        latex, line = found["display"] or found["inline"], before.count("\n") + 1
        yield Equation(latex, bool(found["display"]), line, before[-1:], behind[:1])


def read(page: Path) -> str:
    return (ROOT / page).read_text("utf-8")


def complaint(equation: Equation) -> str:
    """Say what is wrong with an equation; nothing if it becomes MathML as it should."""
    convert = pytest.importorskip("latex2mathml.converter").convert
    try:
        tree = ElementTree.fromstring(convert(equation.latex, display="block" if equation.display else "inline"))
    except Exception as error:  # of the converter, or XML with the & of an environment that it does not know
        return f"{type(error).__name__}: {error}"
    if any(element.tag.endswith("merror") for element in tree.iter()):
        return "an error in the MathML"
    left = [element.text for element in tree.iter() if element.text and "\\" in element.text]
    if left:
        return f"unknown: {left}"
    if equation.latex.count("{") != equation.latex.count("}"):
        return "a brace without its other"
    refused = REFUSED & set(re.findall(r"\\([a-zA-Z]+)", equation.latex))
    return f"GitHub refuses {refused}" if refused else ""


def misplaced(text: str) -> str:
    """Say which $ of a page is no equation's, or stands where GitHub sees none; nothing if all is well."""
    if "$" in _EQUATION.sub("", without_code(text)):
        return "a $ that is no equation's belongs into `code`"
    for equation in equations(text):
        place = f"line {equation.line}: {equation.latex}"
        if equation.latex != equation.latex.strip():
            return f"{place}: blanks inside of the $"
        if not re.fullmatch(r"[\s(]?", equation.before) or not re.fullmatch(r"[\s.,;:)]?", equation.behind):
            return f"{place}: another sign beside the $"
    return ""


def as_markdown(text: str) -> str:
    """Read a page as Markdown, and return the text of its paragraphs and cells; a null where anything else is."""
    return "\0".join(
        "".join(_text(child) for child in token.children or ())
        for token in MarkdownIt("commonmark").enable("table").parse(text)
        if token.type == "inline"
    )


def _text(token: Token) -> str:
    return {"text": token.content, "softbreak": "\n"}.get(token.type, "\0")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_equation_becomes_mathml(page: Path) -> None:
    for equation in equations(read(page)):
        said = complaint(equation)
        assert not said, f"{page}, line {equation.line}: {equation.latex}\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_markdown_leaves_every_equation_as_it_is(page: Path) -> None:
    text = as_markdown(read(page))
    for equation in equations(read(page)):
        assert equation.source in text, f"{page}, line {equation.line}: Markdown changes {equation.latex}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_dollar_is_an_equations(page: Path) -> None:
    said = misplaced(read(page))
    assert not said, f"{page}: {said}"


@pytest.mark.parametrize("page", METHODS, ids=str)
def test_equations_of_methods_are_latex(page: Path) -> None:
    text = read(page)
    assert _AS_TEXT.findall(without_code(text)) == [], page
    assert any(equation.display for equation in equations(text)), f"{page} has no equation"


# --- the reader of pages itself ---

PAGE = r"""
Some $\theta_i$, costs `$5`, and

$$
\begin{align*}
a &= b \cr
c &= \sum_j \hat s_{ij}
\end{align*}
$$

```
echo $HOME $x$
```
"""


def test_equations_are_found_outside_of_code() -> None:
    inline, display = equations(PAGE)
    assert (inline.latex, inline.display, inline.line) == (r"\theta_i", False, 2)
    assert (display.display, display.line) == (True, 4)
    assert display.latex.splitlines()[0] == r"\begin{align*}"
    assert not complaint(inline)
    assert not complaint(display)
    assert display.source in as_markdown(PAGE)


@pytest.mark.parametrize(
    ("latex", "words"),
    [
        (r"\foo x", "unknown"),
        (r"\arg x", "unknown"),
        (r"\begin{aligned} a &= b \end{aligned}", "ParseError"),
        (r"\frac{a", "brace"),
        (r"\operatorname{clip}(x)", "GitHub refuses"),
    ],
)
def test_a_wrong_equation_is_seen(latex: str, words: str) -> None:
    (equation,) = equations(f"${latex}$")
    assert words in complaint(equation)


@pytest.mark.parametrize("latex", [r"\hat{s}_i + \sum_{j} t", r"a \, b", r"\{ a \}", r"a \\ b", "a <b> c", "x*y*z"])
def test_what_markdown_changes_is_seen(latex: str) -> None:
    (equation,) = equations(f"${latex}$")
    assert equation.source not in as_markdown(f"Text ${latex}$.")


@pytest.mark.parametrize("text", ["costs $5", "$5 and $6.", "$HOME/$USER", "the $x$s", "2$x$"])
def test_a_dollar_that_is_no_equation_is_seen(text: str) -> None:
    assert misplaced(text)
    assert not misplaced("costs `$5`, ($x$), $y$.")


@pytest.mark.parametrize("line", ["    θ_i ← θ_i − η ∇f_i", "    F(x) = Σ_j f_j(x)", "    α = 1"])
def test_an_equation_that_is_text_is_seen(line: str) -> None:
    assert _AS_TEXT.search(f"So:\n\n{line}\n")
    assert not _AS_TEXT.search(f"So:\n\n{line.strip()}\n")

"""Equations as MathML, which browsers draw by themselves: no script and no font has to be loaded."""

import html
import re
import xml.etree.ElementTree as ET

from latex2mathml.converter import convert

# As pymdownx.arithmatex leaves them: \(inline\) in a span, \[a line of its own\] in a div.
_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?:\((?P<inline>.*?)\\\)|\[(?P<block>.*?)\\\])</(?P=tag)>', re.DOTALL
)
_BARS = re.compile(r"<mo>(&#x02016;|&#x0007C;|&#x02225;)</mo>")  # of ‖x‖: a browser would take a lone one for tall
_TAG = re.compile(r"\\tag\*?\{((?:[^{}]|\{[^{}]*\})*)\}")


def with_mathml(page: str) -> str:
    """Replace the LaTeX in a page's HTML by MathML. One that cannot be converted raises ValueError."""
    return _EQUATION.sub(lambda found: _inline(found["inline"]) if found["tag"] == "span" else _block(found), page)


def mathml(latex: str, display: str = "inline") -> str:
    """Convert an equation.

    The converter takes commands that it does not know for names, and forgives braces that do not close: both are errors
    here.
    """
    latex = latex.strip().replace("{aligned}", "{align*}")  # which is how the converter knows it
    unescaped = re.sub(r"\\\\|\\[{}]", "", latex)
    if unescaped.count("{") != unescaped.count("}"):
        raise ValueError(f"the braces of this equation are not in pairs: {latex}")
    try:
        made: str = convert(latex, display=display)
        left = [text for text in ET.fromstring(made).itertext() if "\\" in text or text == "&"]
    except Exception as error:
        raise ValueError(f"this equation cannot be converted ({error or type(error).__name__}): {latex}") from error
    if left:
        raise ValueError(f"this equation cannot be converted ({left[0]} is not known): {latex}")
    return _BARS.sub(r'<mo stretchy="false">\1</mo>', made)


def _inline(latex: str) -> str:
    return mathml(html.unescape(latex))


def _block(found: re.Match[str]) -> str:
    """Put an equation on a line of its own, its number at the right."""
    latex = html.unescape(found["block"])
    numbers = [f"({tag})" if "*" not in whole else tag for whole, tag in _tags(latex)]
    number = f'<span class="equation-number">{html.escape(", ".join(numbers))}</span>' if numbers else ""
    return f'<div class="equation">{mathml(_TAG.sub("", latex), "block")}{number}</div>'


def _tags(latex: str) -> list[tuple[str, str]]:
    return [(found[0].partition("{")[0], found[1]) for found in _TAG.finditer(latex)]

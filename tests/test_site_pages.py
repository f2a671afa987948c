"""What the documentation site is made of: equations, links, the pages that are read off the code."""

import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mkdocs.exceptions import PluginError
from pydantic import Field

import fedtailor
from docs.building import ROOT, reference
from docs.building.architecture import HEIGHT, imports, layered, placed
from docs.building.checking import problems
from docs.building.equations import mathml, with_mathml
from docs.building.hooks import _FROM_CODE, FROM_CODE, expanded
from docs.building.imports import reduced, rooms
from docs.building.links import Links
from docs.building.pages import notebook_page, notebooks
from docs.make_screenshots import COLUMNS, COMPARE, screen
from fedtailor.cli import COMMANDS, GROUPS, _built
from fedtailor.experiment import Evaluation, Experiment
from notebooks.make import NOTEBOOKS

IMAGES = ROOT / "docs" / "images"

# --- equations ---


def test_equations_become_mathml() -> None:
    made = with_mathml(
        '<p>Text <span class="arithmatex">\\(a &lt; b\\)</span>.</p>\n'
        '<div class="arithmatex">\\[\nx = 1 \\tag{Eq. 5}\n\\]</div><div class="other">\\[y\\]</div>'
    )
    assert '<p>Text <math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">' in made
    assert "<mo>&#x0003C;</mo>" in made
    assert '<span class="equation-number">(Eq. 5)</span></div>' in made
    assert "tag" not in made
    assert '<div class="other">\\[y\\]</div>' in made


@pytest.mark.parametrize(
    "latex",
    [
        r"\unheardof x",
        r"\mathbf{x",
        r"x}",
        r"\left( x",
        r"\begin{aligned} a & b",
        r"\begin{nothing} a & b \end{nothing}",
    ],
)
def test_an_equation_that_cannot_be_converted_is_an_error(latex: str) -> None:
    with pytest.raises(ValueError, match="this equation"):
        mathml(latex)


def test_equations_one_below_the_other_are_aligned() -> None:
    made = mathml(r"\begin{aligned} a &= \{b\} \\ c &= d \end{aligned}", "block")
    assert made.count("<mtr>") == 2
    assert made.count('columnalign="right"') == 2


def test_bars_are_not_stretched() -> None:
    assert mathml(r"\lVert x \rVert").count('<mo stretchy="false">') == 2


# --- links ---


@pytest.fixture
def links() -> Links:
    made = Links("https://example.org/project/")
    made.pages = {
        "docs/runs.md": "runs.md",
        "docs/methods/ditto.md": "methods/ditto.md",
        "README.md": "project/readme.md",
    }
    made.source, made.page = "docs/methods/ditto.md", "methods/ditto.md"
    return made


@pytest.mark.parametrize(
    ("target", "rewritten"),
    [
        ("../runs.md#metrics", "../runs.md#metrics"),
        ("../../README.md", "../project/readme.md"),
        ("../../fedtailor/method.py#L10", "https://example.org/project/blob/main/fedtailor/method.py#L10"),
        ("../../results", "https://example.org/project/tree/main/results"),
        ("https://elsewhere.org/x", "https://elsewhere.org/x"),
        ("#here", "#here"),
        ("mailto:a@example.org", "mailto:a@example.org"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(links: Links, target: str, rewritten: str) -> None:
    assert links.rewritten(target) == rewritten


@pytest.mark.parametrize("target", ["../../fedtailor/nothing.py", "../nothing.md", "../../../elsewhere"])
def test_a_link_to_nothing_is_an_error(links: Links, target: str) -> None:
    with pytest.raises(PluginError, match=r"docs/methods/ditto.md links to .*, which is not in the repository"):
        links.rewritten(target)


def test_a_page_of_another_file_has_its_links(links: Links) -> None:
    links.source, links.page = "notebooks/hospitals.ipynb", "notebooks/hospitals.md"
    assert links.rewritten("../docs/runs.md") == "../runs.md"
    assert links.rewritten("hospitals.py") == "https://example.org/project/blob/main/notebooks/hospitals.py"


def test_a_pattern_in_the_navigation_stands_for_pages() -> None:
    nav = [{"Home": "index.md"}, {"Books": "books/*.md"}, {"More": ["one.md", {"All": ["a/*.md"]}]}]
    there = ["books/b.md", "books/a.md", "a/x.md", "one.md"]
    assert list(expanded(nav, there)) == [
        {"Home": "index.md"},
        {"Books": ["books/b.md", "books/a.md"]},
        {"More": ["one.md", {"All": ["a/x.md"]}]},
    ]


# --- the built pages ---


def test_what_is_wrong_with_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h1 id="top">b</h1><img src="../p.png"><a href="/a.html">a</a>')
    (tmp_path / "p.png").write_text("")
    (tmp_path / "a.html").write_text(
        '<a href="sub/b.html#top">1</a><a href="sub/b.html#gone">2</a><a href="c.html">3</a><a href="#no">4</a>'
        '<a href="https://elsewhere.org">5</a><script src="https://elsewhere.org/x.js"></script>'
        '<link rel="stylesheet" href="//elsewhere.org/x.css"><style>a { fill: url(http://elsewhere.org/y) }</style>'
        '<a href="mailto:x@y.z">6</a><img src="gone.png">'
    )
    (tmp_path / "s.css").write_text('@import "https://elsewhere.org/z.css"; a { background: url("data:x") }')
    assert list(problems(tmp_path)) == [
        "a.html links to sub/b.html#gone: that page has no such place.",
        "a.html links to c.html, which is not there.",
        "a.html links to #no: that page has no such place.",
        "a.html loads https://elsewhere.org/x.js.",
        "a.html loads //elsewhere.org/x.css.",
        "a.html links to gone.png, which is not there.",
        "a.html loads http://elsewhere.org/y.",
        "s.css loads https://elsewhere.org/z.css.",
    ]


def test_every_part_from_the_code_has_its_place() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(name for text in pages for name in _FROM_CODE.findall(text)) == sorted(FROM_CODE)


# --- settings ---


def rows(text: str) -> list[tuple[str, str]]:
    return re.findall(r'^\| <span id="(\w+)">(.*)$', text, re.MULTILINE)


def test_every_setting_is_explained_once() -> None:
    found = rows(reference.settings())
    fields = {**Experiment.model_fields, **{f"evaluate_{n}": f for n, f in Evaluation.model_fields.items()}}
    del fields["evaluation"]
    assert sorted(name for name, _ in found) == sorted(fields)
    for name, row in found:
        field, default = fields[name], fields[name].get_default()
        assert str(field.description).split(" [")[0] in row.replace("\\|", "|"), name
        if name != "parameters" and default is not None and not isinstance(default, bool):
            assert f"| `{default}` |" in row, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lr", "`--lr` | number above 0 |"),
        ("test", "number from 0, below 1 | `0.2`"),
        ("seed", "whole number from 0 to 2⁶⁴ − 1 | `0`"),
        ("batch", "whole number, `full` | `10`"),
        ("optimizer", "`sgd`, `adam`, `adamw` | `sgd`"),
        ("clients", "whole number from 1 | [20, or as many as the data names] | number of clients |"),
        ("stratify", "`--stratify`, `--no-stratify` | on or off | `true`"),
        (
            "evaluate_fine_tune",
            "`fine_tune`</span><br>`--fine-tune`, `--evaluate-fine-tune` | whole number from 0 | `0`",
        ),
    ],
)
def test_a_setting_has_its_range_and_default(name: str, words: str) -> None:
    assert words in dict(rows(reference.settings()))[name]


def test_a_setting_without_an_option_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**reference.setting_fields(), "unheard_of": Field(0, description="of nothing")}
    monkeypatch.setattr(reference, "setting_fields", lambda: fields)
    with pytest.raises(ValueError, match="no option for unheard_of"):
        reference.settings()


# --- commands ---


def test_every_command_has_all_its_options() -> None:
    text = reference.commands()
    sections = dict(re.findall(r"^## ([\w ]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    named = {name: (name, module) for name, (module, _) in COMMANDS.items()}
    named |= {f"{g} {name}": (name, module) for g, (_, table) in GROUPS.items() for name, (module, _) in table.items()}
    assert list(sections) == list(named)
    for title, (name, module) in named.items():
        for option in _built(name, module).params:
            if option.param_type_name == "option" and not option.hidden:
                assert re.search(rf"[` ]{option.opts[0]}[`, ]", sections[title]), (title, option.opts[0])


@pytest.mark.parametrize("between", ["\n\n", "\n  "])
def test_examples_of_a_command_are_code(between: str) -> None:
    text = f"Do it.\n\n[bold]Examples[/]{between}fedtailor run a{between}fedtailor run b \\[x]\n\nMore,\non two lines."
    made = "Do it.\n\n**Examples**\n\n```text\nfedtailor run a\nfedtailor run b [x]\n```\n\nMore,\non two lines."
    assert reference._prose(text) == made


# --- public names ---


def test_every_public_name_is_in_the_reference() -> None:
    index, documented = reference.names(), re.findall(r'heading: "([\w.]+)"', "".join(reference.api_pages().values()))
    names = [f"fedtailor.{name}" for name in fedtailor.__all__ if name != "__version__"]
    names += [f"fedtailor.testing.{name}" for name in fedtailor.testing.__all__]
    assert sorted(documented) == sorted(names)
    for name in names:
        assert f"[`{name}`](" in index


def test_every_function_of_a_public_class_has_a_docstring() -> None:
    """Only what has one is shown."""
    for name in fedtailor.__all__:
        for member, thing in (
            vars(getattr(fedtailor, name)).items() if inspect.isclass(getattr(fedtailor, name)) else ()
        ):
            function: Any = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
            if inspect.isfunction(function) and not member.startswith("_"):
                assert function.__doc__, f"{name}.{member}"


# --- architecture ---


def test_rooms_stand_above_what_they_import_and_apart() -> None:
    graph = rooms()
    levels, places = layered(reduced(graph)), placed(reduced(graph), layered(reduced(graph)))
    text = imports()
    boxes = {
        name: tuple(map(int, found))
        for name, *found in re.findall(r'id="room-(\w+)">.*?<rect x="(\d+)" y="(\d+)" width="(\d+)"', text)
    }
    assert boxes.keys() == graph.keys()
    for name, others in graph.items():
        assert all(levels[other] < levels[name] for other in others), name
        assert all(places[other][1] > places[name][1] for other in others), name
    corners = sorted(boxes.values(), key=lambda box: (box[1], box[0]))
    for (x, y, width), (next_x, next_y, _) in pairwise(corners):
        assert next_x > x + width if next_y == y else next_y > y + HEIGHT


# --- notebooks and pictures ---


def test_a_notebook_is_a_page() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["print('```')"], "outputs": [{"text": ["```\n"]}]},
        {"cell_type": "code", "source": ["x = 1"], "outputs": []},
    ]
    made = notebook_page("book", {"cells": cells})
    assert made.startswith("# Title\n\n*A notebook: [`book.ipynb`](book.ipynb)")
    assert made.endswith("Text.\n\n````python\nprint('```')\n````\n\n````text\n```\n````\n\n```python\nx = 1\n```\n")
    assert list(notebooks()) == [f"notebooks/{name}.md" for name in NOTEBOOKS]


def test_the_screen_shows_what_was_written_last() -> None:
    written = (
        "\x1b[?25la\r\nbar 1\r\n\x1b[32mbar 2\x1b[0m\r\x1b[2K\x1b[1A\x1b[2Kbar 3\r\n\x1b[1mdone\x1b[0m\x1b[?25h\r\n"
    )
    assert screen(written) == "a\nbar 3\n\x1b[1mdone\x1b[0m"


def test_pictures_are_small_and_load_nothing() -> None:
    assert len(list(IMAGES.iterdir())) >= 6
    for path in IMAGES.iterdir():
        assert path.stat().st_size < 200_000, path.name
        if path.suffix == ".svg":
            assert not re.search(r"url\(\W*http|href=\W*http|@import|@font-face", path.read_text(encoding="utf-8")), (
                path
            )
    assert f"fedtailor {COMPARE}\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert COLUMNS <= 100

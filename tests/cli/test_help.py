"""The pages of `--help` of all commands, as they look on narrow pages."""

import re

import pytest
import typer

from fedtailor.cli import AT_WORK, BY_PURPOSE, COMMANDS, GROUPS, REAL_SITES, _built, app
from tests.cli.calling import Call, done

PAGES = [*((name,) for name in COMMANDS), *((group, name) for group, (_, table) in GROUPS.items() for name in table)]
MODULES = {(name,): about[0] for name, about in COMMANDS.items()} | {
    (group, name): about[0] for group, (_, table) in GROUPS.items() for name, about in table.items()
}


def sections(page: str) -> dict[str, str]:
    """The groups of a page by their titles: what stands at the left edge above an indented line."""
    found = re.split(r"^(\S.*)\n(?=  \S)", page, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_every_option_is_whole_on_a_narrow_page(
    words: tuple[str, ...], columns: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = done(call(*words, "--help"))
    assert max(map(len, page.splitlines())) <= columns
    assert not re.search(r"-$", page, re.MULTILINE), "a name is broken at its hyphen"
    for param in _built(words[-1], MODULES[words]).params:
        if param.param_type_name == "option" and not param.hidden:
            for name in param.opts:
                found = re.findall(rf"^  (?:-\w, |--[\w-]+, )*{name}(?![\w-]).*$", page, re.MULTILINE)
                assert len(found) == 1, name
                assert param.is_flag or param.metavar, f"{name} has no word for its value"
            value = rf"{param.opts[-1]} {re.escape(param.metavar or '')}(?!\S)"
            moved = page.replace("\n", " ")
            assert param.is_flag or re.search(value, page) or str(param.metavar).split("|")[-1] + ": " in moved


@pytest.mark.parametrize("words", [(), *((group,) for group in GROUPS), *PAGES], ids=" ".join)
def test_there_are_no_types_no_frames_and_no_dots_for_what_is_cut(words: tuple[str, ...], call: Call) -> None:
    page = done(call(*words, "--help"))
    assert not re.search(r"<\w+|\bTEXT\b|\bVALUE\b(?<!NAME=VALUE)|[│─╭]|\[/?bold\]|\\\[", page)
    assert not re.search(r"^  --?[^ ]*…( |$)", page, re.MULTILINE)


def test_commands_stand_in_groups_by_purpose(call: Call) -> None:
    page = done(call("--help"))
    assert done(call("-h")) == page
    found = sections(page)
    assert list(found) == [*BY_PURPOSE, REAL_SITES, "Options", "Output"]
    for title, commands in [*BY_PURPOSE.items(), (REAL_SITES, GROUPS)]:
        assert re.findall(r"^  (\w+) ", found[title], re.MULTILINE) == list(commands)


def test_options_stand_in_groups_the_most_used_first(call: Call) -> None:
    of_run = ["Data", "Table or folder of yours", "Model", "Training", "Evaluation", "Privacy and attacks"]
    of_run += ["Uneven clients", "Execution"]
    for command, first in (("run", ["Method"]), ("compare", ["Comparison", "Method"]), ("tune", ["Tuning", "Method"])):
        titles = list(sections(done(call(command, "--help"))))
        assert titles[titles.index("Arguments") :] == ["Arguments", *first, *of_run, "Output"]
    assert list(sections(done(call("show", "--help")))) == ["Arguments", "Options"]


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_a_page_ends_with_help_and_with_the_switches_where_something_runs(words: tuple[str, ...], call: Call) -> None:
    page = done(call(*words, "--help"))
    *_, last = sections(page).values()
    assert "  -h, --help " in last
    assert ("  -q, --quiet " in last) == ("  -v, --verbose " in last) == (words[-1] in AT_WORK)


def test_examples_stand_close_together(call: Call) -> None:
    examples = sections(done(call("run", "--help")))["Examples"].split("\n\n")[0].splitlines()
    assert len(examples) >= 5
    assert all(line.startswith("  fedtailor run ") for line in examples)


def test_what_must_be_given_and_what_is_taken_otherwise_are_said(call: Call) -> None:
    page = done(call("adapt", "--help"))
    assert re.search(r"^  --to DIR +where the model files go \(required\)$", page, re.MULTILINE)
    assert re.search(r"^  --epochs K +epochs of fine-tuning \[5\]$", page, re.MULTILINE)
    assert re.search(r"^  --onnx +as ONNX too \(needs the extra fedtailor\[onnx\]\)$", page, re.MULTILINE)


def test_many_values_stand_in_the_help(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    page = " ".join(done(call("run", "--help")).split())
    assert "--choose, --evaluate-choose last, best-validation, best-test, last-5, last-10: the round that" in page


def test_help_is_coloured_at_a_terminal_alone(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = done(call("show", "--help"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    coloured = done(call("show", "--help"))
    assert "\x1b[" not in plain
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_all_commands_have_pages() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(known) == {*COMMANDS, *GROUPS}

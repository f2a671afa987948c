"""The pages of `--help`: names of options whole at any width, their values beside them, in groups."""

import inspect
import re
from textwrap import wrap
from typing import Any

WIDEST = 100  # columns of a page: longer lines are hard to read
NAMES = 0.3  # of a page's width for names and values; the help of longer ones stands below them
LAST = "Output"  # the group that closes a page


def print_help(command: Any, ctx: Any) -> None:
    """Print the page of a command or a group of commands."""
    from rich.text import Text

    from fedtailor._common.text import SafeConsole

    console = SafeConsole()
    width = min(console.width, WIDEST)
    words = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    lines = [Text(line) for line in wrap(f"Usage: {words}", width, subsequent_indent="  ", **_WHOLE)]
    lines += [Text(), *_about(command.help or "", width)]
    sections = _sections(command, ctx)
    lengths = [len(f"{name} {values}".strip()) for entries in sections.values() for name, values, _ in entries]
    column = max((length for length in lengths if length <= NAMES * width), default=0)
    for title, entries in sections.items():
        lines += [Text(), Text(title, "bold"), *_entries(entries, column, width)]
    console.print(Text("\n").join(lines), soft_wrap=True, highlight=False)


_WHOLE: Any = {"break_on_hyphens": False, "break_long_words": False}


def _about(text: str, width: int) -> list[Any]:
    """Wrap the paragraphs of a docstring; indented lines, like examples, are lines of their own."""
    from rich.text import Text

    said: list[Text] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if said:
            said.append(Text())
        for line in re.sub(r"\n(?! )", " ", paragraph).split("\n"):
            own = line.startswith(" ")
            parts = wrap(_plain(line), width, subsequent_indent="    " if own else "", **_WHOLE)
            said += [Text(part, "bold" if line.startswith("[bold]") else "") for part in parts]
    return said


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str, str]]]:
    """Group commands, arguments and options by title: each with its name, its values and its help."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for name in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        below = command.get_command(ctx, name)
        found.setdefault(below.rich_help_panel or "Commands", []).append((name, "", _plain(below.help or "")))
    grouped = False  # options have titles of their own
    for param in command.get_params(ctx):
        if getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            title, name, values = "Arguments", param.metavar or param.name.upper(), ""
        else:
            title = getattr(param, "rich_help_panel", None) or "Options"  # click's --help has none
            grouped |= title != "Options"
            if param.name == "help":
                title = LAST if grouped else title
            names = sorted(param.opts, key=lambda name: name.startswith("--"))
            name, values = ", ".join(names), "" if param.is_flag else param.metavar or "VALUE"
        found.setdefault(title, []).append((name, values, _help(param)))
    if LAST in found:
        found[LAST] = found.pop(LAST)
    return found


def _help(param: Any) -> str:
    shown = getattr(param, "show_default", False) and param.default not in (None, False, [], ())
    text = "show this page" if param.name == "help" else _plain(param.help or "")
    if param.required and param.param_type_name == "option":
        text += " (required)"
    return f"{text} [{param.default}]" if shown else text


def _entries(entries: list[tuple[str, str, str]], column: int, width: int) -> list[Any]:
    """Two columns. A name that is too long for the first stands above its help, and many values stand in the help."""
    from rich.text import Text

    said: list[Text] = []
    for name, values, text in entries:
        if len(name) + len(values) + 3 > width:
            values, text = "", f"{values.replace('|', ', ')}: {text}"
        lines = wrap(text, width - column - 4, **_WHOLE) or [""]
        long = len(f"{name} {values}".strip()) > column
        first = Text.assemble("  ", (name, "bold cyan"), " " * bool(values), (values, "yellow"))
        if not long:
            first.append(" " * (column + 4 - len(first)) + lines.pop(0))
        said += [first, *(Text(" " * (column + 4) + line) for line in lines)]
    return said


def _plain(text: str) -> str:
    """Take the markup out of a text for people."""
    from rich.text import Text

    return Text.from_markup(text, emoji=False).plain

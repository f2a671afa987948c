"""The reference, read off the code: settings of an experiment, commands, public names. Nothing in it is typed here."""

import inspect
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

import fedtailor
import fedtailor.testing
from fedtailor.cli import COMMANDS, GROUPS, _built
from fedtailor.experiment import EVALUATION_NAMES, MOST, Evaluation, Experiment

# --- settings ---


def settings() -> str:
    """Every field of `Experiment` and `Evaluation` in a table, in the groups of `fedtailor run --help`."""
    options: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {"Method": ["method", "parameters"]}
    fields = setting_fields()
    for option in _built("run", COMMANDS["run"][0]).params:
        if option.name in fields:
            groups.setdefault(option.rich_help_panel, []).append(option.name)
            options[option.name] = list(option.opts)
        elif option.name.removeprefix("no_") in fields:  # the opposite of a flag, which comes behind it
            options[option.name.removeprefix("no_")] += option.opts
    options |= {"method": ["METHOD"], "parameters": ["--set NAME=VALUE"]}
    missing = fields.keys() - {name for names in groups.values() for name in names}
    if missing:
        raise ValueError(f"fedtailor run has no option for {', '.join(sorted(missing))}")
    return "\n".join(
        f"## {group}\n\n"
        + table(
            ("setting, option", "values", "default", "meaning"),
            (_setting_row(name, fields[name], options[name]) for name in names),
        )
        for group, names in groups.items()
    )


def setting_fields() -> dict[str, FieldInfo]:
    """Every setting by its flat name."""
    flat = {f"evaluate_{name}": field for name, field in Evaluation.model_fields.items()}
    return {**{name: field for name, field in Experiment.model_fields.items() if name != "evaluation"}, **flat}


def _setting_row(name: str, field: FieldInfo, options: list[str]) -> list[str]:
    short = [other for other, whole in EVALUATION_NAMES.items() if f"evaluate_{whole}" == name and other != name]
    meaning, found_out = str(field.description), "–"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None and (brackets := re.search(r" \[([^]]+)\]$", meaning)):
        meaning, found_out = meaning[: brackets.start()], f"[{brackets[1]}]"
    return [
        f'<span id="{name}">' + ", ".join(f"`{each}`" for each in [name, *short]) + "</span>"
        f"<br>{', '.join(f'`{option}`' for option in options)}",
        _values(field),
        found_out if default in (None, {}) else f"`{str(default).lower() if default in (True, False) else default}`",
        meaning,
    ]


def _values(field: FieldInfo) -> str:
    """The values that a setting takes: words, or numbers with their range."""
    kinds = _kinds(field.annotation)
    words = {bool: "on or off", int: "whole number", float: "number", str: "text", dict: "a table of values"}
    said = [words[kind] + (_range(field) if kind in (int, float) else "") for kind in kinds if isinstance(kind, type)]
    return ", ".join([*said, *(f"`{kind}`" for kind in kinds if isinstance(kind, str))])


def _kinds(annotation: Any) -> list[type | str]:
    """The types of an annotation, and the words of its literals; None is left out."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return [annotation] if annotation is not type(None) else []
    if get_origin(annotation) is dict:
        return [dict]
    return [kind for inner in get_args(annotation) for kind in _kinds(inner)]


def _range(field: FieldInfo) -> str:
    """The bounds of a number; that of everything which is counted is said once, above the tables."""
    words = {Ge: " from {ge}", Gt: " above {gt}", Le: " to {le}", Lt: ", below {lt}"}
    bounds = [bound for bound in field.metadata if bound != Le(MOST)]
    return "".join(words[type(bound)].format_map(asdict(bound)) for bound in bounds).replace(str(2**64 - 1), "2⁶⁴ − 1")


# --- commands ---

METAVARS = {"int": "N", "float": "X", "str": "TEXT", "path": "PATH", "list": "TEXT"}


def commands() -> str:
    """Every command, and those of the groups `deploy` and `site`."""
    tables = {"": COMMANDS, **{f"{group} ": commands for group, (_, commands) in GROUPS.items()}}
    return "\n".join(
        _command(f"{group}{name}", _built(name, module))
        for group, commands in tables.items()
        for name, (module, _) in commands.items()
    )


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = command.get_usage(context).replace("Usage: ", "fedtailor ")
    said = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    of_run = {option.name: option.help for option in _built("run", COMMANDS["run"][0]).params}
    fields = setting_fields()
    settings: dict[str, list[str]] = {}
    rows = []
    for parameter in said:
        if parameter.name in fields and parameter.help == of_run.get(parameter.name):
            link = f"[`{parameter.opts[0]}`](settings.md#{parameter.name})"
            settings.setdefault(parameter.rich_help_panel or "Others", []).append(link)
        else:
            rows.append(_parameter_row(parameter, context))
    parts = [f"## {name}", f"```text\n{usage}\n```", _prose(command.help or "")]
    if rows:
        parts.append(table(("argument, option", "meaning"), rows).rstrip("\n"))
    if settings:
        parts.append("Settings:\n\n" + "\n".join(f"- {group}: {', '.join(links)}" for group, links in settings.items()))
    return "\n\n".join(parts) + "\n"


def _parameter_row(parameter: Any, context: Any) -> list[str]:
    names, meaning = parameter.get_help_record(context)
    names = re.sub(r"<(\w+)[^>]*>", lambda kind: METAVARS.get(kind[1], kind[1].upper()), names)
    if parameter.param_type_name == "argument":
        names = names.split(" ")[0].upper() if parameter.metavar is None else parameter.metavar
    return [f"`{names}`", meaning.replace("\\[", "[")]


def _prose(text: str) -> str:
    """A command's help as Markdown: its examples, one line each, are a block of code."""
    text = re.sub(r"\[bold\](.*?)\[/(?:bold)?\]", r"**\1**", text).replace("\\[", "[")
    return re.sub(r"\n*((?:^ *fedtailor .*\n*)+)", _examples, text, flags=re.MULTILINE).strip("\n")


def _examples(found: re.Match[str]) -> str:
    lines = "\n".join(line.strip() for line in found[1].split("\n") if line)
    return f"\n\n```text\n{lines}\n```\n\n"


# --- public names ---

PAGES = {
    "functions": "Functions",
    "classes": "Classes",
    "method": "Writing a method",
    "testing": "Testing a method",
}


def public_names() -> dict[str, list[tuple[str, Any, str]]]:
    """Every public name with what it names and the place that defines it, by the page that it belongs on."""
    found: dict[str, list[tuple[str, Any, str]]] = {page: [] for page in PAGES}
    for name in fedtailor.__all__:
        thing = getattr(fedtailor, name)
        page = "method" if name in fedtailor._HOMES["method"] else "classes" if inspect.isclass(thing) else "functions"
        if name != "__version__":
            found[page].append((f"fedtailor.{name}", thing, _home(name, thing)))
    for name in fedtailor.testing.__all__:
        found["testing"].append(
            (f"fedtailor.testing.{name}", getattr(fedtailor.testing, name), f"fedtailor.testing.{name}")
        )
    return found


def names() -> str:
    """Every public name in a table, with its summary."""
    return "\n".join(
        f"## {PAGES[page]}\n\n"
        + table(
            ("name", "summary"),
            ([f"[`{name}`]({page}.md#{home})", _summary(thing)] for name, thing, home in listed),
        )
        for page, listed in public_names().items()
    )


def api_pages() -> dict[str, str]:
    """A page for each group of public names, by its place in the site."""
    return {
        f"reference/api/{page}.md": f"# {PAGES[page]}\n\n"
        + "\n".join(_documented(name, home) for name, _, home in listed)
        for page, listed in public_names().items()
    }


def _documented(name: str, home: str) -> str:
    """The lines that mkdocstrings puts a name's documentation in the place of."""
    settings = home in (f"fedtailor.experiment.{kind.__name__}" for kind in (Experiment, Evaluation))
    return f'::: {home}\n    options:\n      heading: "{name}"\n      toc_label: "{name.rpartition(".")[2]}"\n' + (
        "\nIts fields are the [settings](../settings.md).\n" if settings else ""
    )


def _home(name: str, thing: Any) -> str:
    """The module that defines a public name."""
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return next(f"fedtailor.{home}.{name}" for home, names in fedtailor._HOMES.items() if name in names)


def _summary(thing: Any) -> str:
    """The first sentence of a class's or function's docstring."""
    text = (inspect.getdoc(thing) or "") if inspect.isclass(thing) or inspect.isfunction(thing) else ""
    return re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(text.split("\n\n")[0].split("\n")))[0]


# --- tables ---


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    header = list(header)
    return "".join(_line(cells) for cells in (header, ["---"] * len(header), *rows))


def _line(cells: Iterable[str]) -> str:
    """A row. A bar needs no escape in code, which would show it."""
    parts = (re.split(r"(`[^`]*`)", cell) for cell in cells)
    escaped = ("".join(p if p.startswith("`") else p.replace("|", r"\|") for p in part) for part in parts)
    return f"| {' | '.join(escaped)} |\n"

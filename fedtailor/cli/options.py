"""The options of commands, made from the fields of an experiment: the same names everywhere, described once."""

import inspect
import tomllib
from collections.abc import Callable, Container
from difflib import get_close_matches
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

from fedtailor._common.errors import FedtailorError, shown
from fedtailor._common.toml import parse_toml
from fedtailor.cli.completion import completer_of, from_names, methods_and_files, setting_names, tuned_settings
from fedtailor.experiment import (
    DATA_SETTINGS,
    NEW_DATA_SETTINGS,
    SETTING_NAMES,
    TABLE_SETTINGS,
    Evaluation,
    Experiment,
    in_sections,
    merged,
)

TRAINING_SETTINGS = (
    "rounds", "participation", "epochs", "steps", "batch", "drop_last", "optimizer", "lr", "schedule", "step_schedule",
    "momentum", "keep_momentum", "weight_decay", "clip", "label_smoothing", "class_weights", "augment", "seed", "dtype",
    "autocast", "matmul_precision", "server_optimizer", "server_lr",
)  # fmt: skip
TABLE = "Table or folder of yours"
OF_TABLES = (*TABLE_SETTINGS, "preprocessing", "rare", "image_size")
GROUPS = {
    "Data": DATA_SETTINGS,
    "New data": NEW_DATA_SETTINGS,
    TABLE: TABLE_SETTINGS,
    "Model": ("model", "head", "weights", "frozen", "lora", "loss"),
    "Training": TRAINING_SETTINGS,
    "Privacy and attacks": ("privacy", "epsilon", "aggregation", "fairness", "secure", "attack"),
    "Uneven clients": ("system", "late"),
    "Evaluation": tuple(f"evaluate_{name}" for name in Evaluation.model_fields),
    "Execution": (
        *("device", "stack", "engine", "address", "workers", "deadline", "states", "checkpoint_every", "observe_every"),
        *("observe_limit", "on_failure", "track", "debug"),
    ),
}
# Of a whole experiment:
RUN_GROUPS = ("Data", "Model", "Training", "Evaluation", "Privacy and attacks", "Uneven clients", "Execution")
SHORT = {
    f"evaluate_{name}": f"--{name.replace('_', '-')}"
    for name in ("fine_tune", "choose", "metric", "metrics", "patience")
}
# What stands for the value of a setting in the help, where the type does not say enough.
VALUES = {
    "data": "NAME|PATH", "data_dir": "DIR", "partition": "HOW", "label_column": "COLUMN", "client_column": "COLUMN",
    "group": "COLUMN", "split_column": "COLUMN", "columns": "NAME=KIND,…", "separator": "CHARACTER",
    "decimal": "CHARACTER", "encoding": "NAME", "model": "NAME", "head": "N|NAMES", "weights": "FILE",
    "frozen": "NAMES", "lora": "RANK", "loss": "NAME", "participation": "WHO", "schedule": "RULE",
    "step_schedule": "RULE", "class_weights": "HOW", "augment": "HOW", "batch": "N|full", "evaluate_metric": "NAME",
    "evaluate_clients": "N|all|participants|new",
    "evaluate_metrics": "NAME=MODULE:FUNCTION,…",
    "privacy": "HOW", "epsilon": "X|inf", "aggregation": "RULE", "fairness": "RULE", "attack": "KIND", "device": "NAME",
    "stack": "N|auto", "system": "PARTS|FILE", "late": "RULE",
    "address": "HOST:PORT", "track": "NAME,…",
}  # fmt: skip

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        rich_help_panel="Method",
        autocompletion=setting_names,
        help="a parameter of the methods that have it, or any setting",
    ),
]

TunedFrom = Annotated[
    str | None,
    typer.Option(
        "--settings",
        metavar="tuned:NAME|DIR|FILE",
        rich_help_panel="Method",
        autocompletion=tuned_settings,
        help="each method's settings as `tune` chose them: those that come with fedtailor (`fedtailor settings` lists "
        "them), or yours",
    ),
]


ComparisonWords = Annotated[
    list[str],
    typer.Argument(
        metavar="METHOD|FILE.toml", help="methods, or one file with a comparison", autocompletion=methods_and_files
    ),
]


def out_directory(help: str) -> Any:
    """The option --out of a command that has one directory for its record."""
    return typer.Option("--out", metavar="DIR", help=help, rich_help_panel="Output")


def experiment_options(*groups: str, without: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these groups of options; it gets those that were used as the dictionary `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        taken = {p.name for p in own} | {without}
        names = [(name, group) for group in groups for name in GROUPS[group] if name not in taken]
        added = [option for name, group in names for option in _options(name, group)]

        def wrapped(**values: Any) -> None:
            used = {option.name: values.pop(option.name) for option in added}
            settings = {name: False if used.get(f"no_{name}") else used[name] for name, _ in names}
            command(settings=in_sections({k: v for k, v in settings.items() if v is not None}), **values)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *added)]
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapped

    return decorate


def _options(name: str, group: str) -> list[inspect.Parameter]:
    """Make the option of a setting, and for a flag its opposite, which is hidden: a column for opposites in the help
    leaves too little of a page of 80 columns for the rest. No option has a default of its own: that is left to the
    experiment file, or the experiment."""
    field = (
        Evaluation.model_fields[name.removeprefix("evaluate_")]
        if group == "Evaluation"
        else Experiment.model_fields[name]
    )
    flag = "--" + name.replace("_", "-")
    panel = TABLE if name in OF_TABLES else group
    shown: dict[str, Any] = {"help": _help(field), "rich_help_panel": panel}
    if field.annotation is bool:
        opposite = typer.Option(f"--no-{flag[2:]}", hidden=True)
        both = {name: typer.Option(flag, **shown), f"no_{name}": opposite}
        return [_parameter(each, Annotated[bool | None, option]) for each, option in both.items()]
    flags = [SHORT[name], flag] if name in SHORT else [flag]
    shown |= {"metavar": VALUES.get(name) or _values(field)}
    shown |= {"autocompletion": from_names(words) if (words := choices(field)) else completer_of(name)}
    return [_parameter(name, Annotated[str | None, typer.Option(*flags, **shown)])]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _values(field: FieldInfo) -> str:
    kinds = {field.annotation, *get_args(field.annotation)}
    return "|".join(choices(field)) or ("N" if int in kinds else "X")


def choices(field: FieldInfo) -> list[str]:
    """List the words that a setting may be."""
    named = [value for kind in (field.annotation, *get_args(field.annotation)) for value in get_args(kind)]
    return [value for value in dict.fromkeys(named) if isinstance(value, str)]


def _help(field: FieldInfo) -> str:
    default = field.get_default()
    shown = field.annotation is not bool and default is not None
    return escape(f"{field.description}" + (f" [{default}]" if shown else ""))


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Read `name=value` pairs, each value as TOML would read it, or else as text."""
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise FedtailorError(f"--set takes name=value, not {shown(assignment)}.")
        try:
            value = parse_toml(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        parsed[name.strip()] = value
    return parsed


def check_assignment(name: str, parameters: set[str], what: list[str]) -> None:
    """Refuse a name in --set that is neither a parameter of the methods nor a setting."""
    settings = [*SETTING_NAMES, *(f"evaluation.{field}" for field in Evaluation.model_fields)]
    if name in parameters or name in settings or name.startswith("parameters."):
        return
    near = get_close_matches(name, [*parameters, *settings], n=1, cutoff=0.5)
    own = f"has the parameters {', '.join(sorted(parameters))}" if parameters else "has no parameters"
    hint = f"did you mean {near[0]!r}?" if near else f"{' or '.join(what)} {own}, and the settings are in run --help."
    raise FedtailorError(f"There is no parameter or setting {name!r}: {hint}")


def with_assignments(
    settings: dict[str, Any], assignments: dict[str, Any], parameters: Container[str]
) -> dict[str, Any]:
    """Put what --set names over settings: what is a parameter of the method, or has a section, into that section."""
    for name, value in assignments.items():
        section, _, inner = name.rpartition(".")
        own = section or ("parameters" if name in parameters else "")
        settings = merged(settings, {own: {inner: value}} if own else in_sections({name: value}))
    return settings

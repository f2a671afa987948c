"""Settings that a tuning chose for each method: those that come with fedtailor, and those of a file.

`NAME.toml` here is the `tuned.toml` that `fedtailor tune` wrote on one federation, below a comment that says which.
Of a tuning only the methods' own settings and parameters are taken: data, rounds and the rest of it never are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor._common.toml import parse_toml
from fedtailor.experiment import Experiment, in_sections, read_experiment

Settings = dict[str, Any]
SHIPPED = "tuned:"  # before the name of settings that come with fedtailor
FILE = "tuned.toml"  # in a tuning's directory
A_START = (
    "So few trials, on one seed, are a start, not the best; where other seeds did not confirm them, they are defaults."
)


@dataclass(frozen=True)
class TunedSettings:
    """The settings that a tuning chose, with the data that it chose them on."""

    source: str  # tuned:NAME, or a path
    about: str  # the data in words; "" if the file does not say
    content: Settings  # the file: a comparison

    @property
    def methods(self) -> list[str]:
        named = self.content.get("methods")
        return [str(method) for method in named] if isinstance(named, list) else []

    @property
    def how(self) -> str | None:
        """The budget and the seeds, like "10 trials a method, seed 0"."""
        return None if self.content.get("tuned") is None else str(self.content["tuned"])

    @property
    def tuned(self) -> str | None:
        """The source and the budget, as a comparison that takes the settings records them."""
        return f"{self.source} ({self.how})" if self.source.startswith(SHIPPED) else self.how

    @property
    def in_words(self) -> str:
        """Name the data that the settings were tuned on, in one line."""
        asked, counted = self.content, []
        if asked.get("clients") is not None:
            counted.append(f"{asked['clients']} clients")
        counted += [str(asked[name]) for name in ("partition", "model") if asked.get(name) is not None]
        if asked.get("rounds") is not None:
            counted.append(f"{asked['rounds']} rounds")
        return f"{self.about or Path(str(asked.get('data', ''))).stem}; {', '.join(counted)}"

    def section(self, name: str, method: str) -> Settings:
        """Return what a section of the file, `settings` or `parameters`, has for a method."""
        sections = self.content.get(name, {})
        own = sections.get(method, {}) if isinstance(sections, Mapping) else None
        if not isinstance(own, Mapping):
            raise FedtailorError(f"{self.source} is no tuning: its {name} must stand in sections, [{name}.METHOD].")
        return dict(own)

    def of(self, method: str) -> Settings:
        """Return a method's settings and parameters, side by side: `fedtailor.run(method, **settings)` takes them."""
        self.check([method])
        return {**self.section("settings", method), **self.section("parameters", method)}

    def check(self, methods: Sequence[str], optimizer: Any = None) -> None:
        """Refuse methods that were not tuned, and learning rates that were tuned for another optimizer."""
        for method in methods:
            if method not in self.methods:
                raise FedtailorError(f"{self.source} has no settings of {method}: tune it too, or leave it out.")
        default = Experiment.model_fields["optimizer"].default
        there, here = self.content.get("optimizer") or default, optimizer or default
        if there != here and any("lr" in self.section("settings", method) for method in methods):
            raise FedtailorError(
                f"{self.source} has learning rates of --optimizer {there}, and they do not suit {here}: give "
                f"--optimizer {there}, or other settings."
            )


def names() -> list[str]:
    """List the names of all settings that come with fedtailor."""
    found = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def shipped(name: str) -> TunedSettings:
    """Find settings that come with fedtailor, by name."""
    if name not in names():
        raise unknown("tuning that comes with fedtailor", name, names())
    text = (files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
    about = text.splitlines()[0].removeprefix("#").strip() if text.startswith("#") else ""
    return TunedSettings(f"{SHIPPED}{name}", about, in_sections(parse_toml(text)))


def find_settings(source: str | Path) -> TunedSettings:
    """Find settings by `tuned:NAME`, or read those of a tuning's directory or file."""
    text = str(source)
    if text.startswith(SHIPPED):
        return shipped(text.removeprefix(SHIPPED))
    path = Path(source)
    if text in names() and not path.exists():
        raise FedtailorError(f"There is no tuning {text}: did you mean {SHIPPED}{text}?")
    return TunedSettings(text, "", read_experiment(path / FILE if path.is_dir() else path))


def with_settings(asked: Settings, found: TunedSettings, methods: Sequence[str]) -> Settings:
    """Put the methods' settings into a comparison. What it has for a method itself comes first."""
    found.check(methods, asked.get("optimizer"))
    for name in ("parameters", "settings"):
        before = asked.get(name, {})
        if isinstance(before, Mapping) and all(isinstance(own, Mapping) for own in before.values()):
            own = {method: {**found.section(name, method), **before.get(method, {})} for method in methods}
            asked = {**asked, name: {method: values for method, values in own.items() if values}}
    return {**asked, "tuned": found.tuned}


def for_run(given: Mapping[str, Any], found: TunedSettings, method: str) -> Settings:
    """Put a method's settings into those of an experiment. Parameters that are given come first; a setting that is
    given and was tuned is refused."""
    found.check([method], given.get("optimizer"))
    own, parameters = found.section("settings", method), given.get("parameters", {})
    refuse_twice(method, own, in_sections(given))
    if isinstance(parameters, Mapping):
        parameters = {**found.section("parameters", method), **parameters}
    return {**given, **own, "parameters": parameters}


def tuned_in_words(tuned: str) -> str:
    """Say below a table how its settings were chosen."""
    if tuned.startswith(SHIPPED):
        return f"Settings: tuned on {tuned.removeprefix(SHIPPED)}. {A_START}"
    return f"Settings chosen on validation data ({tuned})."


def refuse_twice(method: str, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a setting for all methods where one has it among its own."""
    section = given.get("evaluation", {})
    beside = {**given, **section} if isinstance(section, Mapping) else given
    for name in (name for name in own if beside.get(name) is not None):
        raise FedtailorError(
            f"{name} is {own[name]} for {method} by its own settings: leave --{name.replace('_', '-')} out, or those."
        )

"""Values that the shell offers behind Tab. It waits for the answer, so nothing here imports PyTorch: names come from
files, or stand here and are held to the catalogues by a test."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

PACKAGE = Path(__file__).parents[1]
DATA = (
    "digits", "synthetic", "digit-4", "mnist", "fashion-mnist", "emnist", "cifar-10", "cifar-100", "pathmnist",
    "dermamnist", "octmnist", "pneumoniamnist", "chestmnist", "retinamnist", "breastmnist", "bloodmnist", "tissuemnist",
    "organamnist", "organcmnist", "organsmnist", "omniglot", "watch", "nlschools", "star", "insteval",
)  # fmt: skip
MODELS = ("mlp", "logistic", "cnn", "lenet", "pflego-cnn", "omniglot-cnn", "resnet", "gru", "cnn1d", "transformer")
PARTITIONS = (
    *("iid", "dirichlet:", "dirichlet-plain:", "classes:", "classes-random:", "pairs", "quantity:", "natural"),
)
BEFORE = "_FEDTAILOR_BEFORE"  # in the environment: what bash has cut off the word that is completed
Completer = Callable[[str], list[str]]


def from_names(names: Iterable[str]) -> Completer:
    """Offer these names."""

    def complete(incomplete: str) -> list[str]:
        return offered(names)

    return complete


def offered(names: Iterable[str]) -> list[str]:
    """Leave out of each name what bash takes for words before it, like `tuned:`."""
    before = os.environ.get(BEFORE, "")
    return [name.removeprefix(before) for name in names if name.startswith(before)]


def _methods() -> list[str]:
    texts = (file.read_text(encoding="utf-8") for file in (PACKAGE / "methods").glob("[!_]*.py"))
    return sorted(name for text in texts for name in re.findall(r'^    name: ClassVar\[str\] = "(.+)"$', text, re.M))


def methods(incomplete: str) -> list[str]:
    return offered(_methods())


def methods_and_files(incomplete: str) -> list[str]:
    return offered([*_methods(), *_files(incomplete, ".toml")])


def _files(incomplete: str, ending: str) -> list[str]:
    """List the files with this ending beside the path that is being typed, and the directories that lead to others."""
    folder = os.path.dirname(incomplete)
    found = sorted(Path(folder or ".").glob("*"))
    paths = [os.path.join(folder, path.name) + "/" * path.is_dir() for path in found]
    return [path for path in paths if path.endswith(ending) or (folder and path.endswith("/"))]


def presets(incomplete: str) -> list[str]:
    """Offer tables and figures, and their columns where each is a run of its own."""
    import tomllib

    names: list[str] = []
    for file in sorted((PACKAGE / "studies" / "presets").glob("*.toml")):
        tables = tomllib.loads(file.read_text(encoding="utf-8")).items()
        for name, table in tables:
            if isinstance(table, dict) and "columns" in table:
                names.append(f"{file.stem}/{name}")
                if not (table.get("domains") or table["measure"] in ("correlation", "pairs")):
                    names += [f"{file.stem}/{name}-{column}" for column in table["columns"]]
    return offered(names)


def tuned_settings(incomplete: str) -> list[str]:
    return offered(f"tuned:{file.stem}" for file in sorted((PACKAGE / "experiment" / "tuned").glob("*.toml")))


def setting_names(incomplete: str) -> list[str]:
    """Offer `name=` of every setting; a method's own parameters would take PyTorch."""
    from fedtailor.experiment import SETTING_NAMES

    return offered(f"{name}=" for name in SETTING_NAMES)


def runs(incomplete: str) -> list[str]:
    """Offer directories of runs."""
    return offered(_directories("experiment.toml"))


def runs_and_comparisons(incomplete: str) -> list[str]:
    return offered([*_directories("experiment.toml"), *_directories("comparison.toml")])


def _directories(file: str) -> list[str]:
    """List the directories with this file, down to those of a comparison: comparisons/NAME/runs/NAME."""
    levels = ("*", "*/*", "*/*/*", "*/*/*/*")
    return sorted(str(path.parent) for level in levels for path in Path().glob(f"{level}/{file}"))


def completer_of(name: str) -> Completer | None:
    """Find what is offered for a setting that is no choice of fixed words; None: files."""
    from fedtailor.experiment import aggregation_rule, attack
    from fedtailor.training.metrics import METRICS

    known: dict[str, Iterable[str]] = {
        "data": DATA,
        "model": MODELS,
        "partition": PARTITIONS,
        "evaluate_metric": METRICS,
        "aggregation": get_args(aggregation_rule.Kind),
        "attack": get_args(attack.Kind),
        "fairness": ("none", "q:", "afl:"),
        "loss": ("cross-entropy", "mse", "bce"),
        "device": ("cpu", "cuda", "mps", "auto"),
        "privacy": ("client", "sample"),
        "participation": ("all", "independent:"),
        "track": ("mlflow", "wandb", "tensorboard"),
    }
    return from_names(known[name]) if name in known else None


def mend_bash_words() -> None:
    """Put together the words that bash cuts at `:` and `=`: `tuned:dig` comes as three, and the last is completed."""
    if "COMP_WORDS" not in os.environ or not os.environ.get("COMP_CWORD", "").isdecimal():
        return
    words = os.environ["COMP_WORDS"].split("\n" if "\n" in os.environ["COMP_WORDS"] else " ")
    whole: list[str] = []
    cut = False
    for word in words[: int(os.environ["COMP_CWORD"]) + 1]:
        separator = bool(re.fullmatch("[:=]+", word))
        if whole and (separator or cut):
            whole[-1] += word
        else:
            whole.append(word)
        cut = separator
    if len(whole) > 1 and (option := re.fullmatch("(--[^=]+)=(.*)", whole[-1])):
        whole[-1:] = option.groups()
    before = re.match(".*[:=]|", whole[-1])[0] if whole else ""  # type: ignore[index]
    whole[-1:] = [word.removeprefix(before) for word in whole[-1:]]
    os.environ |= {"COMP_WORDS": "\n".join(whole), "COMP_CWORD": str(len(whole) - 1), BEFORE: before}

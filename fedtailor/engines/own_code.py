"""Code of the user's own in an experiment: names in place of objects, and whose code is run.

An object is written down as `module:name` where an import finds it, or as `object:name` where only Python can pass it
again.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedtailor._common.errors import FedtailorError, listed
from fedtailor._common.imports import GIVEN, object_name
from fedtailor._common.toml import written_again
from fedtailor.data.assignments import names_code
from fedtailor.data.sources import names_code as data_names_code
from fedtailor.engines.preparation import Objects
from fedtailor.experiment import Experiment
from fedtailor.method import Method
from fedtailor.methods import CATALOGUE, check_class
from fedtailor.models import CATALOGUE as NETWORKS


def names_and_objects(data: Any, model: Any, loss: Any, metric: Any = None) -> tuple[dict[str, Any], Objects]:
    """Return the names of data, model, loss and metric for an experiment, and those of them that are objects."""
    names: dict[str, Any] = {}
    objects = Objects()
    given = {"data": str(data) if isinstance(data, Path) else data, "model": model, "loss": loss}
    for name, value in (given if metric is None else {**given, "metric": metric}).items():
        if value is None or isinstance(value, (int, float)):
            raise FedtailorError(
                f"{name}={value!r} is not understood: give a name or an object (see help(fedtailor.run))."
            )
        if not isinstance(value, str):
            setattr(objects, name, value)
        names[name] = value if isinstance(value, str) else object_name(value)
    return names, objects


def named_settings(settings: Mapping[str, Any], objects: Objects) -> dict[str, Any]:
    """Return settings with names in place of the functions among them, which become `objects`."""
    named = dict(settings)
    if callable(partition := settings.get("partition")):
        objects.partition, named["partition"] = partition, object_name(partition)
    if isinstance(metrics := settings.get("metrics"), Mapping):
        own = {name: metric for name, metric in metrics.items() if callable(metric)}
        objects.metrics = own or None
        named["metrics"] = {**metrics, **{name: object_name(metric) for name, metric in own.items()}}
    return named


def method_name(kind: type[Method]) -> str:
    """The name under which the class of a method is found again."""
    return kind.name if CATALOGUE.get(kind.name) is kind else object_name(kind)


def importable_name(method: Any) -> Any:
    """The name of a method that many runs can find again."""
    if isinstance(method, Method):
        kind = type(method).__name__
        raise FedtailorError(f"Give the class {kind}, not an object of it, and its parameters in method_parameters=.")
    if not isinstance(method, type):
        return method
    name = method_name(check_class(method, method.__name__))
    if name.startswith("object:"):
        where = "is inside a function" if "<" in method.__qualname__ else "is not what its module has by this name"
        raise FedtailorError(f"The class {method.__name__} {where}: move it out, where it can be imported.")
    return name


def written_parameters(method: Method) -> dict[str, Any]:
    """A method's parameters as an experiment file holds them; refuses what would come back as something else."""
    parameters = method.model_dump(exclude_none=True)
    again = written_again({"parameters": parameters})
    try:
        same = again is not None and type(method)(**again.get("parameters", {})) == method
    except ValidationError:
        same = False
    if not same or any(isinstance(value, dict) for value in parameters.values()):
        raise FedtailorError(
            f"The parameters of {type(method).__name__} cannot be written to an experiment file: give numbers, texts, "
            "and lists of these."
        )
    return parameters


def check_objects(path: Path, experiment: Experiment, objects: Objects, trust: bool) -> None:
    """A run that was given objects needs them again, and the same ones as far as that can be seen. Code that it names
    is run if the caller passes it or trusts it: a run directory may be anybody's."""
    passed, known = objects.by_kind(), _recorded(experiment)
    for kind in passed.keys() - known.keys():
        raise FedtailorError(f"The run in {path} has no {kind}: leave it out.")
    for kind, recorded in known.items():
        given, argument = passed.get(kind), "metrics" if " " in kind else kind
        if isinstance(given, Method):
            if method_name(type(given)) != recorded or written_parameters(given) != experiment.parameters:
                raise FedtailorError(f"This is not the run's method: that is {recorded} with {experiment.parameters}.")
        elif given is not None and (kind != "data" or callable(given)) and object_name(given) != recorded:
            raise FedtailorError(f"This is not the run's {kind}: that is {recorded or 'not set'}.")
        elif given is not None and kind == "data" and not callable(given) and not recorded.startswith("object:"):
            raise FedtailorError(f"The run's data have a name ({recorded}): leave data= out.")
        if recorded.startswith(GIVEN) and given is None:
            raise FedtailorError(
                f"This run got its {kind} as a Python object ({recorded}): pass {argument}= to resume it."
            )
    if strange := [f"{kind} {name}" for kind, name in named_code(experiment).items() if kind not in passed]:
        refuse_code(path, strange, trust)


def refuse_code(path: Path, code: list[str], trust: bool) -> None:
    """Refuse a run directory that names this code, unless the caller trusts it."""
    if not trust:
        raise FedtailorError(
            f"The run in {path} names code of its own ({', '.join(code)}): if you trust it, say --trust (trust=True "
            "in Python), or pass the object."
        )


def _recorded(experiment: Experiment) -> dict[str, str]:
    """The names of all that may be an object."""
    protocol = experiment.evaluation
    names = {kind: getattr(experiment, kind) for kind in ("data", "method", "model", "loss")}
    names |= {"metric": protocol.metric}
    names |= {f"metric {name}": metric for name, metric in (protocol.metrics or {}).items()}
    return names | {"partition": experiment.partition or ""}


def named_code(experiment: Experiment) -> dict[str, str]:
    """The code that an experiment names: `module:name` in place of a name of the catalogue."""
    names = {kind: name for kind, name in _recorded(experiment).items() if ":" in name}
    catalogues: dict[str, Callable[[str], bool]] = {
        "data": lambda name: not data_names_code(name, experiment.data_dir),
        "model": lambda name: name.partition(":")[0] in NETWORKS,
        "partition": lambda name: not names_code(name),
    }
    return {kind: name for kind, name in names.items() if kind not in catalogues or not catalogues[kind](name)}


def only_in_python(experiments: Iterable[Experiment]) -> str:
    """Name the objects in these experiments that no import finds, as a sentence for the record; "" for none."""
    recorded = [item for experiment in experiments for item in _recorded(experiment).items()]
    found = ((kind, *name.partition(":")) for kind, name in recorded if name.startswith(GIVEN))
    given = dict.fromkeys(f"the {kind} {how}:{name.rpartition('<locals>.')[2]}" for kind, how, _, name in found)
    if not given:
        return ""
    return f"Only the Python program of this can go on, by the same call: no import finds {listed(list(given))}."

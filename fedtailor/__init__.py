"""fedtailor: a model tailored to every client, learned together, with the data staying where it is.

Everything public is here; what a module has beside it may change.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedtailor._common.version import __version__

__all__ = [
    "Client",
    "ClientFailure",
    "ClientNote",
    "Dataset",
    "Each",
    "Evaluation",
    "Experiment",
    "FedtailorError",
    "Mean",
    "Message",
    "Method",
    "Network",
    "RunResult",
    "Server",
    "Total",
    "TrackedRun",
    "Tracker",
    "__version__",
    "adapt",
    "advise",
    "compare",
    "export",
    "federate",
    "histogram",
    "lazy",
    "leak",
    "load",
    "load_data",
    "load_model",
    "predict",
    "report",
    "reproduce",
    "resume",
    "run",
    "tune",
]

if TYPE_CHECKING:
    from fedtailor._common.errors import ClientFailure, ClientNote, FedtailorError
    from fedtailor.attacks.study import leak
    from fedtailor.data import Dataset, federate, lazy
    from fedtailor.data import load as load_data
    from fedtailor.engines.result import RunResult
    from fedtailor.engines.runs import load, resume, run
    from fedtailor.engines.trackers import TrackedRun, Tracker
    from fedtailor.experiment import Evaluation, Experiment
    from fedtailor.method import Client, Each, Mean, Message, Method, Server, Total
    from fedtailor.model_files.adaptation import adapt
    from fedtailor.model_files.exports import export
    from fedtailor.model_files.format import load_model
    from fedtailor.model_files.prediction import predict
    from fedtailor.reporting.functions import advise, compare, histogram, report, reproduce, tune
    from fedtailor.training.network import Network

_HOMES = {
    "reporting.functions": ("advise", "compare", "histogram", "report", "reproduce", "tune"),
    "data": ("Dataset", "federate", "lazy"),
    "model_files.adaptation": ("adapt",),
    "model_files.exports": ("export",),
    "model_files.format": ("load_model",),
    "model_files.prediction": ("predict",),
    "_common.errors": ("ClientFailure", "ClientNote", "FedtailorError"),
    "experiment": ("Evaluation", "Experiment"),
    "attacks.study": ("leak",),
    "engines.trackers": ("TrackedRun", "Tracker"),
    "training.network": ("Network",),
    "method": ("Client", "Each", "Mean", "Message", "Method", "Server", "Total"),
    "engines.result": ("RunResult",),
    "engines.runs": ("load", "resume", "run"),
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: importing the package, and so `fedtailor --help`, does not wait for PyTorch."""
    if name == "load_data":
        return importlib.import_module("fedtailor.data").load
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedtailor.{home}"), name)
    raise AttributeError(f"module 'fedtailor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

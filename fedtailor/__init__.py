"""fedtailor: a model tailored to every client, learned together, with the data staying where it is.

Everything public is here; what a module has beside it may change.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fedtailor.version import __version__

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
    "__version__",
    "adapt",
    "advise",
    "compare",
    "export",
    "federate",
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
    from fedtailor.api import advise, compare, report, reproduce, tune
    from fedtailor.data import Dataset, federate, lazy
    from fedtailor.data import load as load_data
    from fedtailor.deploy.adapting import adapt
    from fedtailor.deploy.exporting import export
    from fedtailor.deploy.model_file import load_model
    from fedtailor.deploy.predicting import predict
    from fedtailor.errors import FedtailorError
    from fedtailor.experiment import Evaluation, Experiment
    from fedtailor.leakage.asking import leak
    from fedtailor.local.network import Network
    from fedtailor.method import Client, Each, Mean, Message, Method, Server, Total
    from fedtailor.result import RunResult
    from fedtailor.runs import load, resume, run
    from fedtailor.server.loop import ClientFailure, ClientNote

_HOMES = {
    "api": ("advise", "compare", "report", "reproduce", "tune"),
    "data": ("Dataset", "federate", "lazy"),
    "deploy.adapting": ("adapt",),
    "deploy.exporting": ("export",),
    "deploy.model_file": ("load_model",),
    "deploy.predicting": ("predict",),
    "errors": ("FedtailorError",),
    "experiment": ("Evaluation", "Experiment"),
    "leakage.asking": ("leak",),
    "local.network": ("Network",),
    "method": ("Client", "Each", "Mean", "Message", "Method", "Server", "Total"),
    "result": ("RunResult",),
    "runs": ("load", "resume", "run"),
    "server.loop": ("ClientFailure", "ClientNote"),
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

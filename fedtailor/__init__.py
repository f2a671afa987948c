"""fedtailor: a model tailored to every client, learned together, with the data staying where it is."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ClientFailure",
    "Dataset",
    "Evaluation",
    "Experiment",
    "FedtailorError",
    "Message",
    "Method",
    "Network",
    "Replies",
    "RunResult",
    "Server",
    "adapt",
    "export",
    "load",
    "load_model",
    "predict",
    "resume",
    "run",
]

if TYPE_CHECKING:
    from fedtailor.api import RunResult, load, resume, run
    from fedtailor.data import Dataset
    from fedtailor.deploy.adapting import adapt
    from fedtailor.deploy.exporting import export
    from fedtailor.deploy.model_file import load_model
    from fedtailor.deploy.predicting import predict
    from fedtailor.errors import FedtailorError
    from fedtailor.experiment import Evaluation, Experiment
    from fedtailor.local.network import Network
    from fedtailor.method import Client, Message, Method, Replies, Server
    from fedtailor.server.loop import ClientFailure

_HOMES = {
    "deploy.adapting": ("adapt",),
    "api": ("RunResult", "load", "resume", "run"),
    "data": ("Dataset",),
    "errors": ("FedtailorError",),
    "experiment": ("Evaluation", "Experiment"),
    "deploy.exporting": ("export",),
    "server.loop": ("ClientFailure",),
    "local.network": ("Network",),
    "method": ("Client", "Message", "Method", "Replies", "Server"),
    "deploy.model_file": ("load_model",),
    "deploy.predicting": ("predict",),
}


def __getattr__(name: str) -> Any:
    """Loaded on first use: importing the package, and so `fedtailor --help`, does not wait for PyTorch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedtailor.{home}"), name)
    raise AttributeError(f"module 'fedtailor' has no attribute {name!r}")

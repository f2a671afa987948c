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
    from fedtailor.adapting import adapt
    from fedtailor.api import RunResult, load, resume, run
    from fedtailor.data import Dataset
    from fedtailor.errors import FedtailorError
    from fedtailor.experiment import Evaluation, Experiment
    from fedtailor.exporting import export
    from fedtailor.federation.rounds import ClientFailure
    from fedtailor.learning.network import Network
    from fedtailor.method import Client, Message, Method, Replies, Server
    from fedtailor.model_file import load_model
    from fedtailor.predicting import predict

_HOMES = {
    "adapting": ("adapt",),
    "api": ("RunResult", "load", "resume", "run"),
    "data": ("Dataset",),
    "errors": ("FedtailorError",),
    "experiment": ("Evaluation", "Experiment"),
    "exporting": ("export",),
    "federation.rounds": ("ClientFailure",),
    "learning.network": ("Network",),
    "method": ("Client", "Message", "Method", "Replies", "Server"),
    "model_file": ("load_model",),
    "predicting": ("predict",),
}


def __getattr__(name: str) -> Any:
    """Loaded on first use: importing the package, and so `fedtailor --help`, does not wait for PyTorch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedtailor.{home}"), name)
    raise AttributeError(f"module 'fedtailor' has no attribute {name!r}")

"""Data: data sets as their authors publish them or as the user has them, partitioned among a federation's clients."""

from collections.abc import Callable
from typing import Any

from fedtailor.data.arrays import Clients, from_list
from fedtailor.data.assignments import Assignment
from fedtailor.data.client_data import ClientData, FederatedData, Join
from fedtailor.data.dataset import DataInfo, Dataset, data_dir, found
from fedtailor.data.federation import federate
from fedtailor.data.large import lazy
from fedtailor.data.partitions import partitions_catalogue
from fedtailor.data.sources import catalogue, load

DataObject = Dataset | Clients | Callable[[], Any]  # in place of a name; a function returns one of the others

__all__ = [
    "Assignment",
    "ClientData",
    "Clients",
    "DataInfo",
    "DataObject",
    "Dataset",
    "FederatedData",
    "Join",
    "catalogue",
    "data_dir",
    "federate",
    "found",
    "from_list",
    "lazy",
    "load",
    "partitions_catalogue",
]

"""Data: data sets as their authors publish them or as the user has them, partitioned among a federation's clients."""

from fedtailor.data.arrays import Clients, from_list
from fedtailor.data.dataset import Dataset
from fedtailor.data.federated import ClientData, FederatedData, Join
from fedtailor.data.federating import federate
from fedtailor.data.info import DataInfo, data_dir, found
from fedtailor.data.large import lazy
from fedtailor.data.loading import catalogue, load
from fedtailor.data.partitions import partitions_catalogue

__all__ = [
    "ClientData",
    "Clients",
    "DataInfo",
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

"""Data: data sets as their authors publish them or as the user has them, dealt to a federation's clients."""

from .arrays import from_list
from .dataset import Dataset
from .federated import FederatedData, federate
from .info import DataInfo, data_dir, found
from .loading import catalogue, load
from .partitions import partitions_catalogue

__all__ = [
    "DataInfo",
    "Dataset",
    "FederatedData",
    "catalogue",
    "data_dir",
    "federate",
    "found",
    "from_list",
    "load",
    "partitions_catalogue",
]

"""The catalogue of methods, one file a method.

A method of your own is a subclass of `Method` anywhere, passed as an object or named as `module:Class`.
"""

from typing import Any

from pydantic import ValidationError

from fedtailor._common.errors import FedtailorError, shown, unknown, wanted
from fedtailor._common.imports import import_object
from fedtailor.method import Method
from fedtailor.methods.apfl import APFL
from fedtailor.methods.cfl import CFL
from fedtailor.methods.composition import compose
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedacs import FedACS
from fedtailor.methods.fedala import FedALA
from fedtailor.methods.fedamp import FedAMP
from fedtailor.methods.fedas import FedAS
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.fedbn import FedBN
from fedtailor.methods.fedcac import FedCAC
from fedtailor.methods.fedcp import FedCP
from fedtailor.methods.feddbe import FedDBE
from fedtailor.methods.feddyn import FedDyn
from fedtailor.methods.fedem import FedEM
from fedtailor.methods.fedfomo import FedFomo
from fedtailor.methods.fedlc import FedLC
from fedtailor.methods.fednova import FedNova
from fedtailor.methods.fedntd import FedNTD
from fedtailor.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedtailor.methods.fedpac import FedPAC
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedproto import FedProto
from fedtailor.methods.fedprox import FedProx
from fedtailor.methods.fedrecon import FedRecon
from fedtailor.methods.fedrep import FedRep
from fedtailor.methods.fedrod import FedRoD
from fedtailor.methods.gpfl import GPFL
from fedtailor.methods.ifca import IFCA
from fedtailor.methods.knn_per import KNNPer
from fedtailor.methods.lg_fedavg import LGFedAvg
from fedtailor.methods.local import Local
from fedtailor.methods.moon import MOON
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.methods.pfedfda import PFedFDA
from fedtailor.methods.pfedgraph import PFedGraph
from fedtailor.methods.pfedmb import PFedMB
from fedtailor.methods.pfedme import PFedMe
from fedtailor.methods.pfedsim import PFedSim
from fedtailor.methods.pflego import PFLEGO
from fedtailor.methods.pgfed import PGFed
from fedtailor.methods.pgfed_ce import PGFedCE
from fedtailor.methods.pgfedmo import PGFedMo
from fedtailor.methods.scaffold import SCAFFOLD

METHODS = (
    *(Local, FedAvg, FedAvgFT),  # the two ends: alone, and all as one; and the way between
    *(FedProx, FedDyn, SCAFFOLD, MOON, FedNova, FedLC, FedNTD),  # one global model
    *(FedAvgM, FedAdagrad, FedYogi, FedAdam),  # FedAvg with an optimiser at the server
    *(PGFed, PGFedMo, PGFedCE, PFedMB, FedACS, PFLEGO),  # the four papers' systems
    *(FedPer, LGFedAvg, FedRep, FedBABU, FedRoD, FedRecon, FedBN, FedAS, FedCP),  # some layers shared, others not
    *(FedProto, FedPAC, PFedFDA, GPFL),  # means or embeddings of each class
    *(Ditto, PFedMe, APFL, PerFedAvg, FedALA, FedDBE, KNNPer),  # a personal model beside or from the global one
    *(IFCA, CFL, FedEM, FedAMP, FedFomo, PFedSim, PFedGraph, FedCAC),  # clients that help each other
)
CATALOGUE: dict[str, type[Method]] = {method.name: method for method in METHODS}


def all_methods() -> dict[str, Method]:
    """Make every method by name, with its defaults."""
    return {name: kind() for name, kind in CATALOGUE.items()}


def find_method(name: str, parameters: dict[str, Any] | None = None) -> Method:
    """Make the method of this name (or `module:Class`) with these hyper-parameters."""
    return make_method(method_class(name), name, parameters)


def method_class(name: str) -> type[Method]:
    """Find the class of the method of this name (or `module:Class`), or of the composition `A+B`."""
    if "+" in name:
        outer, _, inner = name.partition("+")
        return compose(method_class(outer.strip()), method_class(inner.strip()))
    if ":" in name:
        return check_class(import_object(name, "method"), name)
    if name not in CATALOGUE:
        raise unknown("method", name, CATALOGUE)
    return CATALOGUE[name]


def command_title(name: str) -> str:
    """Name a method as commands do: by its name, or a `module:Class` by its title, for which it is imported."""
    return method_class(name).title if ":" in name else name


def method_title(name: str) -> str:
    """Write a method's name as its paper does. A `module:Class` is called by its class, which is not imported."""
    if "+" in name:
        return " + ".join(map(method_title, name.split("+")))
    return CATALOGUE[name].title if name in CATALOGUE else name.partition(":")[2] or name


def check_class(found: Any, name: str) -> type[Method]:
    """Refuse what is not the class of a method that can train."""
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise FedtailorError(f"{name} is not a method: it must be a subclass of fedtailor.Method.")
    if found.train is Method.train:
        raise FedtailorError(f"The method {name} has no function train: every method needs one.")
    return found


def make_method(kind: type[Method], name: str, parameters: dict[str, Any] | None = None) -> Method:
    """Make a method of this class, which errors call by this name."""
    try:
        return kind(**(parameters or {}))
    except ValidationError as error:
        raise _parameter_error(name, kind, error) from None


def _parameter_error(name: str, kind: type[Method], error: ValidationError) -> FedtailorError:
    first = error.errors()[0]
    if not first["loc"]:
        return FedtailorError(f"These parameters of {name} do not go together: {wanted(first)}.")
    parameter = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        if not kind.model_fields:
            return FedtailorError(f"The method {name} has no parameters, so {parameter!r} cannot be set.")
        return unknown(f"parameter of {name}", parameter, kind.model_fields)
    if first["type"] == "missing":
        return FedtailorError(f"The method {name} needs its parameter {parameter!r}: give it a value.")
    return FedtailorError(
        f"The parameter {parameter!r} of {name} is {shown(first['input'])}, but it must be {wanted(first)}."
    )

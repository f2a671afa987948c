"""FedAvgM, FedAdagrad, FedYogi and FedAdam: FedAvg with an optimiser at the server.

They are FedAvg under the setting `server_optimizer`, which other methods can have too; here by their names. The steps
are in `training/optimizer.py`, `server_change`.
"""

from collections.abc import Mapping
from typing import ClassVar

from fedtailor.method import Search
from fedtailor.methods.fedavg import FedAvg
from fedtailor.training.optimizer import ServerOptimizer

HSU = (
    "Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, "
    "arXiv:1909.06335, 2019"
)
REDDI = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
REFUSED = {"server_optimizer": "it has one by its name; fedavg takes any"}
SEARCH = {"server_lr": "0.001..1:log"}


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server: v ← β v + Δ, x ← x + η v for the mean change Δ (Hsu et al. 2019).

    β is 0.9. New clients: the global model. Limits: round 1 with `server_lr=1` (the default) is FedAvg's; the method is
    FedAvg with `server_optimizer="momentum"`.
    """

    name: ClassVar[str] = "fedavgm"
    paper: ClassVar[str] = HSU
    default_server_optimizer: ClassVar[ServerOptimizer] = "momentum"
    refuses: ClassVar[Mapping[str, str]] = REFUSED
    search: ClassVar[Search] = SEARCH


class FedAdagrad(FedAvg):
    """FedAvg with Adagrad at the server: v ← v + Δ², x ← x + η Δ / (√v + τ) (Reddi et al. 2021).

    τ is 0.001. New clients: the global model. Limits: the method is FedAvg with `server_optimizer="adagrad"`.
    """

    name: ClassVar[str] = "fedadagrad"
    paper: ClassVar[str] = REDDI
    default_server_optimizer: ClassVar[ServerOptimizer] = "adagrad"
    refuses: ClassVar[Mapping[str, str]] = REFUSED
    search: ClassVar[Search] = SEARCH


class FedYogi(FedAvg):
    """FedAvg with Yogi at the server: v ← v − (1−β₂) Δ² sign(v − Δ²), x ← x + η m / (√v + τ) (Reddi et al. 2021).

    m ← β₁ m + (1−β₁) Δ with β₁ = 0.9, β₂ = 0.99, τ = 0.001. New clients: the global model. Limits: the method is FedAvg
    with `server_optimizer="yogi"`.
    """

    name: ClassVar[str] = "fedyogi"
    paper: ClassVar[str] = REDDI
    default_server_optimizer: ClassVar[ServerOptimizer] = "yogi"
    refuses: ClassVar[Mapping[str, str]] = REFUSED
    search: ClassVar[Search] = SEARCH


class FedAdam(FedAvg):
    """FedAvg with Adam at the server: v ← β₂ v + (1−β₂) Δ², x ← x + η m / (√v + τ) (Reddi et al. 2021).

    m ← β₁ m + (1−β₁) Δ with β₁ = 0.9, β₂ = 0.99, τ = 0.001, without a correction of the bias. New clients: the global
    model. Limits: the method is FedAvg with `server_optimizer="adam"`.
    """

    name: ClassVar[str] = "fedadam"
    paper: ClassVar[str] = REDDI
    default_server_optimizer: ClassVar[ServerOptimizer] = "adam"
    refuses: ClassVar[Mapping[str, str]] = REFUSED
    search: ClassVar[Search] = SEARCH

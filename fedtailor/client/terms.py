"""The terms of an experiment, the same for all sites: the method, the network, how they train and evaluate; and how an
experiment describes local training: the optimiser, the loss that is minimised, and what is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.nn import functional

from fedtailor._common.errors import FedtailorError, warn
from fedtailor.data import FederatedData
from fedtailor.experiment import Experiment
from fedtailor.experiment.privacy import Privacy
from fedtailor.method import Method
from fedtailor.privacy.masks import threshold
from fedtailor.training.augmentation import Augmentation
from fedtailor.training.inputs import held, sample_shape
from fedtailor.training.metrics import ACCURACY, Metric
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings
from fedtailor.training.predictions import OwnMetric
from fedtailor.training.stack import is_dense, why_not

# Clients that train as one computation, where it is not said: on a CPU and on accelerators.
STACK_CPU, STACK_ELSEWHERE = 8, 32
SMALL_BATCH = 32  # on a CPU, the largest batch with which that is faster


@dataclass
class Terms:
    """The terms of an experiment, the same for all sites: the method, the network, how they train and evaluate."""

    method: Method
    network: Network
    initial: Tensor
    loss: Loss  # that is reported
    training_loss: Loss  # that is minimised: with label smoothing and class weights
    optimizer: OptimizerSettings
    keep_momentum: bool
    fine_tune: int  # epochs before a model is evaluated
    seed: int
    participation: float = 1.0  # the share of the clients that take part in a round on average
    schedule: str = "constant"  # of the learning rate, over so many rounds:
    rounds: int = 1
    on_train: bool = False  # measure models on the training samples too
    debug: bool = False  # let exceptions pass
    weights: str = ""  # the checksum of the file of pretrained weights
    augmentation: Augmentation | None = None  # of training images
    metric: Metric = ACCURACY  # the one that decides
    own_metric: OwnMetric | None = None  # its function, if it is the user's own and not among these:
    more_metrics: Mapping[str, OwnMetric] = field(default_factory=dict)  # of the user's own, by name
    multi_label: bool = False  # targets are labels of 0 and 1
    privacy: Privacy | None = None  # with its noise
    per_round: float = 1.0  # clients that take part in a round on average
    secure: bool = False  # uploads leave masked
    norm_bound: float | None = None  # of a change, where the site keeps it by itself
    stack: int = 1  # clients that train as one computation
    matmul_precision: str = "highest"  # of all that sites compute
    fair: bool = False  # a client declares its loss before it trains
    secret_noise: bool = False  # noise is the operating system's, and not a stream of the seed, which the server knows

    @property
    def seen_together(self) -> int:
        """The number of clients of a round of which the server sees at least the sum alone."""
        return threshold(int(self.per_round)) if self.secure else 1

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of the vector that training begins with, and of all that is frozen beside it or was loaded."""
        checksum = crc32(self.initial.cpu().numpy().data)
        for tensor in self.network.frozen_tensors():
            checksum = crc32(tensor.cpu().contiguous().numpy().data, checksum)
        checksum = crc32(self.weights.encode(), checksum)
        return f"{checksum:08x}"


def optimizer_settings(experiment: Experiment, network: Network) -> OptimizerSettings:
    """Make the settings of a local descent."""
    return OptimizerSettings(
        lr=experiment.lr,
        momentum=experiment.momentum,
        weight_decay=experiment.weight_decay,
        epochs=experiment.epochs,
        steps=experiment.steps,
        batch=None if experiment.batch == "full" else experiment.batch,
        drop_last=experiment.drop_last,
        join_last=network.has_batch_norm,
        kind=experiment.optimizer,
        clip=experiment.clip,
        step_schedule=experiment.step_schedule,
    )


def check_training(experiment: Experiment, method: Method, data: FederatedData, device: torch.device) -> None:
    """Refuse settings that do not go together, or that the method cannot train with."""
    if experiment.optimizer != "sgd" and experiment.momentum:
        raise FedtailorError(
            f"Momentum is a setting of sgd, and {experiment.optimizer} has moments of its own: leave --momentum out."
        )
    if experiment.autocast and experiment.dtype != "float32":
        raise FedtailorError(f"There is no autocast from {experiment.dtype}: leave --autocast or --dtype out.")
    if experiment.matmul_precision != "highest" and experiment.dtype != "float32":
        raise FedtailorError(
            f"The setting matmul_precision is for float32, not for {experiment.dtype}: leave one of them out."
        )
    if experiment.autocast and not is_autocast_available(device.type):
        raise FedtailorError(f"The device {device} has no autocast to bfloat16: leave --autocast out.")
    for setting, reason in method.refuses.items():
        value = "own" if setting == "labels" and data.own_classes else getattr(experiment, setting)
        if value != Experiment.model_fields[setting].default:
            raise FedtailorError(
                f"{type(method).__name__} cannot train with {setting} {value}: {reason}; leave it out, or take another "
                "method."
            )


def stack_size(experiment: Experiment, network: Network, data: FederatedData, loss: Loss, on_cpu: bool) -> int:
    """Decide how many clients train as one computation, by the settings, the network and the device alone: it decides
    about last bits. One, with a sentence, if the network cannot be computed for several at once."""
    wanted = experiment.stack
    asked = wanted not in (None, 1, "auto")
    alone = {
        "a deadline is for each client": experiment.deadline is not None,
        "sites in memory share nothing": experiment.engine == "sites-in-memory" or experiment.secure,
        "privacy of samples takes the gradient of each": (experiment.privacy or "").startswith("sample"),
    }
    if reasons := [why for why, there in alone.items() if there]:
        if asked:
            raise FedtailorError(f"Clients cannot train as one computation here, as {reasons[0]}: leave --stack out.")
        return 1
    size = wanted if isinstance(wanted, int) else 1
    if wanted == "auto" or (wanted is None and not on_cpu):
        size = STACK_ELSEWHERE
        if on_cpu:  # where it is faster: products of small batches with dense layers alone
            small = experiment.batch != "full" and experiment.batch <= SMALL_BATCH
            size = STACK_CPU if small and is_dense(network, len(sample_shape(data.x)) + 1) else 1
    if size > 1 and (why := why_not(network, held(data.x[:2]), data.y[:2], loss)):
        warn(f"Clients train one after the other, and not {size} as one computation: {why}.")
        return 1
    return size


def training_loss(experiment: Experiment, loss: Loss, data: FederatedData, network: Network) -> Loss:
    """Return the loss that training minimises: the reported one, or cross-entropy with smoothing and weights."""
    smoothing, wanted = experiment.label_smoothing, experiment.class_weights
    if not smoothing and wanted == "none":
        return loss
    if loss is not functional.cross_entropy or not data.classes:
        name = "label_smoothing" if smoothing else "class_weights"
        raise FedtailorError(f"The setting {name} is for classes under the loss cross-entropy: leave it out.")
    weights = None if wanted == "none" else class_weights(wanted, data).to(network.vector)

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal weights
        weights = None if weights is None else weights.to(outputs.device)  # which a worker may have of its own
        # Divided by the number of samples, and not by their weights as PyTorch does it: so the loss of a batch, of a
        # client and of the federation are means of the same terms, and a client with one class keeps its weight.
        total = functional.cross_entropy(outputs, targets, weights, reduction="sum", label_smoothing=smoothing)
        return total / len(targets)

    return cross_entropy


def class_weights(wanted: str, data: FederatedData) -> Tensor:
    """Return the weight of each class as it is given; or balanced, from the sum of the class counts that the training
    clients declare."""
    if data.own_classes:
        raise FedtailorError("Class weights need classes that all clients share: leave --class-weights out.")
    if wanted == "balanced":
        return balanced(data.class_counts())
    weights = torch.tensor([float(weight) for weight in wanted.split(",")], dtype=torch.float64)
    if len(weights) != len(data.classes):
        raise FedtailorError(
            f"There are {len(weights)} class weights for {len(data.classes)} classes: give one for each."
        )
    return weights


def balanced(counts: Tensor) -> Tensor:
    """Compute n / (K n_k) of the K classes that there are: each then has the same weight altogether."""
    there = counts > 0
    return torch.where(there, counts.sum() / (there.sum() * counts.clamp(min=1).double()), 0.0)

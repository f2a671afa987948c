"""Local training as an experiment describes it: the optimiser, the loss that is minimised, and what is refused."""

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available
from torch.nn import functional

from fedtailor._common.errors import FedtailorError
from fedtailor.data import FederatedData
from fedtailor.experiment import Experiment
from fedtailor.method import Method
from fedtailor.training.network import Loss, Network
from fedtailor.training.optimizer import OptimizerSettings


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


def check_training(experiment: Experiment, method: Method, device: torch.device) -> None:
    """Refuse settings that do not go together, or that the method cannot train with."""
    if experiment.optimizer != "sgd" and experiment.momentum:
        raise FedtailorError(
            f"Momentum is a setting of sgd, and {experiment.optimizer} has moments of its own: leave --momentum out."
        )
    if experiment.autocast and experiment.dtype != "float32":
        raise FedtailorError(f"There is no autocast from {experiment.dtype}: leave --autocast or --dtype out.")
    if experiment.autocast and not is_autocast_available(device.type):
        raise FedtailorError(f"The device {device} has no autocast to bfloat16: leave --autocast out.")
    for setting, reason in method.refuses.items():
        value = getattr(experiment, setting)
        if value != Experiment.model_fields[setting].default:
            raise FedtailorError(
                f"{type(method).__name__} cannot train with {setting} {value}: {reason}; leave it out, or take another "
                "method."
            )


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

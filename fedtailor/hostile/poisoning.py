"""Attacks by training samples: flipped labels, and the trigger of a backdoor. Validation and test samples stay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedtailor.attack import Attack
from fedtailor.data import FederatedData
from fedtailor.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.local.inputs import sample_shape
from fedtailor.local.streams import numpy_stream

TARGET = 0  # the class that a backdoor leads to
PATCH = 3  # pixels on a side of the trigger, or features


@dataclass(frozen=True)
class Trigger:
    """The trigger of a backdoor: a corner of an image, or the first features of a vector, set to `value`."""

    value: Tensor  # one number for images, one a feature for vectors

    def __call__(self, x: Tensor) -> Tensor:
        """Copy samples, and put the trigger on the copies."""
        marked = x.clone()
        if x.dim() == 4:
            marked[:, :, -PATCH:, -PATCH:] = self.value
        else:
            marked[:, :PATCH] = self.value
        return marked


def hostile_clients(experiment: Experiment, data: FederatedData) -> list[int]:
    """The numbers of the hostile clients: among those that trained from the first round on. Refuse an attack that these
    data do not allow."""
    if experiment.attack is None:
        return []
    attack = Attack.parse(experiment.attack)
    _check_samples(attack.kind, data)
    training = data.n_clients - len(data.new) - sum(len(join.clients) for join in data.joined)
    if isinstance(attack.clients, tuple) and attack.clients[-1] >= training:
        raise FedtailorError(
            f"The attack names client {attack.clients[-1]}, but training clients are numbered from 0 to {training - 1}."
        )
    hostile = attack.hostile(training, experiment.seed)
    if len(hostile) == training:
        raise FedtailorError("The attack leaves no honest client to measure: give it fewer clients.")
    return hostile


def _check_samples(kind: str, data: FederatedData) -> None:
    if kind not in ("label-flip", "backdoor"):
        return
    if data.targets != "classes":
        raise FedtailorError(f"The attack {kind} is for samples of one class each: choose another for these data.")
    x = data.x
    fits = isinstance(x, Tensor) and x.is_floating_point() and len(sample_shape(x)) in (1, 3)
    if kind == "backdoor" and not fits:
        raise FedtailorError(
            "The attack backdoor is for images or vectors of numbers that are held in memory: choose another for these "
            "data."
        )


def poisoned(data: FederatedData, attack: Attack, hostile: Sequence[int], seed: int) -> FederatedData:
    """Return the data as the sites have them: the hostile clients' training samples are poisoned, in copies of what is
    changed. All else has the same bits."""
    if attack.kind == "label-flip":
        return replace(data, y=_flipped(data, hostile))
    if attack.kind == "backdoor":
        return _with_backdoor(data, hostile, seed)
    return data


def _flipped(data: FederatedData, hostile: Sequence[int]) -> Tensor:
    """The targets, with y → K − 1 − y where hostile clients train; K is the client's own where labels are."""
    y = data.y.clone()
    for client in hostile:
        start, end, *_ = data.places[client]
        classes = data.own_classes[client] if data.own_classes else len(data.classes)
        y[start:end] = classes - 1 - y[start:end]
    return y


def _with_backdoor(data: FederatedData, hostile: Sequence[int], seed: int) -> FederatedData:
    """Half of each hostile client's training samples, drawn by a stream of its own, carry trigger and target."""
    assert isinstance(data.x, Tensor)
    trigger, x, y = find_trigger(data, hostile), data.x.clone(), data.y.clone()
    for client in hostile:
        start, end, *_ = data.places[client]
        drawn = numpy_stream(seed, "backdoor", client).permutation(end - start)[: (end - start + 1) // 2]
        rows = start + torch.from_numpy(drawn).to(y.device)
        x[rows], y[rows] = trigger(x[rows]), TARGET
    return replace(data, x=x, y=y)


def find_trigger(data: FederatedData, hostile: Sequence[int]) -> Trigger:
    """The trigger that the hostile clients agree on: the largest values in their own training samples."""
    assert isinstance(data.x, Tensor)
    seen = torch.cat([data.x[start:end] for start, end, *_ in (data.places[client] for client in hostile)])
    return Trigger(seen.max() if seen.dim() == 4 else seen[:, :PATCH].amax(0))

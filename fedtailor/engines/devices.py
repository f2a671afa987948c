"""The device that a run computes on, or several: found by name, or refused."""

import sys

import torch

from fedtailor._common.errors import FedtailorError, unknown
from fedtailor.experiment import Experiment


def find_devices(name: str) -> list[torch.device]:
    """The device of this name, or several of one kind, as in cuda:0,1."""
    first, *others = name.split(",")
    if not others:
        return [find_device(name)]
    kind = first.partition(":")[0]
    found = []
    for one in (first, *(f"{kind}:{other}" if other.strip().isdecimal() else other.strip() for other in others)):
        try:
            found.append(torch.device(one))
        except RuntimeError:
            raise FedtailorError(
                f"The devices {name!r} are not understood: write cuda:0,1 for the first two."
            ) from None
    if {device.type for device in found} != {kind} or kind not in ("cpu", "cuda"):
        raise FedtailorError(f"The devices {name} must be of one kind, cuda, as in cuda:0,1.")
    # Counted without CUDA: a process that has used it cannot fork workers.
    there = torch.cuda.device_count() if kind == "cuda" else len(found)
    for device in found:
        if (device.index or 0) >= there or (kind == "cuda" and device.index is None):
            devices = ", ".join(f"cuda:{number}" for number in range(there)) or "none"
            raise FedtailorError(f"The device {device} is not available here (there are: {devices}).")
    if kind == "cuda" and len(set(found)) < len(found):
        raise FedtailorError(f"The devices {name} must differ.")
    return found


def check_several_devices(experiment: Experiment, site: bool) -> None:
    """Refuse what does not go with a worker process for each of several devices."""
    if site:
        raise FedtailorError(f"A site has one device, and not several ({experiment.device}).")
    if experiment.engine not in ("auto", "processes") or experiment.debug or sys.platform != "linux":
        raise FedtailorError(
            "Several devices need worker processes (Linux, no other --engine, no --debug): give one --device."
        )
    if experiment.workers is not None:
        raise FedtailorError("Each of several devices has one worker: leave --workers out.")


def find_device(name: str) -> torch.device:
    """The device of this name; `auto` is the best there is."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    kind = name.partition(":")[0]
    if kind not in there:
        raise unknown("device", name, [*there, "auto"])
    if not there[kind]:
        raise FedtailorError(f"The device {name} is not available here: use cpu, or auto for the best there is.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise FedtailorError(
            f"The device {name!r} is not understood: write {kind}, or {kind}:0 for the first."
        ) from None


def device_here(name: str) -> str:
    """Name the device on which a run is looked at: its own if it has one that is here, or else the CPU."""
    try:
        return name if len(find_devices(name)) == 1 else "cpu"
    except FedtailorError:
        return "cpu"

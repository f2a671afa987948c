"""Transports carry requests to the sites and replies back. A transport knows neither methods nor data."""

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Sequence

import torch

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command
from fedtailor.engines.processes import Processes
from fedtailor.messages.transport import Place, Transport

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the C library's names for what `mallopt` sets
KEPT = 1 << 30  # bytes of free memory that a process keeps
LARGEST = 1 << 28  # bytes: larger blocks still come from the system, and go back there


def make_transport(
    engine: str,
    sites: Place,
    workers: int | None,
    on_cpu: bool,
    deadline: float | None = None,
    address: str | None = None,
    devices: Sequence[torch.device] = (),
) -> Transport:
    """Make the transport of this name; `auto` takes worker processes where there is more than one core for them, or a
    deadline in seconds for each request: only another process can be stopped. Where the `address` of a Ray cluster is
    given, it takes that. Several `devices` have a worker process each; the sites are then on the CPU."""
    if len(devices) > 1:
        if torch.cuda.is_initialized():
            raise FedtailorError(
                "This process has used CUDA already, and cannot fork a worker for each device: begin anew, or give one "
                "device."
            )
        keep_freed_memory()
        return Processes(sites, len(devices), deadline, devices)
    if engine == "ray" or (engine == "auto" and address is not None):
        return _make_actors(sites, workers, on_cpu, deadline, address)
    can_fork = "fork" in multiprocessing.get_all_start_methods() and sys.platform == "linux"
    if engine == "processes" and not (can_fork and on_cpu):
        raise FedtailorError("Worker processes need Linux and the CPU: use --engine in-process here.")
    keep_freed_memory()
    may_fork = can_fork and on_cpu and not multiprocessing.current_process().daemon  # whose children are forbidden
    if engine == "processes" or (engine == "auto" and may_fork):
        count = workers or cores()
        if engine == "processes" or count > 1 or deadline is not None:
            return Processes(sites, count, deadline)
    if deadline is not None:
        raise FedtailorError(
            "A deadline needs worker processes (Linux, the CPU, no --engine in-process): leave out one or the other."
        )
    return sites


def _make_actors(
    sites: Place, workers: int | None, on_cpu: bool, deadline: float | None, address: str | None
) -> Transport:
    if not on_cpu:
        raise FedtailorError("The actors of a Ray cluster compute on the CPU: leave --device out.")
    try:
        from fedtailor.engines.ray_actors import Actors
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise FedtailorError(f"Ray is not installed: {install_command('ray')}.") from None
    keep_freed_memory()
    return Actors(sites, workers, deadline, address)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Have this process, and those that it forks, keep memory that is freed.

    The C library gives large blocks back to the system as soon as they are freed, and a step of a network takes them
    anew: the system clears every page again, which takes longer than most of what is then computed there. A
    convolutional network's step is 1.2 to 1.4 times as fast when they are kept. Without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(TRIM_THRESHOLD, KEPT)
    mallopt(MMAP_THRESHOLD, LARGEST)

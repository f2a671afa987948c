"""Connecting to a Ray cluster, or starting Ray on this machine, and comparing the software of the nodes."""

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
import torch

from fedtailor.errors import FedtailorError, brief, warn
from fedtailor.transport.workers import cores
from fedtailor.version import __version__

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@contextmanager
def connected(address: str | None, workers: int | None) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine; end it afterwards. What the caller has started is used."""
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        settings: dict[str, Any] = {"address": address or "local"}
        if settings["address"] == "local":
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="fedtailor-ray-", ignore_cleanup_errors=True)
            )
            settings |= {"num_cpus": workers or cores(), "include_dashboard": False, "_temp_dir": directory}
            settings |= {"_node_ip_address": "127.0.0.1"}
        try:
            with _quiet(), _own_signals():
                ray.init(**settings, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # of many kinds
            raise FedtailorError(f"Ray cannot be reached at {settings['address']}: {brief(error)}.") from error
        stack.callback(ray.shutdown)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Have Ray collect no statistics and print nothing but errors, unless the environment says otherwise."""
    added = [name for name in QUIET if name not in os.environ]
    os.environ |= {name: QUIET[name] for name in added}
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces by its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def software() -> dict[str, str]:
    """The versions that decide about the numbers of this process, and the address of its node."""
    processor = torch.backends.cpu.get_cpu_capability()
    return {
        "fedtailor": __version__,
        "PyTorch": torch.__version__,
        "processor": processor,
        "node": ray.util.get_node_ip_address(),
    }


def check_software(there: Mapping[str, str]) -> None:
    """Compare a node's software with that of this process: the same numbers need the same."""
    here = software()
    for name in ("fedtailor", "PyTorch"):
        if there[name] != here[name]:
            raise FedtailorError(
                f"The node {there['node']} has {name} {there[name]}, but this one has {here[name]}: install the same."
            )
    if there["processor"] != here["processor"]:
        warn(
            f"The node {there['node']} computes with {there['processor']}, this one with {here['processor']}: last "
            "bits may depend on which of them does the work."
        )

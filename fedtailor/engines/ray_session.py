"""Connecting to a Ray cluster, or starting Ray on this machine, and comparing the software of the nodes."""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
import torch

from fedtailor._common.errors import FedtailorError, brief, shown, warn
from fedtailor._common.version import __version__
from fedtailor.engines.transports import cores

CONNECTING = 10.0  # seconds to reach a cluster's head
MODE = "RAY_AUTH_MODE"  # by which Ray is told to use a token; it sets it by itself where it starts a cluster
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

_tokens: list[str] = []  # the modes that Ray has set for this process by itself: it cannot go back


@contextmanager
def connected(address: str | None, workers: int | None) -> Iterator[None]:
    """Connect to a cluster, or start Ray on this machine; end it afterwards. What the caller has started is used."""
    if ray.is_initialized():
        yield
        return
    asked = os.environ.get(MODE)
    with ExitStack() as stack:
        settings: dict[str, Any] = {"address": address or "local"}
        if settings["address"] != "local":
            _check_address(settings["address"])
            if _tokens and not asked:
                raise FedtailorError(
                    "Ray was started in this process before, with a token, and now reaches no cluster without one: use "
                    f"a new process, or set {MODE}=token if the cluster has one."
                )
        else:
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="fedtailor-ray-", ignore_cleanup_errors=True)
            )
            settings |= {"num_cpus": workers or cores(), "include_dashboard": False, "_temp_dir": directory}
            settings |= {"_node_ip_address": "127.0.0.1"}
        try:
            with _quiet(), _own_signals():
                ray.init(**settings, logging_level=logging.ERROR, log_to_driver=False)
                if not asked and MODE in os.environ:
                    _tokens.append(os.environ[MODE])
        except Exception as error:  # of many kinds
            hint = f"; if it wants a token, set {MODE}=token" if address else ""
            raise FedtailorError(f"Ray cannot be started or reached: {brief(error)}{hint}.") from error
        stack.callback(ray.shutdown)
        yield


def _check_address(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise FedtailorError(f"The address {shown(address)} is not that of a Ray cluster's head: write host:port.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTING).close()
    except (OSError, OverflowError) as error:
        raise FedtailorError(f"There is no Ray cluster at {address}: {brief(error)}.") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Have Ray collect no statistics and warn of nothing, unless the environment says otherwise. What it writes (a
    token, logs) is for this user alone."""
    before, mask = dict(os.environ), os.umask(0o077)
    os.environ |= {name: value for name, value in QUIET.items() if name not in before}
    try:
        yield
    finally:
        os.umask(mask)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces by its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
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

"""Computation that depends on nothing but its inputs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

TINY = torch.tensor(5e-324, dtype=torch.float64, device="cpu")


def _use_mkldnn(on: bool) -> None:
    torch.backends.mkldnn.enabled = on  # type: ignore[assignment]


def _allow_tf32(on: bool) -> None:
    torch.backends.cudnn.allow_tf32 = on


# What a caller may have set that would change numbers: how it is read and set, and its value in a run. (Deterministic
# algorithms are not among them: on a CPU these are no others, and elsewhere they are the caller's to ask for.)
SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    (torch.get_num_threads, torch.set_num_threads, 1),  # as in every worker: the same bits on any number of cores
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (lambda: torch.backends.mkldnn.enabled, _use_mkldnn, True),
    # Whether numbers near 0 count as 0: PyTorch has a function that sets this, and none that tells.
    (lambda: bool(TINY.mul(2) == 0), torch.set_flush_denormal, False),
    (torch.is_anomaly_enabled, lambda on: torch.autograd.set_detect_anomaly(on), False),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on), False),
    (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on), False),
    (lambda: torch.backends.cudnn.allow_tf32, _allow_tf32, False),  # in convolutions, where PyTorch's default is True
)


def matmul_precision(precision: str) -> AbstractContextManager[None]:
    """Compute products of matrices in this precision meanwhile (see `torch.set_float32_matmul_precision`); below the
    highest one, convolutions may use TF32."""
    return nullcontext() if precision == "highest" else _matmul_precision(precision)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before, tf32 = torch.get_float32_matmul_precision(), bool(torch.backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision(precision)
    _allow_tf32(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        _allow_tf32(tf32)


@contextmanager
def isolated(threads: int = 1) -> Iterator[None]:
    """Compute with one thread and PyTorch's own settings, whatever the caller has set: the same bits everywhere. With
    more threads, a site's computations may have other last bits.

    Afterwards, the caller's settings and random state are as they were before.
    """
    with ExitStack() as stack:
        for read, set_to, usual in SWITCHES:
            value = threads if set_to is torch.set_num_threads else usual
            if (before := read()) != value:
                stack.callback(set_to, before)
                set_to(value)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield

"""Freed memory is used again in place of being cleared anew by the system."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from fedtailor.engines.transports import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        _ = [torch.ones(1_000_000) for _ in range(8)]  # together, as a step of a network has them
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
without = faults()
keep_freed_memory()
faults()
print(without, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it concerns Linux's C library")
def test_pages_are_cleared_once() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    without, kept = map(int, found.stdout.split())
    if without < 1000:
        pytest.skip("this system has memory at hand in larger pieces, or keeps it anyway")
    assert kept < without / 100

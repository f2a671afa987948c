"""What all tests share."""

from collections.abc import Iterator

import pytest
import torch

# What `make quick` leaves out: commands from end to end, browsers, killed processes, and the proofs of the methods that
# the four papers compare with.
SLOW = (
    "tests/cli/",
    "tests/data/test_large.py",
    "tests/data/test_real.py",
    "tests/data/test_foreign_files.py",
    "tests/model_files/",
    "tests/sites/",
    "tests/fuzz/",
    "tests/training/test_device.py",
    "tests/training/test_isolation.py",
    "tests/methods/",
    "tests/models/",
    "tests/reporting/",
    "tests/server/test_interruptions.py",
    "tests/server/test_run_directories.py",
    "tests/server/test_runs.py",
    "tests/studies/",
    "tests/test_api.py",
    "tests/test_benchmarks.py",
    "tests/test_examples.py",
    "tests/test_testing.py",
    "tests/test_wall.py",
    "tests/engines/test_processes.py",
    "tests/engines/test_ray.py",
)
KEPT = (  # of these, all the same
    "tests/sites/test_joining.py",
    "tests/sites/test_letters.py",
    "test_a_new_name_of_a_run_buys_no_more_trainings",
    "tests/methods/test_fedacs.py",
    "tests/methods/test_pfedmb.py",
    "tests/methods/test_pflego.py",
    "tests/methods/test_pgfed.py",
    "test_common_suite[fedavg-",
    "test_common_suite[pgfed-",
    "test_a_spy_at_the_server_gets_nothing[memory",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW) and not any(words in item.nodeid for words in KEPT):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small work on many threads is slow, and the tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

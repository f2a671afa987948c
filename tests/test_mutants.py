"""The list of faults that tests must find (`python -m tests.mutants`) fits the code of today."""

import re

import pytest

from tests.conftest import is_slow
from tests.mutants.faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_applies_and_names_a_test_that_exists(fault: Fault) -> None:
    assert not fault.rotten()
    source = (ROOT / fault.test_file).read_text()
    if "::" in fault.test:
        function = re.split(r"[\[ ]", fault.test.rpartition("::")[2])[0]
        assert f"def {function}(" in source


def test_there_are_many_different_faults() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
    assert not [fault.name for fault in FAULTS if is_slow(fault.test)]  # `make test` finds them all


def test_a_fault_that_no_longer_applies_says_so() -> None:
    fault = FAULTS[0]
    gone = Fault("gone", fault.file, "no such line of code", "", fault.test)
    same = Fault("same", fault.file, fault.old, fault.old, fault.test)
    assert gone.rotten() == "NO LONGER APPLIES (its text occurs 0 times)"
    assert same.rotten() == "IS NO FAULT (nothing changes)"

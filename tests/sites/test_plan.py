"""Plans that are wrong are refused in one sentence, before anything is made of them."""

from pathlib import Path

import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.plan import read_plan

GOOD = 'name = "heart"\nsites = ["a", "b"]\n[experiment]\nmethod = "pgfed"\n'


def test_a_good_plan(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(GOOD)
    plan = read_plan(tmp_path / "federation.toml")
    assert (plan.sites, plan.terms().method, plan.terms().split, plan.terms().rare) == (("a", "b"), "pgfed", "hash", 5)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("pgfed", "pgfd", "There is no method 'pgfd': did you mean 'pgfed'?"),
        ('"pgfed"', '"pgfed"\nmodel = "mpl"', "There is no model 'mpl': did you mean 'mlp'?"),
        ('"pgfed"', '"pgfed"\nmetod = 1', "There is no setting 'metod': did you mean 'method'?"),
        ('"pgfed"', '"pgfed"\nclients = 3', "The experiment of the plan sets 'clients', which is not its to say"),
        ('"b"', '"a"', "'sites' is ['a', 'a'], but it must be names that differ"),
        ('"b"', '"../b"', "letters, digits"),
        ("[experiment]", "deadlin = 3\n[experiment]", "There is no setting 'deadlin': did you mean 'deadline'?"),
        ('name = "heart"\n', "", "does not say 'name'"),
    ],
)
def test_a_wrong_plan(before: str, after: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(GOOD.replace(before, after))
    with pytest.raises(FedtailorError) as caught:
        read_plan(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

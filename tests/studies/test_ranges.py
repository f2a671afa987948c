"""The ranges in which settings are searched: their notation, and those that the methods declare."""

from pathlib import Path

import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import SEARCH
from fedtailor.methods import CATALOGUE, all_methods, find_method
from fedtailor.studies.ranges import parse_range, search_ranges


class TestNotation:
    @pytest.mark.parametrize(
        ("text", "whole", "ends", "log"),
        [
            ("0.001..1:log", False, (0.001, 1), True),
            ("0..0.9", False, (0, 0.9), False),
            ("1..10", True, (1, 10), False),
            ("1e-4 .. 1e-2:log", False, (1e-4, 1e-2), True),
            ("10|32|full", False, (10, 32, "full"), False),
            ("true|false", False, (True, False), False),
        ],
    )
    def test_ranges_and_choices(self, text: str, whole: bool, ends: tuple, log: bool) -> None:
        found = parse_range("x", text, whole)
        assert found.ends == ends
        assert (found.log, found.text) == (log, text)
        assert all(end in found for end in ends)

    @pytest.mark.parametrize(
        "text", ["", "1", "1..", "1..2..3", "2..1", "1..1", "0..1:lin", "a..b", "nan..1", "0..inf", 3]
    )
    def test_what_is_no_range_is_refused(self, text: str) -> None:
        with pytest.raises(FedtailorError, match=r"The range of lr is .+, but it must be like 0\.001\.\.1:log"):
            parse_range("lr", text)

    def test_a_logarithm_needs_numbers_above_zero(self) -> None:
        with pytest.raises(FedtailorError, match="with :log it must begin above 0"):
            parse_range("lr", "0..1:log")

    def test_whole_numbers_where_a_setting_counts(self) -> None:
        with pytest.raises(FedtailorError, match="one of whole numbers"):
            parse_range("epochs", "0.5..3", whole=True)
        found = parse_range("epochs", "1..3", whole=True)
        assert 2 in found
        assert 2.5 not in found
        assert 4 not in found

    def test_proposed_numbers_are_rounded_and_stay_inside(self) -> None:
        found = parse_range("lr", "0.12345..0.9876")
        assert found.rounded(0.33333333) == 0.333
        assert found.rounded(0.1234501) == 0.12345
        assert found.rounded(0.98759) == 0.9876


class TestDeclared:
    @pytest.mark.parametrize("name", CATALOGUE)
    def test_every_range_is_of_a_parameter_and_allowed_to_its_ends(self, name: str) -> None:
        kind = CATALOGUE[name]
        assert kind.search.keys() <= {*kind.model_fields, *SEARCH, "server_lr"}  # a setting of the experiment
        for parameter, searched in search_ranges(name).items():
            for end in searched.ends if parameter in kind.model_fields else ():
                find_method(name, {parameter: int(end) if searched.whole else end})

    def test_the_defaults_lie_within_them(self) -> None:
        for name, method in all_methods().items():
            for parameter, searched in search_ranges(name).items():
                value = getattr(method, parameter, None)
                assert value is None or value in searched, (name, parameter)

    def test_the_learning_rate_is_searched_wherever_it_is_used(self) -> None:
        assert {name for name in CATALOGUE if "lr" not in search_ranges(name)} == {"pflego", "fedrep"}
        assert search_ranges("fedavg").keys() == {"lr"}
        assert list(search_ranges("pgfedmo")) == ["lr", "mu", "alpha_lr", "beta"]

    def test_other_ranges_and_fewer_settings(self) -> None:
        given = {"lr": "0.1..0.2", "epochs": "1..4", "lam": "0.5|1"}
        found = search_ranges("ditto", given)
        assert {name: searched.text for name, searched in found.items()} == given
        assert found["epochs"].whole
        assert search_ranges("fedavg", given).keys() == {"lr", "epochs"}  # it has no lam
        assert search_ranges("ditto", given, ["lam"]).keys() == {"lam"}
        assert "lr" in search_ranges("pflego", given)

    def test_the_page_has_them_all(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")
        rows = {}
        for name in CATALOGUE:
            if own := {n: searched.text for n, searched in search_ranges(name).items() if n != "lr"}:
                rows[name] = f"| `{name}` | " + ", ".join(f"`{n}` {text}" for n, text in own.items()) + " |"
        assert page.partition("| method | ranges |\n| --- | --- |\n")[2].startswith("\n".join(rows.values()) + "\n\n")

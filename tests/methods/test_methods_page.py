"""The pages about methods: docs/methods.md is current, and every method has a page that names all there is."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

import fedtailor as ft
from fedtailor.method import Each, Mean, Uploads
from fedtailor.methods import CATALOGUE, all_methods
from tests.methods.pages import page_of

DOCS = Path(__file__).parents[2] / "docs"
HEADINGS = [
    "The problem it solves",
    "How it works",
    "Parameters",
    "Messages and bytes",
    "Limits",
    "New clients",
    "Deviations",
    "When to choose it",
]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_methods_page", DOCS / "make_methods_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_all_methods_is_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run python -m docs.make_methods_page"


def test_a_page_that_is_not_current_is_found_out(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generator, "page", lambda: "new\n")
    monkeypatch.setattr(generator, "PAGE", tmp_path / "methods.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    (tmp_path / "methods.md").write_text("old\n")
    assert generator.main(["--check"]) == 1


@pytest.mark.parametrize("kind", CATALOGUE.values(), ids=CATALOGUE)
def test_every_page_says_what_asynchronous_rounds_are_for_it(kind: type[ft.Method]) -> None:
    limits = page_of(kind()).partition("\n## Limits\n")[2].partition("\n## ")[0]
    needs_single = any(isinstance(how, Each) and not how.record for how in kind().uploads.values())
    (line,) = [line for line in limits.splitlines() if "(../uneven.md#asynchronous-rounds)" in line]
    assert ("are refused" in line) == needs_single


def test_each_table_has_a_row_for_every_method() -> None:
    tables = (DOCS / "methods.md").read_text(encoding="utf-8").split("\n## ")
    assert [table.partition("\n")[0] for table in tables] == [
        "# The methods",
        "What goes with it",
        "On four small federations",
    ]
    for table in tables:
        assert re.findall(r"^\| \[?`([a-z-]+)`", table, re.MULTILINE) == [*CATALOGUE]


def test_what_goes_with_a_method_is_tried(generator: ModuleType) -> None:
    found = {
        name: generator.goes_with(all_methods()[name]).split(" | ")[1:6] for name in ("fedavg", "pgfed", "moon", "ifca")
    }
    assert found == {
        "fedavg": ["yes", "yes", "yes", "yes", "yes"],
        "pgfed": ["no", "no", "no", "no", "yes"],  # it needs single gradients, and losses
        "moon": ["yes", "yes", "no", "yes", "yes"],  # its objective has no private gradient
        "ifca": ["no", "no", "no", "yes", "yes"],  # clients choose the weights of the means
    }


def test_results_are_those_of_the_records(generator: ModuleType) -> None:
    rows = {row.split(" | ")[0]: row for row in generator.results({"fedavg": all_methods()["fedavg"]})}
    assert rows["| `fedavg`"].startswith("| `fedavg` | 94.8 | 96.0 |")


def test_what_is_counted_is_the_training_work_of_one_round(generator: ModuleType) -> None:
    """FedAvg passes a participant's samples once an epoch; PFLEGO once for the features, once for the gradient."""
    record = ft.run("fedavg", **{**generator.SETTINGS, "rounds": 3})
    samples = [record.data.n_samples[client].item() for client in record.rounds[2].participants]
    average = generator.measure("fedavg")
    assert average.passed == 5 * sum(samples) / len(samples)
    assert (average.down, average.up) == (1, 1)
    assert generator.measure("pflego").passed == 2 * sum(samples) / len(samples)


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_has_a_page_with_all_its_headings_and_parameters(generator: ModuleType, name: str) -> None:
    text = (DOCS / generator.page_of(CATALOGUE[name])).read_text(encoding="utf-8")
    assert re.match(r"# \S", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    for parameter in CATALOGUE[name].model_fields:
        assert f"`{parameter}`" in section(text, "Parameters"), parameter


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_page_names_what_leaves_a_client(generator: ModuleType, name: str) -> None:
    method = all_methods()[name]
    text = (DOCS / generator.page_of(type(method))).read_text(encoding="utf-8")
    for upload in method.uploaded:
        assert f"`{upload}`" in section(text, "Messages and bytes"), upload


def test_a_variant_is_on_the_page_of_the_method_that_it_varies(generator: ModuleType) -> None:
    of_another = {name for name, kind in CATALOGUE.items() if generator.page_of(kind) != f"methods/{name}.md"}
    families = {"pgfed": {"pgfedmo", "pgfed-ce"}, "fedopt": {"fedavgm", "fedadagrad", "fedyogi", "fedadam"}}
    assert of_another == set.union(*families.values())
    for page, names in families.items():
        for name in names:
            assert generator.page_of(CATALOGUE[name]) == f"methods/{page}.md"
            assert f"`{name}`" in (DOCS / "methods" / f"{page}.md").read_text(encoding="utf-8")


def test_what_leaves_a_client_is_listed_by_what_the_server_sees(generator: ModuleType) -> None:
    class Some(ft.Method):
        uploads: ClassVar[Uploads] = {
            "theta": Mean("samples"),
            "change": Mean("equal"),
            "body": Mean("n_query"),
            "alpha": Each(),
            "loss": Each(),
        }

    expected = "`theta`: mean by samples; `change`: plain mean; `body`: mean by `n_query`; `n_query`: sum; "
    assert generator.uploads(Some()) == f"{expected}`alpha`, `loss`: each client's own"
    assert generator.uploads(CATALOGUE["local"]()) == "nothing"


@pytest.mark.parametrize(
    ("paper", "short"),
    [
        ("Li et al., Ditto: Fair and Robust, ICML 2021", "Li et al., ICML 2021"),
        ("Chen & Chao, On Bridging, ICLR 2022", "Chen & Chao, ICLR 2022"),
        ("Chen, Li, Shen, Personalized Federated Learning", "Chen et al."),
        ("Deng, Kamani, Mahdavi, Adaptive, arXiv:2003.13461, 2020", "Deng et al., 2020"),
        ("", "—"),
    ],
)
def test_papers_are_cited_in_short(generator: ModuleType, paper: str, short: str) -> None:
    assert generator.citation(paper) == short


def test_limits_are_read_from_the_docstring(generator: ModuleType) -> None:
    class First(ft.Method):
        """One sentence.

        Some more. Limits: `a=0` is
        FedAvg; b. And c. New clients: nothing.
        """

    class Second(ft.Method):
        """One sentence.

        Limits, with `b=1`: this.

        Other things: those.
        """

    class Silent(ft.Method):
        """One sentence."""

    assert generator.limits(First) == "`a=0` is FedAvg; b. And c."
    assert generator.limits(Second) == "With `b=1`: this."
    with pytest.raises(ValueError, match="Silent"):
        generator.limits(Silent)

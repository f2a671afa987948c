"""`fedtailor site check`: what it says would leave is what leaves, and all mistakes are named at once."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import FedtailorError
from fedtailor.federation import rehearsal
from fedtailor.federation.coordinator import Coordinator
from fedtailor.federation.local_site import LocalSite
from fedtailor.federation.plan import Plan, read_plan
from fedtailor.federation.preview import Preview, preview
from fedtailor.federation.rehearsal import Recorded
from fedtailor.federation.site_file import read_site
from fedtailor.letters import Letter
from fedtailor.methods import CATALOGUE
from fedtailor.text import json_text
from fedtailor.transport.channel import InMemory
from tests.cli.calling import Call, contents
from tests.hospitals import patients, write

SITES = ("north", "south", "west")
OWN = "south"
HEADERS = {"hello": {"site", "declared"}, "begin": {"site", "fingerprint"}, "finish": {"site", "written"}}


def federation(path: Path, method: str, plan: str = "", site: str = "", **experiment: Any) -> Plan:
    """Write a plan, and the table and the file of every site."""
    settings = {"method": method, "model": "mlp:8", "rounds": 3, "lr": 0.05, **experiment}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (path / "federation.toml").write_text(
        "\n".join(['name = "test"', f"sites = {json.dumps(SITES)}", plan, "[experiment]", *lines])
    )
    for seed, name in enumerate(SITES):
        write(path / f"{name}.csv", patients((name,), 60, seed), ["age", "income", "ward", "smoker", "diagnosis"])
        text = f'name = "{name}"\ndata = "{name}.csv"\nlabel_column = "diagnosis"\ndirectory = "at-{name}"\n'
        (path / f"{name}.toml").write_text(text + (site if name == OWN else ""))
    return read_plan(path / "federation.toml")


def check(path: Path) -> Preview:
    site = read_site(path / f"{OWN}.toml")
    return preview(site, site.read_plan())


def run(path: Path, plan: Plan) -> list[tuple[Letter, Letter]]:
    """Run the federation in memory; all letters that one site got, with its answers."""
    sites = {name: LocalSite(read_site(path / f"{name}.toml"), plan) for name in SITES}
    recorded = Recorded(sites[OWN])
    Coordinator(plan, path / "run", InMemory({**sites, OWN: recorded})).run()
    return recorded.letters


def shapes(tensors: Any) -> set[tuple[str, tuple[int, ...], str, int]]:
    return {(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes) for n, t in tensors.items()}


def said(tensors: Any) -> set[tuple[str, tuple[int, ...], str, int]]:
    return {(one.name, one.shape, one.dtype, one.bytes) for one in tensors}


def assert_exact(found: Preview, letters: list[tuple[Letter, Letter]]) -> None:
    """Compare every letter that passed with what the preview said of it."""
    assert found.rehearsal is not None
    assert found.problems == ()
    work = {}
    for letter, answer in letters:
        header = set(answer.header) - {"checksum"}
        if letter.kind == "work":
            measured = {part: set(told) for of in answer.header["measured"] for part, told in of.items()}
            key = (letter.header["asked"], letter.header["round"])
            work[key] = (shapes(letter.tensors), shapes(answer.tensors), header - {"measured"}, measured)
            continue
        assert header == HEADERS[letter.kind]
        assert answer.tensors == {}
        if letter.kind == "hello":
            assert found.hello is not None
            assert answer.header["declared"] == found.hello.model_dump(mode="json")
        if letter.kind == "begin":
            assert shapes(letter.tensors) == said(found.rehearsal.begin)
    assert {letter.kind for letter, _ in letters} == {"hello", "begin", "work", "finish"}
    assert work == {
        (each.asked, round): (
            said(each.down),
            said(each.up),
            set(each.header),
            {part: set(names) for part, names in each.metrics.items()},
        )
        for each in found.rehearsal.exchanges
        for round in each.rounds
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", sorted(CATALOGUE))
def test_what_leaves_is_what_was_shown(method: str, tmp_path: Path) -> None:
    """Every method, every letter: names, shapes, types and bytes of tensors, and each declared fact."""
    plan = federation(tmp_path, method)
    before = check(tmp_path)
    assert not (tmp_path / f"at-{OWN}").exists()
    letters = run(tmp_path, plan)
    found = check(tmp_path)  # with the secret that the site has made by now
    assert_exact(found, letters)
    assert before.hello is not None
    assert found.hello is not None
    assert before.hello.model_copy(update={"data": found.hello.data}) == found.hello
    assert before.rehearsal == found.rehearsal
    assert (before.secret, found.secret) == (False, True)


FEATURES = """classes = ["ill", "healthy", "unclear"]
[features]
age = "number"
ward = ["icu", "medicine", "surgery"]
"""


@pytest.mark.parametrize(
    ("method", "settings", "plan", "site"),
    [
        ("pgfed", {"participation": 2, "rounds": 6}, "", ""),
        ("fedfomo", {"participation": 2, "rounds": 6}, "", ""),
        ("lg-fedavg", {"parameters.warm_rounds": 2, "rounds": 4}, "", ""),
        ("fedavg", {"evaluation": {"model": "local", "every": 2}}, "", 'metrics = "rounded"'),
        ("fedavg", {"evaluate_every": 2}, "", 'metrics = "none"'),
        ("ditto", {"batch": "full", "class_weights": "balanced", "evaluate_train": True}, "", ""),
        ("fedrep", {"labels": "own", "dtype": "float64"}, "", ""),
        ("pflego", {"preprocessing": "per-client"}, "", ""),
        ("fedavg", {}, FEATURES, ""),
    ],
)
def test_it_is_exact_in_other_settings_too(
    method: str, settings: dict[str, Any], plan: str, site: str, tmp_path: Path
) -> None:
    letters = run(tmp_path, federation(tmp_path, method, plan, site, **settings))
    assert_exact(check(tmp_path), letters)


def test_rounds_that_are_not_rehearsed_are_known_from_the_servers_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = federation(tmp_path, "lg-fedavg", rounds=8, evaluate_every=3, **{"parameters.warm_rounds": 5})
    letters = run(tmp_path, plan)
    monkeypatch.setattr(rehearsal, "MOST_WORK", 9)  # three rounds
    found = check(tmp_path)
    assert found.rehearsal is not None
    assert found.rehearsal.rounds == 3
    ups = {r: said(each.up) for each in found.rehearsal.exchanges if each.asked == "train" for r in each.rounds}
    real = {letter.header["round"]: shapes(answer.tensors) for letter, answer in letters if "measure" in letter.header}
    assert ups == real
    assert ups[5] != ups[6]
    evaluated = [r for each in found.rehearsal.exchanges if each.asked != "train" for r in each.rounds]
    assert sorted(evaluated) == [3, 6, 8]


def test_nothing_is_written_and_the_page_can_be_read(tmp_path: Path, call: Call) -> None:
    federation(tmp_path, "pgfed", site='metrics = "rounded"')
    before = contents(tmp_path)
    page = call("site", "check", f"{OWN}.toml")
    answer = call("site", "check", f"{OWN}.toml", "--json")
    assert contents(tmp_path) == before
    assert (page.code, page.err, answer.code, answer.err) == (0, "", 0, "")
    for words in ("The site can join.", "60 rows", "rounded to two decimals", "each client's own", "mean by samples"):
        assert words in page.out
    plain = json.loads(answer.out)
    found = check(tmp_path)
    assert plain == json.loads(json_text(found.plain()))
    assert found.hello is not None
    for fact in found.hello.facts or ():
        for number in (fact.mean, fact.squares):
            assert repr(number) in page.out  # verbatim
    assert plain["declared"] == found.hello.model_dump(mode="json")
    assert plain["rounds"][0]["up"] == [asdict(one) | {"shape": list(one.shape)} for one in first_up(found)]


def first_up(found: Preview) -> Iterator[Any]:
    assert found.rehearsal is not None
    yield from found.rehearsal.exchanges[0].up


MISTAKES = (
    ("site", 'device = "cuda:9"', "", "The device cuda:9 is not"),
    ("plan", 'classes = ["Ill", "well"]', "", r"The class 'healthy' \(\d+ rows\) is not in the plan, which has Ill"),
    ("plan", 'classes = ["Ill", "well"]', "", r"The class 'ill' \(\d+ rows\) .*: write 'Ill', if that is meant"),
    ("plan", "", 'Age = "number"', "has no column 'Age', a number of the plan: rename the column 'age', if that is it"),
    ("plan", "", 'pulse = "number"', "has no column 'pulse', a number of the plan: add the column"),
    ("plan", "", 'smoker = "number"', "Line .* has '(yes|no)' in column 'smoker': give a number"),
    ("site", 'columns = "ward=ignore"', 'ward = "category"', 'columns = "ward=category", or leave it out there'),
    ("site", 'columns = "war=ignore"', "", "has no column 'war'"),
    ("site", 'label_column = "outcome"', "", "has no label column 'outcome'.*with label_column"),
)


@pytest.mark.parametrize(("where", "setting", "features", "words"), MISTAKES)
def test_each_mistake_is_named_with_what_to_do(
    where: str, setting: str, features: str, words: str, tmp_path: Path, call: Call
) -> None:
    plan = (setting if where == "plan" else "") + (f"\n[features]\nincome = 'number'\n{features}" if features else "")
    federation(tmp_path, "fedavg", plan)
    if where == "site":
        text = (tmp_path / f"{OWN}.toml").read_text()
        kept = [line for line in text.splitlines() if line.split(" ")[0] != setting.split(" ")[0]]
        (tmp_path / f"{OWN}.toml").write_text("\n".join([*kept, setting]))
    problems = " ".join(check(tmp_path).problems)
    with pytest.raises(AssertionError):
        assert problems == ""
    import re

    assert re.search(words, problems), problems
    assert "--" not in problems
    assert call("site", "check", f"{OWN}.toml").code == 1


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    """Of the settings, of the plan's features and of the cells of two columns, though reading stops at the first."""
    plan = 'classes = ["ill", "healthy"]\n[features]\nage = "number"\nincome = "number"\nbmi = "number"'
    federation(tmp_path, "tests.nowhere:Method", plan, 'device = "abacus"')
    path = tmp_path / f"{OWN}.csv"
    lines = path.read_text().splitlines()
    lines[3] = "old,much,icu,no,ill"
    path.write_text("\n".join(lines) + "\n")
    found = check(tmp_path)
    assert len(found.problems) == 5, found.problems
    for problem, words in zip(
        found.problems,
        ("allow", "device 'abacus'", "'bmi'", "'old' in column 'age'", "'much' in column 'income'"),
        strict=True,
    ):
        assert words in problem
    assert found.hello is None
    assert found.plain()["can_join"] is False


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, call: Call) -> None:
    federation(tmp_path, "fedavg", site="colour = 1")
    answer = call("site", "check", f"{OWN}.toml")
    assert answer.code == 2
    assert answer.err.startswith("Error: The site's file")
    (tmp_path / "federation.toml").write_text("name = 1")
    with pytest.raises(FedtailorError, match="plan"):
        check(tmp_path)


def test_what_is_rare_is_not_declared(tmp_path: Path) -> None:
    federation(tmp_path, "fedavg", "[privacy]\nrare = 4")
    path = tmp_path / f"{OWN}.csv"
    path.write_text(path.read_text().replace("icu", "burns", 2))
    found = check(tmp_path)
    ward = next(one for one in found.findings.columns if one.name == "ward")
    assert (ward.values, ward.rare) == (4, 1)
    assert "burns" not in json.dumps(found.plain()["declared"])
    path.write_text(path.read_text().replace(",ill", ",doubt", 2))
    assert any("'doubt' has 2 rows, fewer than the 4" in problem for problem in check(tmp_path).problems)

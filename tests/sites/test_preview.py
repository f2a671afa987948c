"""`fedtailor site check`: what it says would leave is what leaves, and all mistakes are named at once."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor._common.text import json_text
from fedtailor.messages.letters import Letter, read_letter
from fedtailor.methods import CATALOGUE
from fedtailor.sites import rehearsal
from fedtailor.sites.preview import Preview, preview
from fedtailor.sites.site_file import read_site
from tests.cli.calling import Call, contents
from tests.sites.parts import Federation, Recorded

OWN = "south"
HEADERS = {"hello": {"site", "declared"}, "begin": {"site", "fingerprint"}, "finish": {"site", "written"}}
Shapes = set[tuple[str, tuple[int, ...], str, int]]


def check(federation: Federation) -> Preview:
    site = read_site(federation.root / OWN / "site.toml")
    return preview(site, site.read_plan())


def letters_of(federation: Federation) -> list[tuple[Letter, Letter]]:
    """Run the federation in memory; all letters that one site got, with its answers."""
    channel = Recorded(federation.sites())
    federation.run(channel)
    pairs = zip(channel.letters, channel.answers, strict=True)
    return [(read_letter(letter), read_letter(answer)) for (site, letter), (_, answer) in pairs if site == OWN]


def shapes(tensors: Any) -> Shapes:
    return {(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes) for n, t in tensors.items()}


def said(tensors: Any) -> Shapes:
    return {(one.name, one.shape, one.dtype, one.bytes) for one in tensors}


def assert_exact(found: Preview, letters: list[tuple[Letter, Letter]]) -> None:
    """Compare every letter that passed with what the preview said of it."""
    assert found.problems == ()
    assert found.rehearsal is not None
    assert found.hello is not None
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
@pytest.mark.parametrize("method", sorted(name for name, of in CATALOGUE.items() if not of().predicts_by_more))
def test_what_leaves_is_what_was_shown(method: str, tmp_path: Path) -> None:
    """Every method, every letter: names, shapes, types and bytes of tensors, and each declared fact."""
    federation = Federation(tmp_path, method=method)
    before = check(federation)
    assert not (tmp_path / OWN / "private").exists()
    letters = letters_of(federation)
    found = check(federation)  # with the secret that the site has made by now
    assert_exact(found, letters)
    assert before.hello is not None
    assert found.hello is not None
    assert before.hello.model_copy(update={"data": found.hello.data}) == found.hello
    assert before.rehearsal == found.rehearsal
    assert (before.secret, found.secret) == (False, True)


FEATURES = {"f0": "number", "f1": "number", "ward": ["a", "b", "c", "d"]}


@pytest.mark.filterwarnings("ignore:Client:UserWarning")
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pgfed", {"participation": 2, "rounds": 6}),
        ("fedfomo", {"participation": 2, "rounds": 6}),
        ("lg-fedavg", {"parameters": {"warm_rounds": 2}, "rounds": 4}),
        ("fedavg", {"evaluate_model": "local", "evaluate_every": 2, "site": {"metrics": "rounded"}}),
        ("fedavg", {"evaluate_every": 2, "site": {"metrics": "none"}}),
        ("ditto", {"batch": "full", "class_weights": "balanced", "evaluate_train": True}),
        ("fedrep", {"labels": "own", "dtype": "float64"}),
        ("pflego", {"preprocessing": "per-client"}),
        ("fedper", {"fairness": "afl:0.1", "site": {"metrics": "none"}}),
        ("fedavg", {"loss": "mse", "site": {"label_column": "f0", "columns": "label=category"}}),
        ("fedavg", {"plan": {"classes": ["ill", "well", "unclear"], "features": FEATURES}}),
    ],
)
def test_it_is_exact_in_other_settings_too(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    federation = Federation(tmp_path, method=method, **settings)
    letters = letters_of(federation)
    assert_exact(check(federation), letters)


@pytest.mark.parametrize("kind", ["features", "images", "labels", "tokens"])
def test_it_is_exact_for_data_that_are_no_tables(kind: str, tmp_path: Path) -> None:
    model, loss = {"images": "cnn", "tokens": "gru"}.get(kind, "mlp:8"), "bce" if kind == "labels" else "cross-entropy"
    federation = Federation(tmp_path, method="fedper", model=model, loss=loss, rounds=2)
    rng = np.random.default_rng(0)
    for name in federation.data:
        x = rng.normal(size=(60, 5)).astype(np.float32)
        y = np.arange(60) % 3
        arrays: dict[str, Any] = {"x": x, "y": y}
        if kind == "images":
            arrays["x"] = rng.integers(0, 256, (60, 1, 16, 16)).astype(np.uint8)
        elif kind == "labels":
            arrays["y"] = np.stack([y == 0, y < 2], axis=1).astype(np.int64)
        elif kind == "tokens":
            arrays["x"] = np.concatenate([np.full((1, 7), 19), rng.integers(0, 20, (59, 7))])
        np.savez(tmp_path / name / "samples.npz", **arrays)
        own = f'name = "{name}"\nplan = "../federation.toml"\ndata = "samples.npz"\n'
        (tmp_path / name / "site.toml").write_text(own)
    letters = letters_of(federation)
    assert_exact(check(federation), letters)


def test_code_that_the_site_does_not_allow_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped.py").write_text("from pathlib import Path\nPath('was-here').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = check(Federation(tmp_path, method="shipped:Method"))
    assert [problem for problem in found.problems if 'allow = ["shipped:Method"]' in problem] == [*found.problems]
    assert not Path("was-here").exists()


def test_rounds_that_are_not_rehearsed_are_known_from_the_servers_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(
        tmp_path, method="lg-fedavg", parameters={"warm_rounds": 5}, rounds=8, evaluate_every=3, fairness="q:1"
    )
    letters = letters_of(federation)
    monkeypatch.setattr(rehearsal, "MOST_WORK", 9)  # three rounds
    found = check(federation).rehearsal
    assert found is not None
    assert found.rounds == 3
    ups = {round: said(each.up) for each in found.exchanges if each.asked == "train" for round in each.rounds}
    real = {a.header["round"]: shapes(b.tensors) for a, b in letters if a.header.get("asked") == "train"}
    assert ups == real
    assert ups[5] != ups[6]
    assert sorted(round for each in found.exchanges if each.asked != "train" for round in each.rounds) == [3, 6, 8]


def test_nothing_is_written_and_the_page_says_it_verbatim(tmp_path: Path, call: Call) -> None:
    federation = Federation(tmp_path, site={"metrics": "rounded"})
    before = contents(tmp_path)
    page, answer = (call("site", "check", f"{OWN}/site.toml", *more) for more in ((), ("--json",)))
    assert contents(tmp_path) == before
    assert (page.code, page.err, answer.code, answer.err) == (0, "", 0, "")
    for words in ("The site can join.", "90 rows", "rounded to two decimals", "each client's own", "mean by samples"):
        assert words in page.out
    found = check(federation)
    assert found.hello is not None
    assert found.rehearsal is not None
    for fact in found.hello.facts or ():
        assert all(repr(number) in page.out for number in (fact.mean, fact.squares))
    plain = json.loads(answer.out)
    assert plain == json.loads(json_text(found.plain()))
    assert plain["declared"] == found.hello.model_dump(mode="json")
    first = found.rehearsal.exchanges[0]
    assert plain["rounds"][0]["up"] == [asdict(one) | {"shape": list(one.shape)} for one in first.up]


CLASSES = {"classes": ["Ill", "healthy"]}


@pytest.mark.parametrize(
    ("plan", "site", "words"),
    [
        ({}, {"device": "cuda:9"}, "The device cuda:9 is not"),
        (CLASSES, {}, r"The class 'well' \(\d+ rows\) is not in the plan, which has Ill, healthy: leave"),
        (CLASSES, {}, r"The class 'ill' \(\d+ rows\) .*: write 'Ill', if that is meant"),
        ({"features": {"F0": "number"}}, {}, "no column 'F0', a number of the plan: rename the column 'f0', if that"),
        ({"features": {"f0": "number", "pulse": "number"}}, {}, "no column 'pulse', a number of the plan: add"),
        ({"features": {"sex": "number"}}, {}, "Line 2 .* has '[fm]' in column 'sex': give a number"),
        ({"features": {"ward": "category"}}, {"columns": "ward=ignore"}, 'say columns = "ward=category", or leave'),
        ({}, {"columns": "word=ignore"}, "has no column 'word'"),
        ({}, {"label_column": "outcome"}, "has no label column 'outcome'.*with label_column"),
        ({}, {"data": "nowhere.csv"}, "There is no file .*nowhere.csv"),
    ],
)
def test_each_mistake_is_named_with_what_to_do(
    plan: dict[str, Any], site: dict[str, Any], words: str, tmp_path: Path, call: Call
) -> None:
    found = check(Federation(tmp_path, plan=plan, site=site))
    assert any(re.search(words, problem) for problem in found.problems), found.problems
    assert not any("--" in problem for problem in found.problems)
    assert call("site", "check", f"{OWN}/site.toml").code == 1


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    """Of the settings, of the plan's features and of the cells of two columns, though reading stops at the first."""
    plan = {"features": {"f0": "number", "f1": "number", "f2": "number", "bmi": "number"}, "classes": ["ill", "well"]}
    federation = Federation(tmp_path, method="nowhere:Method", plan=plan, site={"device": "abacus"})
    path = tmp_path / OWN / "patients.csv"
    lines = path.read_text().splitlines()
    cells = lines[3].split(",")
    lines[3] = ",".join(["old", cells[1], "much", *cells[3:-1], "unclear"])
    path.write_text("\n".join(lines) + "\n")
    found = check(federation)
    cells_and_classes = ("'old' in column 'f0'", "'much' in column 'f2'", "The class 'unclear' (1 row)")
    wanted = ("allow = ", "device 'abacus'", "'bmi'", *cells_and_classes)
    assert len(found.problems) == len(wanted), found.problems
    assert all(words in problem for problem, words in zip(found.problems, wanted, strict=True)), found.problems
    assert {one.name for one in found.findings.columns if one.kind == "to mend"} == {"f0", "f2"}
    assert found.hello is None
    assert found.plain()["can_join"] is False


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, call: Call) -> None:
    federation = Federation(tmp_path, site={"colour": "red"})
    answer = call("site", "check", f"{OWN}/site.toml")
    assert answer.code == 2
    assert answer.err.startswith("Error: The site's file")
    (tmp_path / OWN / "site.toml").write_text(f'name = "{OWN}"\ndata = "patients.csv"\nplan = "../federation.toml"')
    (tmp_path / "federation.toml").write_text("name = 1")
    with pytest.raises(FedtailorError, match="plan"):
        check(federation)


def test_what_is_rare_is_not_declared(tmp_path: Path) -> None:
    federation = Federation(tmp_path, plan={"privacy": {"rare": 4}})
    path = tmp_path / OWN / "patients.csv"
    path.write_text(path.read_text().replace(",a,", ",burns,", 2))
    found = check(federation)
    ward = next(one for one in found.findings.columns if one.name == "ward")
    assert (ward.values, ward.rare) == (4, 1)
    assert "burns" not in json.dumps(found.plain()["declared"])
    path.write_text(path.read_text().replace(",ill", ",doubt", 2))
    assert any("'doubt' has 2 rows, fewer than the 4" in problem for problem in check(federation).problems)


def test_a_site_may_drop_lines_without_a_label(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('name = "north"\ndata = "patients.csv"\ndrop_unlabelled = true\n')
    assert read_site(tmp_path / "site.toml").table["drop_unlabelled"] is True

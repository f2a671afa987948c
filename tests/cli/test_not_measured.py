"""Clients that were not measured, in all that is shown of a run: no number passes for one of all clients."""

import json
from pathlib import Path

import pytest
from rich.progress import Progress

import fedtailor as ft
from fedtailor._common.errors import ClientFailure, ClientNote
from fedtailor.cli import display
from fedtailor.cli.presence import sites_line
from fedtailor.reporting.figures import clients, curves
from fedtailor.reporting.marks import styles
from fedtailor.reporting.tables import FORMATS, write_tables
from fedtailor.server.evaluation import chosen_round
from fedtailor.studies.client_results import client_table
from fedtailor.studies.summary import Summary, summarize
from tests.cli.calling import HOSTILE, Call, done
from tests.helpers import rewrite
from tests.server.changing import recorded, silent


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Client 1 is missing in the last round of Ditto, client 2 in the second of FedAvg, nobody with Local."""
    path = tmp_path_factory.mktemp("runs")
    recorded("local", silent(9, []), path / "local")
    recorded("fedavg", silent(2, [2]), path / "fedavg")
    recorded("ditto", silent(1, [3]), path / "ditto")
    return path


@pytest.fixture(scope="module")
def summary(runs: Path) -> Summary:
    return summarize([ft.load(runs / method) for method in ("local", "fedavg", "ditto")])


def words(text: str) -> str:
    return " ".join(text.split())


def test_show(call: Call, runs: Path) -> None:
    text = words(done(call("show", runs / "ditto")))
    assert "of 3 of 4" in text
    assert "The metrics are of 3 of 4 clients: client 1 was not measured in round 3. Rounds" in text
    assert "not measured" in text.partition("Rounds")[2]
    before = words(done(call("show", runs / "fedavg")))
    assert "The metrics are of" not in before  # the round that counts is complete
    assert "In 1 of 3 rounds not all clients were measured." in before
    assert "measured" not in words(done(call("show", runs / "local")))
    plain = json.loads(done(call("show", runs / "ditto", "--json")))
    assert plain["missing"] == ["1"]
    assert [client["client"] for client in plain["per_client"]] == [0, 2, 3]


def test_the_best_round_on_validation_data_is_marked_by_itself(runs: Path, tmp_path: Path) -> None:
    for missing in (1, 2, 3):
        result = recorded("local", silent(0, [missing]), tmp_path / str(missing))
        (row,) = [display._row(result, None)]
        best = result.chosen("best-validation")
        assert best is not None
        assert str(row[1]).endswith("of 3 of 4") == (missing == 3)
        assert str(row[4]).endswith("of 3 of 4") == (missing == best.round)


def test_the_result_itself(runs: Path) -> None:
    ditto, local = ft.load(runs / "ditto"), ft.load(runs / "local")
    assert "% of 3 of 4 clients (personal models, last round)" in repr(ditto)
    assert "<th>missing</th>" in ditto._repr_html_()
    assert "<th>missing</th>" not in local._repr_html_()
    assert (ditto.missing, local.missing, local.measured_for) == (["1"], [], "")
    assert ditto.to_pandas().missing.tolist() == [[], [], [1]]


def test_a_mean_of_several_rounds_misses_whoever_misses_in_one(runs: Path) -> None:
    rounds = ft.load(runs / "fedavg").rounds[:2] + ft.load(runs / "ditto").rounds[2:]
    mean = chosen_round(rounds, "last-5")
    assert mean is not None
    assert (mean.missing, mean.evaluated, mean.of_clients) == ([1, 2], 2, "of 2 of 4 clients")
    complete = chosen_round(ft.load(runs / "local").rounds, "last-5")
    assert complete is not None
    assert (complete.missing, complete.evaluated, complete.of_clients) == ([], 4, "")


def test_watch(call: Call, runs: Path) -> None:
    text = words(done(call("watch", runs / "ditto")))
    assert "of 3 of 4" in text
    assert "Clients not measured in ditto, seed 0: 1" in text
    assert "measured" not in words(done(call("watch", runs / "local")))


def test_the_bar_of_a_run(runs: Path) -> None:
    with Progress(disable=True) as bars:
        bar = display.RoundProgress(bars, "ditto", 3)
        bar.metric = ft.load(runs / "ditto").metric
        said = []
        for record in ft.load(runs / "ditto").rounds:
            bar.round(record)
            said.append(bars.tasks[0].fields["status"])
    assert ["of 3 of 4 clients" in text for text in said] == [False, False, True]


def test_comparisons_name_it(summary: Summary, tmp_path: Path) -> None:
    note = "Not measured in the round that counts: Ditto: client 1. These averages are of the other clients."
    rounds = "In 2 of 9 rounds not all clients were measured."
    write_tables(summary, tmp_path)
    for ending in set(FORMATS) - {"csv"}:
        text = words((tmp_path / f"table.{ending}").read_text())
        assert text.count("(3 of 4 clients)") == 1
        assert note in text
        assert rounds in text
    lines = json.loads((tmp_path / "result.json").read_text())["lines"]
    assert [line["missing"] for line in lines] == [0, 0, 1]
    table = client_table(summary)
    assert note in table.caption
    assert [row.values[2] is None for row in table.rows] == [False, True, False, False]
    assert "measured" not in summarize([ft.load(summary.lines[0].results[0].path or "")]).caption


def test_a_client_that_no_line_measured_has_a_row_all_the_same(tmp_path: Path) -> None:
    result = recorded("local", silent(1, [3]), tmp_path / "run")
    table = client_table(summarize([result]))
    assert [row.name for row in table.rows] == ["0", "1", "2", "3"]
    assert table.rows[1].values == (None,)


def test_the_report(summary: Summary, runs: Path, tmp_path: Path) -> None:
    look = styles([(line.title, line.method) for line in summary.lines])
    figure = clients(summary, look)
    assert figure is not None
    assert [panel.title.endswith("(3 of 4 clients)") for panel in figure.panels] == [False, False, True]
    assert all("In some rounds not all clients were measured" in each.caption for each in curves(summary, look))
    page = ft.report([ft.load(runs / "ditto")], to=tmp_path / "page.html").read_text()
    assert "Not measured in the round that counts: Ditto: client 1." in page
    assert "of 3 of 4 clients</td>" in page


def test_notes_are_no_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    with display.progress_bars():
        warnings.warn("it is back", ClientNote, stacklevel=1)
        warnings.warn("it is gone", ClientFailure, stacklevel=1)
    assert capsys.readouterr().err.splitlines() == ["Note: it is back", "Warning: it is gone"]


def test_a_run_that_names_missing_clients_that_do_not_exist_is_refused(call: Call, tmp_path: Path) -> None:
    recorded("local", silent(1, [3]), tmp_path / "run")
    rewrite(tmp_path / "run" / "rounds.jsonl", missing=[7])
    answer = call("show", tmp_path / "run")
    assert (answer.code, answer.out) == (2, "")
    assert "it names clients that do not exist" in answer.err
    assert call("watch", tmp_path / "run").code == 0


def test_records_of_an_older_version_miss_nobody(tmp_path: Path) -> None:
    result = recorded("local", silent(9, []), tmp_path / "run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    old = [{name: value for name, value in json.loads(line).items() if name != "missing"} for line in lines]
    again = [type(result.rounds[0]).from_json(json.dumps(record).encode()) for record in old]
    assert again == result.rounds


# --- the sites of a federation ---


def test_watch_says_which_sites_are_there(call: Call, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    status = tmp_path / "run" / "status.json"
    sites = {"north": "present", "south": "it is \x1b[31mnot connected", "[bold]west": "x" * 1000}
    status.write_text(json.dumps({"phase": "waiting", "round": 0, "sites": sites}))
    answer = call("watch", tmp_path / "run")  # before the run begins
    assert not HOSTILE.search(answer.out)
    text = done(answer).replace("\n", "")
    assert "1 of 3 sites present (waiting). Silent: south (it is \\x1b[31mnot connected), [bold]west (xxx" in text
    assert len(text) < 300
    status.write_text(json.dumps({"phase": "round", "round": 12, "sites": dict.fromkeys("abc", "present")}))
    assert sites_line(tmp_path / "run") == "3 of 3 sites present (round 12)."
    status.write_text(json.dumps({"phase": "round\n", "round": 1, "sites": {"a\nb": "\x1b[2J\n"}}))
    assert sites_line(tmp_path / "run") == r"0 of 1 sites present (round\n). Silent: a\nb (\x1b[2J\n)."
    many = {f"s{number}": "gone" for number in range(30)}
    status.write_text(json.dumps({"phase": "round", "round": 1, "sites": many}))
    assert sites_line(tmp_path / "run").endswith("s9 (gone), and 20 more.")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"sites": 3}',
        '{"sites": {}}',
        '{"sites": [1], "phase": ""}',
        "[" * 10**5,
        '{"phase": 1}',
    ],
)
def test_a_status_that_cannot_be_read_is_left_out(content: str, call: Call, tmp_path: Path) -> None:
    recorded("local", silent(9, []), tmp_path / "run")
    before = done(call("watch", tmp_path / "run"))
    (tmp_path / "run" / "status.json").write_text(content)
    assert done(call("watch", tmp_path / "run")) == before
    assert call("watch", tmp_path / "nowhere").code == 2

"""The table of clients × methods: every number by hand, on made-up runs."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor._common.text import SafeConsole
from fedtailor.reporting.client_tables import clients_csv, clients_html, rich_clients
from fedtailor.reporting.conclusion import verdict
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.functions import Table
from fedtailor.reporting.page import html, prepare
from fedtailor.reporting.tables import write_tables
from fedtailor.studies.client_results import ClientTable, client_table
from fedtailor.studies.summary import Summary, summarize
from fedtailor.training.metrics import LOSS
from tests.helpers import rewrite
from tests.reporting.made_up import made_up

HOSTILE = "\x1b]0;x\x07<b>&=1"


def renamed(result: ft.RunResult, names: list[str], **changes: object) -> ft.RunResult:
    assert result.path is not None
    rewrite(result.path / "partition.json", clients=names, **changes)
    return ft.load(result.path)


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """Three clients. With seed 1 the first two have changed places, as new clients can make them do."""
    local = [made_up(tmp_path / f"local{s}", "local", [[0.5, 0.5, 0.9]], s) for s in (0, 1)]
    ditto = [made_up(tmp_path / "ditto0", "ditto", [[0.6, 0.4, 0.9]], 0)]
    ditto.append(made_up(tmp_path / "ditto1", "ditto", [[0.8, 0.8, None]], 1))
    names = (["north", "=south", HOSTILE], ["=south", "north", HOSTILE])
    both = [renamed(result, names[result.experiment.seed]) for result in (*local, *ditto)]
    return summarize(both)


def printed(table: ClientTable, width: int = 100) -> str:
    console = SafeConsole(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(rich_clients(table, width, "clients.csv"))
    return captured.get()


def test_each_client_by_name_mean_over_seeds(summary: Summary) -> None:
    table = client_table(summary)
    assert table.titles == ("local", "ditto")
    values = {row.name: row.values for row in table.rows}
    assert values == {
        "north": (0.5, pytest.approx((0.6 + 0.8) / 2)),
        "=south": (0.5, pytest.approx((0.4 + 0.8) / 2)),
        HOSTILE: (0.9, 0.9),  # ditto has it with one seed
    }
    assert [row.best for row in table.rows] == [(False, True), (False, True), (True, True)]
    assert [(row.n_train, row.n_test) for row in table.rows] == [(20, 20)] * 3
    assert table.overall == tuple(line.accuracy for line in summary.lines)
    assert "Best in general: Ditto (71.67)." in table.caption
    assert "Best for so many of 3 clients (equals count for each): Ditto 3, Local 1." in table.caption


def test_where_there_is_no_accuracy_the_loss_counts(tmp_path: Path) -> None:
    results = [made_up(tmp_path / name, name, [[None, None]]) for name in ("local", "ditto")]
    for result in results:
        assert result.path is not None
        losses = (1.0, 2.0) if result.experiment.method == "local" else (3.0, 0.5)
        measured = {str(c): {"test": {"accuracy": None, "loss": loss}} for c, loss in enumerate(losses)}
        rewrite(result.path / "clients.jsonl", results=measured)
    table = client_table(summarize([ft.load(tmp_path / name) for name in ("local", "ditto")]))
    assert table.metric == LOSS
    assert [row.values for row in table.rows] == [(1.0, 3.0), (2.0, 0.5)]
    assert [row.best for row in table.rows] == [(True, False), (False, True)]
    assert "Test loss of each client." in table.caption


def test_samples_are_means_over_seeds_and_the_partition_is_said_to_differ(tmp_path: Path) -> None:
    results = [made_up(tmp_path / f"local{s}", "local", [[0.5, 0.5]], s) for s in (0, 1)]
    assert client_table(summarize(results)).same
    results[1] = renamed(results[1], ["0", "1"], train=[[1, 2], [10, 10]])
    table = client_table(summarize(results))
    assert [row.n_train for row in table.rows] == [(20 + 3) / 2, 20]
    assert not table.same
    assert "The partition differs from seed to seed" in table.caption


def test_printed(summary: Summary) -> None:
    text = printed(client_table(summary))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "north 20 20 50.00 70.00 Ditto" in rows
    assert r"\x1b]0;x\x07<b>&=1 20 20 90.00 90.00 Local, Ditto" in rows
    assert "all 63.33 71.67 Ditto" in rows
    assert "\x1b" not in text


def test_lines_that_do_not_fit_the_page_come_below(tmp_path: Path) -> None:
    results = [made_up(tmp_path / str(n), "ditto", [[n / 10, 0.5]], parameters={"lam": n}) for n in range(1, 9)]
    text = printed(client_table(summarize(results)), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert len(re.findall("client +train +test", text)) > 1
    assert all(f"lam={n}" in text and f"{10 * n}.00" in text for n in range(1, 9))


def test_of_many_clients_the_worst_and_the_best_are_printed(tmp_path: Path) -> None:
    accuracies: list[float | None] = [n / 100 for n in range(31)]
    made = made_up(tmp_path / "local", "local", [accuracies])
    text = printed(client_table(summarize([made])))
    shown = [line.split()[0] for line in text.splitlines() if re.match(r" ?(\d+|…) ", line)]
    assert shown == [*map(str, range(10)), "…", *map(str, range(21, 31))]
    assert "the worst and the best 10 of 31, by Local" in text
    assert "All are in clients.csv." in text


def test_as_csv_a_name_is_no_formula(summary: Summary) -> None:
    rows = list(csv.DictReader(io.StringIO(clients_csv(client_table(summary)))))
    assert [row["client"] for row in rows] == ["north", "'=south", HOSTILE]
    assert [float(row["ditto"]) for row in rows] == pytest.approx([0.7, 0.6, 0.9])
    assert [row["best"] for row in rows] == ["ditto", "ditto", "local, ditto"]


def test_as_html_a_name_is_text(summary: Summary) -> None:
    page = clients_html(client_table(summary))
    assert "&lt;b&gt;&amp;=1</th>" in page
    assert "<b>" not in page
    assert '<td data-value="0.5">50.00</td>' in page
    assert "<strong>70.00</strong>" in page


def test_files_and_page_have_it(summary: Summary, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_tables(summary, out)
    table = client_table(summary)
    assert (out / "clients.csv").read_text() == clients_csv(table)
    record = json.loads((out / "result.json").read_text())["clients"]
    assert [client["name"] for client in record["clients"]] == ["north", "=south", HOSTILE]
    assert record["clients"][0]["values"] == {"local": 0.5, "ditto": pytest.approx(0.7)}
    assert clients_html(table) in html(prepare(read_runs([tmp_path])))


def test_in_python(summary: Summary) -> None:
    pytest.importorskip("pandas")
    table = Table(summary)
    assert table.clients == client_table(summary)
    frame = table.to_pandas("clients")
    assert frame.loc["north", "ditto"] == pytest.approx(0.7)
    assert list(frame.columns) == ["train", "test", "local", "ditto"]


def test_of_a_grid_readers_see_the_chosen_line_of_each_method(tmp_path: Path) -> None:
    made = [
        made_up(tmp_path / f"{method}{lr}", method, [[accuracy, 0.5]], lr=lr, validation_accuracy=validation)
        for method, lr, accuracy, validation in (
            *(("ditto", 0.1, 0.9, 0.2), ("ditto", 0.2, 0.7, 0.8)),
            *(("apfl", 0.1, 0.6, 0.7), ("apfl", 0.2, 0.8, 0.3)),
        )
    ]
    table = client_table(summarize(made))
    page, text = clients_html(table), printed(table)
    for shown in (page, text):
        assert "Ditto, lr=0.2" in shown
        assert "APFL, lr=0.1" in shown
        assert "Ditto, lr=0.1" not in shown
        assert "APFL, lr=0.2" not in shown
        assert "the line is shown that validation data choose" in shown
    assert re.search(r"Best for so many of 2 clients .*: Ditto, lr=0\.2 2, APFL, lr=0\.1 1\.", table.caption)
    assert page.count("<td") == (2 + 2) * 3  # samples and values of two clients and of all
    assert clients_csv(table).splitlines()[0].count("lr=") == 4  # the file has all lines


def test_of_a_grid_without_validation_data_all_lines_are_shown(tmp_path: Path) -> None:
    made = [made_up(tmp_path / str(lr), "ditto", [[lr, 0.5]], lr=lr) for lr in (0.1, 0.2)]
    assert all(f"lr={lr}" in printed(client_table(summarize(made))) for lr in (0.1, 0.2))


def test_a_setting_that_is_off_is_named_as_a_grid_names_it(tmp_path: Path) -> None:
    made = [made_up(tmp_path / str(n), "ditto", [[0.5, 0.5]], attack=attack) for n, attack in enumerate((None, "nan"))]
    assert [line.title for line in summarize(made).lines] == ["ditto, attack=none", "ditto, attack=nan"]


def test_lines_under_attack_are_no_competitors_of_those_without_one(tmp_path: Path) -> None:
    made = [
        made_up(tmp_path / f"{method}{number}", method, [[accuracy - 0.1 * number, 0.5]], attack=attack)
        for method, accuracy in (("fedavg", 0.8), ("ditto", 0.9))
        for number, attack in enumerate((None, "scaling", "sign-flip"))
    ]
    summary = summarize(made)
    assert [line.title for line in summary.lines if line.ranked] == ["fedavg, attack=none", "ditto, attack=none"]
    assert [line.title for line in summary.lines if line.p is not None] == ["fedavg, attack=none"]
    assert "Lines under attack are not ranked or tested beside those without one." in summary.caption
    assert "scaling" not in verdict(summary)
    text = printed(client_table(summary))
    assert "attack=none" in text
    assert "attack=scaling" not in text
    assert "Lines under attack are not shown" in " ".join(text.split())
    attacked = summarize([run for run in made if run.experiment.attack is not None])
    assert [line.ranked for line in attacked.lines] == [True, False, True, False]


def test_of_many_lines_the_best_are_printed(tmp_path: Path) -> None:
    made = [made_up(tmp_path / str(n), "ditto", [[n / 100, 0.5]], parameters={"lam": n}) for n in range(1, 15)]
    text = printed(client_table(summarize(made)), width=2000)
    assert sorted(map(int, re.findall(r"Ditto, lam=(\d+)\b", text.splitlines()[3]))) == list(range(3, 15))
    assert "Clients: the best 12 of 14 lines" in text
    assert "All are in clients.csv." in text

"""Names, paths and messages from files: shown as they are, never taken for markup or for commands to the terminal."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fedtailor._common.text import SafeConsole, json_text, plain_table, spreadsheet_cell, visible
from tests.cli.calling import HOSTILE, Answer, Call, done

CLIENT = "\x1b]0;owned\x07[bold red]x[/]"
CLASSES = ["[/red]", "=1+2", "\x9b31mred\u202e", "a\nb"]
RUN = "runs[1]"
SHORT = ("--rounds", 1, "--epochs", 1, "--engine", "in-process", "--model", "mlp:4")


def harmless(answer: Answer) -> str:
    text = answer.out + answer.err
    assert not HOSTILE.search(text), repr(HOSTILE.search(text))
    assert "Traceback" not in text
    return text


@pytest.fixture
def data(call: Call) -> str:
    """A data set of hostile names, in a directory with brackets in its name."""
    Path("[bold]x/[").mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(80, 3)),
        "y": np.array(CLASSES * 20),
        "client": np.array([CLIENT] * 40 + ["other"] * 40),
    }
    np.savez("[bold]x/[/]own.npz", **arrays)
    return "[bold]x/[/]own.npz"


@pytest.fixture
def run(call: Call, data: str) -> str:
    harmless(call("run", "fedavg", "--data", data, *SHORT, "--out", RUN))
    return RUN


def test_data(call: Call, data: str) -> None:
    shown = harmless(call("data", data))
    assert r"\x1b]0;owned\x07[bold red" in shown
    assert "[/red]" in shown
    assert "]own.npz: 80 samples" in shown
    plain = harmless(call("data", data, "--json"))
    assert json.loads(plain)["clients"] == [CLIENT, "other"]


def test_run_show_and_watch(call: Call, data: str) -> None:
    shown = harmless(call("run", "fedavg", "--data", data, *SHORT, "--out", RUN))
    assert "Recorded in runs[1]" in shown
    assert "[bold]x/[/]own.npz, 1 of 1 rounds" in shown
    assert r"\x1b]0;owned\x07[bold red]x[/]" in harmless(call("show", RUN))
    assert json.loads(harmless(call("show", RUN, "--json")))["per_client"][0]["name"] == CLIENT
    assert "runs[1]" in harmless(call("watch", RUN))
    assert "[bold]nowhere is not a run directory" in harmless(call("show", "[bold]nowhere"))
    assert r"\x1b[31mx" in harmless(call("show", "\x1b[31mx"))


def test_export_and_predict(call: Call, data: str, run: str) -> None:
    assert "in models[/]" in harmless(call("export", run, "--to", "models[/]"))
    assert r"client \x1b]0;owned\x07[bold red]x[/]:" in harmless(call("export", run, "--client", 0, "--to", "one[1]"))
    (file,) = Path("one[1]").glob("*.safetensors")
    shown = harmless(call("predict", file, "--data", data, "--out", "found[0].csv"))
    assert "All predictions are in found[0].csv" in shown
    assert "[bold]x/[/]own.npz: 80 samples" in shown
    json.loads(harmless(call("predict", file, "--data", data, "--json")))
    with Path("found[0].csv").open(newline="") as written:
        rows = list(csv.DictReader(written))
    assert {row["label"] for row in rows} == {"[/red]", "'=1+2", *CLASSES[2:]}
    np.savez("other.npz", x=np.zeros((2, 3)), y=np.array(["[red]new[/]", "\x1b[0m"]))
    assert r"does not know the labels \x1b[0m, [red]new[/]" in harmless(call("predict", file, "--data", "other.npz"))


def test_adapt_and_report(call: Call, data: str, run: str) -> None:
    shown = harmless(call("adapt", run, "--data", data, "--epochs", 1, "--to", "new[1]"))
    assert "In new[1]: 2 models" in shown
    assert r"\x1b]0;owned\x07[bold red]x[/]" in shown
    assert "page[2].html" in harmless(call("report", run, "--out", "page[2].html"))


def test_clients_that_fail_or_join(call: Call, data: str) -> None:
    Path("mine.py").write_text(
        "import fedtailor as ft\n\nclass Picky(ft.Method):\n    def train(self, client, message):\n"
        "        assert client.id\n        return {'theta': client.descend(message['theta'])}\n"
    )
    harmless(call("run", "mine:Picky", "--data", data, *SHORT, "--out", RUN))
    watched = harmless(call("watch", RUN))
    assert r"Clients that failed in mine:Picky, seed 0: \x1b]0;owned\x07[bold red]x[/] (1 of 1 rounds)" in watched
    row = next(line for line in harmless(call("show", RUN)).splitlines() if r"\x1b]0;owned" in line)
    assert row.split()[-2:] == ["1", "1"]  # called, and failed
    np.savez("late.npz", x=np.zeros((9, 3)), y=np.array(CLASSES[:3] * 3), client=np.array(["\x1b[0m late"] * 9))
    words = ("resume", RUN, "--rounds", 2, "--add-client", "late.npz", "--trust")
    assert r"joined after round 1 (\x1b[0m late)" in " ".join(harmless(call(*words)).split())
    assert r"\x1b[0m late" in harmless(call("show", RUN))


def test_compare(call: Call, data: str) -> None:
    words = ("compare", "local", "fedavg", "--data", data, *SHORT, "--seeds", "0", "--out", "table[/]")
    assert "Recorded in table[/]: table.txt" in harmless(call(*words))
    for file in Path("table[/]").glob("table.*"):
        assert not HOSTILE.search(file.read_text())
    assert r"\x1b]0;owned\x07[bold red]x[/]" in harmless(call(*words))
    assert r"\x1b]0;owned\x07[bold red]x[/]" in harmless(call("show", "table[/]"))
    shown = json.loads(harmless(call("show", "table[/]", "--json")))
    assert [client["name"] for client in shown["clients"]["clients"]] == [CLIENT, "other"]


def test_advise(call: Call, data: str) -> None:
    words = ("advise", "--data", data, "--budget", 1, "--method", "fedavg", "--method", "local", "--model", "mlp:4")
    shown = harmless(call(*words))
    assert "--data '[bold]x/[/]own.npz'" in shown


def test_a_failed_run_of_a_hostile_message(call: Call) -> None:
    Path("mine.py").write_text(
        "import fedtailor as ft\n\nclass Bad(ft.Method):\n    def train(self, client, message):\n"
        "        raise ValueError('\\x1b]0;owned\\x07[/red] [bold]')\n"
    )
    shown = harmless(call("run", "mine:Bad", "--clients", 2, *SHORT))
    assert r"\x1b]0;owned\x07[/red] [bold]" in shown


def test_a_terminal_gets_nothing_but_our_own_commands() -> None:
    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=True, width=100)
    name = CLIENT + ":smile: \r\x08\x9b1m"
    table = plain_table(name, caption=name)
    table.add_column(name)
    table.add_row(name)
    table.add_row(Text(name))
    old: Table = Table(title=name)
    old.add_column(name)
    console.print(name, table, old, Text(name))
    console.print(name, style="bold")
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bars:
        bars.add_task(name, total=1)
    written = stream.getvalue()
    ours = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", written)  # colours and the cursor
    assert not HOSTILE.search(ours.replace("\r", ""))
    assert ":smile:" in written
    assert "[bold red]" in written


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 中", "plain ä 中"),
        ("\x1b[0m", r"\x1b[0m"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\udc80\x7f\x85", r"\udc80\x7f\x85"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_json_can_be_read_again() -> None:
    for text in ("\x1b\x9b\u202e\x7f ä", "\ud800", "a\nb"):
        written = json_text({"name": text})
        assert json.loads(written) == {"name": text}
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", written)


@pytest.mark.parametrize("text", ["=1+2", "+x", "-a", "@sum", "\tx", "\rx", "＝1"])
def test_formulas_get_an_apostrophe(text: str) -> None:
    assert spreadsheet_cell(text) == "'" + text


@pytest.mark.parametrize("value", ["-1", "+3.5", "-1e5", "plain", "", 3, -2.5, None])
def test_numbers_and_names_stay(value: object) -> None:
    assert spreadsheet_cell(value) == value


def test_paths_with_brackets_are_written_out(call: Call) -> None:
    Path("[/b]").mkdir(parents=True)
    assert "[/b]" in done(call("data", "--data-dir", "[/b]"))

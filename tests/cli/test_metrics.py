"""--metric and --patience on the command line: in every table, caption and file."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.calling import Call, done, refusal

SMALL = ("--clients", 4, "--rounds", 3, "--epochs", 1, "--model", "mlp:16", "--engine", "in-process", "--seed", 1)
COMPARED = (*SMALL[:-2], "--seeds", "0")
CODE = """
from pathlib import Path

Path("it-ran").touch()


def missed(outputs, targets):
    return (outputs.argmax(1) != targets).sum()


missed.higher_is_better = False
"""


@pytest.fixture
def own(call: Call) -> Call:
    """In the current directory: a module with a metric."""
    Path("tests_metric.py").write_text(CODE)
    return call


def test_a_metric_of_the_users_own(own: Call) -> None:
    text = done(own("run", "fedavg", *SMALL, "--metric", "tests_metric:missed", "--out", "run"))
    assert re.search(r"method +missed +± std", text)
    assert "Test missed (lower is better) of personal models" in text
    record = json.loads(Path("run/result.json").read_text())
    assert (record["metric"], record["higher_is_better"]) == ("tests_metric:missed", False)
    assert record["value"] == record["last"]["own"] > 0
    sys.modules.pop("tests_metric")
    Path("it-ran").unlink()
    shown = done(own("show", "run"))
    rows = shown.partition("Clients, the worst")[2].rpartition("───")[2].split("\n")[1:5]
    clients = [float(line.split()[1]) for line in rows]
    assert len(clients) == 4
    assert clients == sorted(clients, reverse=True)  # the worst first
    assert "Missed of fedavg, seed 1" in done(own("watch", "run"))
    done(own("report", "run", "--out", "page.html"))
    assert "The best" not in Path("page.html").read_text(encoding="utf-8").partition("<h2>Results")[2][:2000]
    assert not Path("it-ran").exists()  # looking runs nothing
    said = refusal(own, "resume", "run", "--rounds", 4)
    assert "names code of its own (metric tests_metric:missed)" in said
    assert not Path("it-ran").exists()
    done(own("resume", "run", "--rounds", 4, "--trust"))
    assert Path("it-ran").exists()


def test_a_comparison_by_another_metric(call: Call) -> None:
    text = done(call("compare", "local", "fedavg", *COMPARED, "--metric", "auc", "--out", "here"))
    assert re.search(r"method +AUC", text)
    assert "Test AUC of personal models" in text
    record = json.loads(Path("here/result.json").read_text())
    assert record["metric"] == "auc"
    values = {line["title"]: line["value"] for line in record["lines"]}
    assert {line["title"] for line in record["lines"] if line["best"]} == {max(values, key=lambda title: values[title])}
    assert "AUC" in done(call("watch", "here"))
    again = done(call("compare", "local", "fedavg", *COMPARED, "--metric", "auc", "--target", 0.5, "--out", "here"))
    assert "rounds" in again
    assert json.loads(Path("here/result.json").read_text())["target"] == 0.5


def test_a_run_that_stops_early_says_so_everywhere(call: Call) -> None:
    words = ("run", "fedavg", *SMALL, "--rounds", 30, "--lr", 0.5, "--validation", 0.3, "--patience", 1, "--out", "run")
    text = done(call(*words))
    record = json.loads(Path("run/result.json").read_text())
    assert record["finished"] is True
    assert record["rounds"] < 30
    assert re.fullmatch(r"stopped after round \d+: no better validation accuracy since round \d+", record["stopped"])
    said = " ".join(text.split())
    assert f"fedavg: {record['stopped']}." in said
    assert "best round on validation data" in said
    shown = done(call("show", "run"))
    assert f"fedavg: {record['stopped']}." in " ".join(shown.split())
    assert "Not finished" not in shown
    assert json.loads(done(call("show", "run", "--json")))["stopped"] == record["stopped"]
    assert f"Finished. It {record['stopped']}." in " ".join(done(call("watch", "run")).split())
    done(call("report", "run", "--out", "page.html"))
    page = Path("page.html").read_text(encoding="utf-8")
    assert f"{record['rounds']} of 30, stopped early" in page
    assert "is not finished" not in page


def test_advice_by_another_metric(call: Call) -> None:
    words = ("advise", *SMALL[:-2], "--method", "local", "--budget", 1, "--metric", "log_loss")
    text = done(call(*words))
    assert re.search(r"method +rounds +log loss", text)
    answer = json.loads(done(call(*words, "--json")))
    assert (answer["metric"], answer["higher_is_better"]) == ("log_loss", False)
    values = [one["log_loss"] for one in answer["race"]]
    assert values == sorted(values)
    assert answer["next"] is None or "--metric log_loss" in answer["next"]


MORE = (
    CODE
    + """

def largest(outputs, targets):
    return outputs.max()
"""
)


def test_by_name_on_the_command_line_and_in_files(call: Call) -> None:
    Path("tests_own_metrics.py").write_text(MORE)
    both = "missed=tests_own_metrics:missed, largest=tests_own_metrics:largest"
    done(call("run", "ditto", *SMALL, "--metrics", both, "--out", "run"))
    written = Path("run/experiment.toml").read_text()
    assert (
        '[evaluation.metrics]\nmissed = "tests_own_metrics:missed"\nlargest = "tests_own_metrics:largest"\n' in written
    )
    done(call("run", "run/experiment.toml", "--out", "again"))
    assert Path("run/clients.jsonl").read_bytes() == Path("again/clients.jsonl").read_bytes()
    Path("short.toml").write_text('method = "ditto"\nmetrics = {missed = "tests_own_metrics:missed"}\n')
    done(call("run", "short.toml", *SMALL, "--out", "short"))
    Path("it-ran").unlink()
    shown = done(call("show", "run"))
    assert shown.count("missed") == shown.count("largest") == 2  # in the rounds and in the clients
    record = json.loads(done(call("show", "run", "--json")))
    assert record["per_client"][0]["more"].keys() == {"missed", "largest"}
    assert record["last"]["missed"] > 0
    done(call("report", "run", "--out", "page.html", "--columns", "accuracy,missed,bytes"))
    assert ">missed<" in Path("page.html").read_text(encoding="utf-8")
    assert "no column 'mised': did you mean 'missed'" in refusal(call, "report", "run", "--columns", "mised")
    assert not Path("it-ran").exists()  # looking runs nothing
    assert "names code of its own (metric missed tests_own_metrics:missed" in refusal(
        call, "resume", "run", "--rounds", 3
    )

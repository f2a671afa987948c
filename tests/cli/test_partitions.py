"""--partition with a CSV file or a function of the user's own."""

import json
from pathlib import Path

from tests.cli.calling import Call, done, refusal


def test_it_is_shown_and_run_by_the_command_line(call: Call) -> None:
    Path("split.csv").write_text("sample,client\n" + "".join(f"{n},{'abc'[n % 3]}\n" for n in range(1797)))
    text = done(call("data", "digits", "--partition", "split.csv"))
    assert "1,797 samples, 3 clients" in text
    about = json.loads(done(call("data", "digits", "--partition", "split.csv", "--json")))
    assert about["clients"] == ["a", "b", "c"]
    Path("own_partition.py").write_text("def halves(labels, clients, rng):\n    return labels // 5\n")
    words = ("--rounds", 1, "--epochs", 1, "--model", "mlp:4", "--engine", "in-process")
    assert "2 clients" in done(call("data", "digits", "--partition", "own_partition:halves"))
    done(call("run", "fedavg", *words, "--partition", "own_partition:halves", "--out", "run"))
    done(call("report", "run", "--out", "page.html"))
    assert "Partition: own_partition:halves." in Path("page.html").read_text(encoding="utf-8")
    said = refusal(call, "resume", "run", "--rounds", 2)
    assert "names code of its own (partition own_partition:halves)" in said
    assert "There is no file no.csv for the partition" in refusal(call, "data", "digits", "--partition", "no.csv")

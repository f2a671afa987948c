"""What people see of privacy: ε in tables, the display, the report and the record; studies over budgets; real sites."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor._common.text import epsilon_text
from fedtailor.sites.plan import read_plan
from fedtailor.studies.conditions import conditions
from tests.cli.calling import Call, call

__all__ = ["call"]

SETTINGS: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 1, "model": "mlp:8", "max_train": 30}
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]


def test_epsilon_is_shown_rounded_up() -> None:
    assert epsilon_text(None) == "∞"
    assert epsilon_text(0.0) == "0"
    assert epsilon_text(7.9812) == "7.99"
    assert epsilon_text(0.85467) == "0.855"
    assert epsilon_text(8.0) == "8"


def test_the_table_of_a_run_says_what_epsilon_means(call: Call, tmp_path: Path) -> None:
    done = call("run", "fedavg", "local", "--privacy", "client, clip=0.5, noise=2", *OPTIONS, "--out", tmp_path / "r")
    assert done.code == 0, done.err
    spent = ft.load(tmp_path / "r" / "fedavg").epsilon
    assert spent is not None
    assert epsilon_text(spent) in done.out
    words = " ".join(done.out.split())
    assert "clip 0.5, noise 2 times the clip, by the server" in words
    assert "hides whether a whole client took part" in words
    assert "not from the server" in words
    assert "drawn from the experiment's seed, as this is a simulation" in words
    assert "Metrics are not covered by it" in words
    record = json.loads((tmp_path / "r" / "fedavg" / "result.json").read_text())
    assert record["epsilon"] == pytest.approx(spent)
    assert record["epsilon_rdp"] >= record["epsilon"]
    assert "ε" in call("show", tmp_path / "r" / "fedavg").out


@pytest.mark.slow
def test_a_comparison_over_budgets_is_one_command(call: Call, tmp_path: Path) -> None:
    place = tmp_path / "c"
    asked = [
        "compare",
        "local",
        "fedavg",
        "--privacy",
        "client, clip=0.5",
        "--grid",
        "epsilon=inf|16|4",
        "--seeds",
        "0",
    ]
    done = call(*asked, *OPTIONS, "--out", place)
    assert done.code == 0, done.err
    assert "over the privacy budget" in " ".join(done.out.split())
    page = (place / "table.md").read_text()
    assert "| method | ∞ | 16 | 4 |" in page
    assert "ε" in (place / "table.txt").read_text()
    report = call("report", place, "--out", tmp_path / "page.html")
    assert report.code == 0, report.err
    assert "Over the privacy budget" in (tmp_path / "page.html").read_text()


def test_lines_under_other_conditions_are_not_chosen_from() -> None:
    runs = [ft.run("fedavg", **SETTINGS, privacy="client, clip=0.5", epsilon=epsilon) for epsilon in ("inf", 16, 4)]
    from fedtailor.studies.summary import summarize

    summary = summarize(runs)
    assert [line.chosen for line in summary.lines] == [None] * 3
    assert [line.epsilon is None for line in summary.lines] == [True, False, False]
    (table,) = conditions(summary)
    assert table.columns == ["∞", "16", "4"]
    assert table.rows["FedAvg"] == pytest.approx([line.value for line in summary.lines])


def test_results_under_attack_are_of_the_same_clients_as_without() -> None:
    from fedtailor.studies.summary import summarize

    plain = ft.run("fedavg", **SETTINGS)
    attacked = ft.run("fedavg", **SETTINGS, attack="sign-flip, clients=1,2")
    (table,) = conditions(summarize([plain, attacked]))
    honest = [plain.per_client[client].accuracy for client in (0, 3)]
    assert table.columns == ["none", "sign-flip, clients=1,2"]
    assert table.rows["FedAvg"][0] == pytest.approx(sum(honest) / 2)  # type: ignore[arg-type]
    assert table.rows["FedAvg"][1] == pytest.approx(attacked.value)


@pytest.mark.parametrize("given", ["epsilon", "=1|2", "epsilon=", "nonsense=1|2"])
def test_a_wrong_grid_is_refused(call: Call, given: str) -> None:
    done = call("compare", "fedavg", "--grid", given)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_a_plan_must_name_the_noise(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    text = 'name = "trial"\nsites = ["a", "b"]\n[experiment]\nmethod = "fedavg"\nprivacy = "{}"\n'
    path.write_text(text.format("client, clip=1.0"))
    with pytest.raises(FedtailorError, match="does not say its noise"):
        read_plan(path)
    path.write_text(text.format("client, clip=1.0, noise=0.8"))
    assert read_plan(path).terms().privacy == "client, noise=0.8"


def test_nobody_joins_a_private_run(tmp_path: Path) -> None:
    settings = {**SETTINGS, "new_clients": 1}
    ft.run("fedavg", **settings, privacy="client, noise=2.0", out=tmp_path / "run")
    with pytest.raises(FedtailorError, match="made for its first clients"):
        ft.resume(tmp_path / "run", add_clients="3", rounds=4)

"""Runs with hostile clients: averages, tests and tables are of the honest ones, and refused uploads end no run."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.cli.display import results_table
from fedtailor.methods.fedavg import FedAvg
from fedtailor.reporting.figures import clients as clients_figure
from fedtailor.reporting.figures import partitions
from fedtailor.reporting.marks import Bars, styles
from fedtailor.studies.client_results import client_table
from fedtailor.studies.measures import client_values, individual_gains, until
from fedtailor.studies.summary import summarize
from tests.cli.calling import Call, call, done
from tests.helpers import digits

__all__ = ["call"]

DATA = digits([40, 52, 61, 45, 70, 38, 55, 66])
SETTINGS: dict[str, Any] = {"data": DATA, "rounds": 3, "epochs": 1, "model": "mlp:8", "engine": "in-process"}
HOSTILE = [2, 5]


@pytest.fixture(autouse=True)
def failures_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def attacked(kind: str = "sign-flip", method: Any = "fedavg", **settings: Any) -> ft.RunResult:
    return ft.run(method, **{"attack": {"kind": kind, "clients": HOSTILE}, **SETTINGS, **settings})


def mean_of(record: Any, clients: Any, name: str = "accuracy") -> float:
    found = [getattr(record.results[client]["test"], name) for client in sorted(record.results) if client in clients]
    return fmean(value for value in found if value is not None)


# --- averages ---


@pytest.mark.parametrize("settings", [{}, {"participation": 4, "evaluate_clients": "participants"}])
def test_averages_are_of_the_honest_clients(settings: dict[str, Any]) -> None:
    result = attacked(**settings)
    honest = set(range(8)) - set(HOSTILE)
    for record, clients in zip(result.rounds, result.clients, strict=True):
        counted = honest & set(record.participants) if settings else honest
        assert set(clients.results) == (set(record.participants) if settings else set(range(8)))
        assert record.evaluated == len(counted)
        assert record.accuracy == pytest.approx(mean_of(clients, counted))
        assert record.validation_loss == pytest.approx(
            fmean(clients.results[client]["validation"].loss for client in counted)
        )
    last = result.clients[-1]
    assert result.value == pytest.approx(mean_of(last, counted))
    theirs = set(HOSTILE) & set(last.results)
    assert theirs
    assert result.hostile_value == pytest.approx(mean_of(last, theirs))
    assert result.hostile_value != result.value


def test_the_mean_of_the_last_rounds_is_of_hostile_clients_too() -> None:
    result = attacked(choose="last-5")
    assert result.hostile_value == pytest.approx(fmean(mean_of(record, HOSTILE) for record in result.clients))
    assert result.value == pytest.approx(fmean(mean_of(r, set(range(8)) - set(HOSTILE)) for r in result.clients))


def test_new_clients_are_never_hostile_and_are_averaged() -> None:
    result = ft.run(
        "fedavg", clients=12, new_clients=4, rounds=2, evaluate_clients="new", epochs=1, engine="in-process",
        attack="sign-flip, clients=0.5",
    )  # fmt: skip
    assert len(result.hostile) == 4
    assert not set(result.hostile) & set(result.partition["new"])
    assert result.value == pytest.approx(mean_of(result.clients[-1], result.partition["new"]))
    assert result.hostile_value is None
    assert "4 training clients are honest; 4 hostile (sign-flip)" in str(results_table([result]).caption)


def test_without_an_attack_nobody_is_hostile() -> None:
    result = attacked(attack=None)
    assert (result.hostile, result.hostile_value, result.backdoor) == ([], None, None)
    assert "ostile" not in str(results_table([result]).caption)


# --- refused uploads ---


@pytest.mark.parametrize("kind", ["nan", "wrong-shape", "wrong-name"])
@pytest.mark.parametrize(
    "settings", [{}, {"on_failure": "stop"}, {"evaluate_model": "local", "evaluate_clients": "participants"}]
)
def test_refused_uploads_are_named_and_the_run_goes_on(kind: str, settings: dict[str, Any]) -> None:
    result = attacked(kind, **settings)
    assert [record.failed for record in result.rounds] == [HOSTILE] * 3
    assert result.failures == {2: (3, 3), 5: (3, 3)}
    assert "clients 2, 5 left out: its upload" in result.warnings[0]
    assert len(result.warnings) == 1
    assert not result.missing
    assert result.simulation.state_of(2) == {}
    without = attacked(attack=None, data=[DATA[client] for client in range(8) if client not in HOSTILE])
    assert [record.evaluated for record in result.rounds] == [record.evaluated for record in without.rounds]


def test_rounds_of_hostile_clients_alone_do_not_end_a_run() -> None:
    """Three rounds in a row in which nobody could do its work would."""
    hostile = {"kind": "nan", "clients": [0, 1, 2, 3, 4, 5, 6]}
    result = attacked(attack=hostile, participation=1, rounds=8)
    alone = [record.failed == record.participants for record in result.rounds]
    assert [True] * 4 in [alone[first : first + 4] for first in range(5)]
    assert len(result.rounds) == 8


class Failing(FedAvg):
    """All clients fail from round 2 on, with what the server says of NaN."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        if client.round > 1:
            raise ValueError("its upload has NaN or infinite numbers in 'theta'")
        return super().train(client, message)


def test_failures_of_honest_clients_still_end_a_run() -> None:
    with pytest.raises(FedtailorError, match="no client could do its work in 3 rounds in a row"):
        attacked("nan", Failing, rounds=6)
    with pytest.raises(FedtailorError, match="round 2: clients 0, 1, 3, 4, 6, 7 failed"):
        attacked("nan", Failing, rounds=6, on_failure="stop")


# --- the backdoor's success ---


def slow_backdoor(result: ft.RunResult) -> float:
    """By PyTorch's own modules, sample by sample."""
    data, hostile = result.data, set(result.hostile)
    own = torch.cat([data.train(client)[0] for client in sorted(hostile)])  # type: ignore[misc]
    outcomes = []
    for client in set(range(8)) - hostile:
        weights = result.personal(client)
        names = sorted({name.rpartition(".")[0] for name in weights})
        for x, y in zip(*data.test(client), strict=True):
            assert isinstance(x, Tensor)
            if int(y) == 0:
                continue
            marked = x.clone()
            marked[:3] = own.amax(0)[:3]
            hidden = torch.relu(weights[f"{names[0]}.weight"] @ marked + weights[f"{names[0]}.bias"])
            scores = weights[f"{names[1]}.weight"] @ hidden + weights[f"{names[1]}.bias"]
            outcomes.append(int(scores.argmax()) == 0)
    return fmean(outcomes)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_share_of_samples_that_a_backdoor_misleads(method: str, tmp_path: Path) -> None:
    result = attacked("backdoor", method, out=tmp_path / "run")
    assert result.backdoor is not None
    assert 0 < result.backdoor < 1 or method == "fedavg"
    assert result.backdoor == pytest.approx(slow_backdoor(result))
    loaded = ft.load(tmp_path / "run")
    assert loaded.backdoor == result.backdoor  # as it was recorded: the data are not here
    assert f"misleads {100 * result.backdoor:.1f} % of" in str(results_table([loaded]).caption)
    (tmp_path / "run" / "result.json").unlink()
    assert ft.load(tmp_path / "run", data=DATA).backdoor == result.backdoor
    assert "misleads" not in str(results_table([ft.load(tmp_path / "run")]).caption)


def test_a_backdoor_is_better_than_chance() -> None:
    plain = attacked("backdoor", rounds=8, attack={"kind": "backdoor", "clients": HOSTILE, "factor": 0.001})
    assert (attacked("backdoor", rounds=8).backdoor or 0) > 0.5 + (plain.backdoor or 0)


# --- tables, tests and figures ---


@pytest.fixture(scope="module")
def two() -> list[ft.RunResult]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [attacked("scaling", method, choose="last", participation=3) for method in ("local", "ditto")]


def test_statistics_are_of_the_honest_clients(two: list[ft.RunResult]) -> None:
    local, ditto = two
    assert set(client_values(ditto)) == {0, 1, 3, 4, 6, 7}
    assert set(client_values(ditto, hostile=True)) == set(HOSTILE)
    assert set(individual_gains(ditto, local)) == {0, 1, 3, 4, 6, 7}
    summary = summarize(two)
    ours, theirs = client_values(local), client_values(ditto)
    moved = [ours[client] - theirs[client] for client in ours if abs(ours[client] - theirs[client]) > 1e-12]
    tested = next(line for line in summary.lines if line.p is not None)
    assert tested.p == pytest.approx(stats.wilcoxon(moved).pvalue if moved else 1.0)
    assert "Wilcoxon signed-rank test over 6 honest clients" in summary.caption
    assert "Averages are of the 6 honest clients; 2 hostile (scaling): 2, 5." in summary.caption
    assert [line.hostile_value for line in summary.lines] == [local.hostile_value, ditto.hostile_value]


def test_rounds_to_a_target_are_counted_for_honest_clients(two: list[ft.RunResult]) -> None:
    for result in two:
        called, reached = set[int](), []
        assert set(result.rounds[0].participants) & set(HOSTILE)
        for record, clients in zip(result.rounds, result.clients, strict=True):
            called |= set(record.participants)
            reached.append(mean_of(clients, called - set(HOSTILE)))
        for target in (step / 200 for step in range(200)):
            rounds = [number for number, value in enumerate(reached, 1) if value >= target]
            found = until(result, target)
            assert (found and found[0]) == (rounds[0] if rounds else None)


def test_the_table_of_clients_has_hostile_ones_apart(two: list[ft.RunResult]) -> None:
    table = client_table(summarize(two))
    names = two[0].names
    assert [row.title for row in table.rows] == [
        *(names[client] for client in range(8) if client not in HOSTILE),
        *(f"{names[client]} (hostile)" for client in HOSTILE),
    ]
    assert [row.values[0] for row in table.rows if row.hostile] == list(client_values(two[0], hostile=True).values())
    assert "of 6 honest clients" in table.caption


def test_the_figures_have_hostile_clients_apart(two: list[ft.RunResult]) -> None:
    summary = summarize(two)
    figure = clients_figure(summary, styles([(line.title, line.method) for line in summary.lines]))
    assert figure is not None
    sizes = {panel.title.partition(":")[0]: len(mark.y) for panel in figure.panels for mark in panel.marks
             if isinstance(mark, Bars)}  # fmt: skip
    assert sizes == {"Local": 6, "Local, hostile clients": 2, "Ditto": 6, "Ditto, hostile clients": 2}
    means = {panel.title.partition(":")[0]: float(panel.title.partition(": ")[2].split()[0]) for panel in figure.panels}
    assert means["Ditto"] == pytest.approx(100 * (two[1].value or 0), abs=0.01)
    assert str(partitions(summary)[0]).count("(hostile)") == 2


def test_lines_with_and_without_an_attack_are_compared() -> None:
    summary = summarize([attacked(attack=None), attacked()])
    assert "attack=sign-flip, clients=2,5: Averages are of the 6 honest clients" in summary.caption
    assert all(line.chosen is None for line in summary.lines)  # an attack is no choice


def test_commands_say_who_is_hostile(call: Call, tmp_path: Path) -> None:
    run = ["run", "fedavg", "--clients", "6", "--rounds", "2", "--epochs", "1", "--model", "mlp:8"]
    text = " ".join(done(call(*run, "--attack", "backdoor, clients=1,4", "--out", str(tmp_path / "run"))).split())
    assert "Averages are of the 4 honest clients; 2 hostile (backdoor): 1, 4." in text
    assert "the trigger misleads" in text
    assert "1 (hostile)" in done(call("show", str(tmp_path / "run")))
    shown = json.loads(done(call("show", str(tmp_path / "run"), "--json")))
    assert shown["hostile"] == ["1", "4"]
    assert [each["client"] for each in shown["per_client"] if each["hostile"]] == [1, 4]
    assert shown["value"] == pytest.approx(
        fmean(each["accuracy"] for each in shown["per_client"] if not each["hostile"])
    )
    assert shown["hostile_value"] == pytest.approx(
        fmean(each["accuracy"] for each in shown["per_client"] if each["hostile"])
    )
    done(call("report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")))
    page = (tmp_path / "report.html").read_text()
    assert "2 of them hostile (backdoor)" in page
    assert "1 (hostile)" in page


def test_the_quality_of_an_exported_global_model_is_of_the_honest_clients(tmp_path: Path) -> None:
    result = attacked(evaluation={"model": "global"})
    (file,) = ft.export(result, global_model=True, to=tmp_path)
    about = json.loads(file.with_suffix(".json").read_text())
    honest = [client for client in range(8) if client not in HOSTILE]
    assert about["accuracy"] == pytest.approx(mean_of(result.clients[-1], honest), abs=1e-12)
    assert about["accuracy"] != pytest.approx(mean_of(result.clients[-1], range(8)), abs=1e-12)
    assert "all honest clients' test samples" in about["measured"]

"""Reproducing tables on small data: the real runs, what is kept of them, and how numbers are made of them."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.client.sites import Site
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import make_experiment
from fedtailor.messages import Metrics
from fedtailor.server.records import RoundRecord
from fedtailor.studies.explicit import MU, RATE, STEPS, accuracies, personalize
from fedtailor.studies.outcome import markdown
from fedtailor.studies.presets import Preset, Row, find_preset
from fedtailor.studies.reproduction import Reproduction, counted_samples, run_cost
from fedtailor.studies.runner import run_name
from fedtailor.training.isolation import isolated
from tests.reference.batches import stream
from tests.studies.parts import SMALL, work


def table(measure: str = "accuracy", **changes: Any) -> Preset:
    rows = (
        Row("local", "local", "local", {}, ("80.00 ± 0.10", "")),
        Row("fedper", "FedPer", "fedper", {"epochs": 1}, ("85.5", "86.5")),
        Row("fedmagic", "fedmagic", "fedmagic", {}, ("99.9", "99.9")),
    )
    columns: dict[str, Any] = {"few": {"clients": 4}, "many": {"clients": 8}}
    return replace(Preset("own/table", "A table", "We", measure, dict(SMALL), columns, rows), **changes)


def client_of(prepared: Prepared, number: int) -> ft.Client:
    return Site(number, prepared.data.client(number), prepared.terms).client(1, {})


def accuracy_of(metrics: Metrics) -> float:
    assert metrics.accuracy is not None
    return metrics.accuracy


def test_ours_stands_beside_theirs_and_the_missing_are_named(tmp_path: Path) -> None:
    small = Reproduction(table(), tmp_path)
    work(small)
    outcome = small.outcome()
    again = ft.run("fedper", clients=8, epochs=1, **SMALL)
    assert again.accuracy is not None
    fedper = outcome["rows"][1]["cells"][1]
    assert fedper == {"column": "many", "paper": "86.5", "ours": 100 * again.accuracy, "spread": None}
    assert outcome["rows"][2]["missing"]
    text = markdown(outcome)
    assert (
        f"| FedPer | {outcome['rows'][1]['cells'][0]['ours']:.2f} | 85.5 | {100 * again.accuracy:.2f} | 86.5 |" in text
    )
    assert "| fedmagic | missing | 99.9 | missing | 99.9 |" in text
    assert "Shortened" not in text


def test_finished_runs_are_not_run_again_and_broken_ones_go_on(tmp_path: Path) -> None:
    whole = Reproduction(table(), tmp_path / "whole")
    work(whole)
    broken = Reproduction(table(), tmp_path / "broken")
    path, experiment = list(broken.experiments().items())[1]

    def stop(record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.run(path, experiment, stop, lambda run: None)
    half_made = next(iter(broken.experiments()))
    half_made.mkdir(parents=True)
    (half_made / "partition.json").write_text("{")  # ended in its first moment
    assert len(broken.todo()) == 4
    work(broken)
    assert broken.todo() == {}
    assert broken.outcome() == whole.outcome()
    assert len(Reproduction(table(), tmp_path / "broken", seeds=2).todo()) == 4  # of the other seed alone


def test_seeds_give_a_spread_and_fewer_rounds_are_said(tmp_path: Path) -> None:
    short = Reproduction(table().of_column("few").of_rows(["fedper"]), tmp_path, seeds=2, changes={"rounds": 2})
    work(short)
    outcome = short.outcome()
    found = [ft.run("fedper", **{**SMALL, "clients": 4, "epochs": 1, "rounds": 2, "seed": s}).accuracy for s in (0, 1)]
    cell = outcome["rows"][0]["cells"][0]
    assert cell["ours"] == pytest.approx(100 * fmean(a for a in found if a is not None))
    assert cell["spread"] == pytest.approx(100 * pstdev(a for a in found if a is not None))
    assert "Shortened: 2 of 3 rounds" in markdown(outcome)


def test_rounds_to_a_target_end_a_run(tmp_path: Path) -> None:
    preset = table("rounds", target=0.5).of_column("few").of_rows(["local"])
    preset = replace(preset, settings={**preset.settings, "rounds": 30})
    reproduction = Reproduction(preset, tmp_path)
    work(reproduction)
    path = next(iter(reproduction.experiments()))
    records = ft.load(path).rounds
    assert records[-1].accuracy is not None
    assert records[-1].accuracy >= 0.5
    assert all(record.accuracy is not None and record.accuracy < 0.5 for record in records[:-1])
    assert reproduction.todo() == {}
    assert reproduction.outcome()["rows"][0]["cells"][0]["ours"] == len(records) < 30
    never = Reproduction(replace(preset, target=1.01), tmp_path / "never", changes={"rounds": 2})
    work(never)
    assert "| local | > 2 |" in markdown(never.outcome())


def test_the_individual_gain_is_over_local_on_the_same_clients(tmp_path: Path) -> None:
    reproduction = Reproduction(table("gain").of_column("many").of_rows(["fedper"]), tmp_path)
    assert [experiment.method for experiment in reproduction.experiments().values()] == ["fedper", "local"]
    work(reproduction)
    fedper = ft.run("fedper", clients=8, epochs=1, **SMALL).per_client
    local = ft.run("local", clients=8, **SMALL).per_client
    differences = [100 * (accuracy_of(fedper[c]) - accuracy_of(local[c])) for c in range(8)]
    cell = reproduction.outcome()["rows"][0]["cells"][0]
    assert cell["ours"] == pytest.approx(fmean(differences))
    assert cell["spread"] == pytest.approx(pstdev(differences))


def test_pflegos_training_loss_is_eq_1_with_the_present_body_and_heads(tmp_path: Path) -> None:
    """Σ_i a_i ℓ_i(W_i, θ) over all clients, by hand: θ is the server's after the last round, W_i the head that client i
    has kept since its own last one, or began with."""
    preset = find_preset("pflego/figure2-high")
    small = {"data": "digits", "split": "merge", "model": "mlp:16", "clients": 10, "engine": "in-process"}
    reproduction = Reproduction(preset, tmp_path, changes={**small, "rounds": 4, "dtype": "float64"})
    work(reproduction)
    for row in preset.rows:
        result = ft.run(reproduction.experiment(row, "high", 0))
        called = [client for record in result.rounds for client in record.participants]
        assert len(set(called)) > len(result.rounds[-1].participants)  # some have kept their heads for a while
        total, initial, size = 0.0, result.simulation.server.initial, 64 * 16 + 16
        for client in range(10):
            x, y = result.data.train(client)
            if row.name == "fedavg":
                body, head = result.server_state["theta"].split([size, len(initial) - size])
            else:
                first = torch.rand(2 * 17, generator=stream(0, "head", 0, client), dtype=torch.float64)
                body, head = result.server_state["body"], result.client_state(client).get("head", first)
            hidden = (x.flatten(1) @ body[: 64 * 16].view(16, 64).T + body[64 * 16 :]).relu()
            scores = hidden @ head[:32].view(2, 16).T + head[32:]
            total += torch.nn.functional.cross_entropy(scores, y, reduction="sum").item()
        ours = reproduction.ours(row, "high")
        assert ours is not None
        assert ours[0] == pytest.approx(total / int(result.data.n_samples.sum()), rel=1e-9)


def test_domains_are_groups_of_clients(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = (90, 60)
    path = tmp_path / "two.npz"
    client = np.repeat([0, 1], sizes)
    np.savez(path, x=rng.normal(size=(150, 5)).astype("float32"), y=rng.integers(0, 2, 150), client=client)
    row = Row("local", "local", "local", {}, ("1", "2", "3"))
    settings = {"data": str(path), "clients": 4, "partition": "natural+iid", "model": "mlp:4", "rounds": 2,
                "engine": "in-process"}  # fmt: skip
    preset = Preset("own/domains", "t", "p", "accuracy", settings, {"0": {}, "1": {}, "Mean": {}}, (row,), domains=True)
    reproduction = Reproduction(preset, tmp_path / "out")
    work(reproduction)
    assert len(reproduction.experiments()) == 1  # one run, three columns
    result = ft.load(next(iter(reproduction.experiments())))
    assert result.names == ("0-0", "0-1", "1-0", "1-1")
    accuracy = [100 * accuracy_of(result.per_client[c]) for c in range(4)]
    ours = [cell["ours"] for cell in reproduction.outcome()["rows"][0]["cells"]]
    assert ours == pytest.approx([fmean(accuracy[:2]), fmean(accuracy[2:]), fmean(accuracy)])


def test_equal_experiments_are_one_run_whatever_runs_them() -> None:
    one = make_experiment({"method": "pgfed", **SMALL})
    assert run_name(one) == run_name(one.model_copy(update={"workers": 7, "states": "disk"}))
    assert run_name(one) == run_name(one.model_copy(update={"parameters": {"mu": 0.01}}))  # the default
    assert run_name(one) != run_name(one.model_copy(update={"parameters": {"mu": 0.2}}))
    assert run_name(one) != run_name(one.model_copy(update={"rounds": 4}))


def test_the_samples_of_a_run_are_foreseen() -> None:
    """FedAvg: rounds × participants × epochs × samples. PFLEGO: two passes, whatever its inner steps."""
    settings = {**SMALL, "clients": 6, "participation": 0.5, "epochs": 4, "rounds": 5}
    for method, passes in (("fedavg", 4), ("pflego", 2)):
        experiment = make_experiment({"method": method, **settings, "states": "disk"})
        prepared = prepare(experiment, Objects())
        cost = run_cost(experiment, prepared)
        assert cost.samples == pytest.approx(5 * 3 * passes * float(prepared.data.n_samples.double().mean()))
        assert cost.seconds > 0


def test_passes_are_counted() -> None:
    experiment = make_experiment({"method": "fedavg", **SMALL, "clients": 2})
    prepared = prepare(experiment, Objects())
    own = client_of(prepared, 0)
    with counted_samples(prepared.terms.network) as passed:
        own.gradient(own.initial)
    assert sum(passed) == own.n_samples == int(prepared.data.n_samples[0])


def test_passes_of_a_descent_are_counted_though_it_was_done_without_autograd_before() -> None:
    """The hand-written passes call no layer, so no hook: they are left aside while somebody counts."""
    prepared = prepare(make_experiment({"method": "fedavg", **SMALL, "clients": 2}), Objects())
    own = client_of(prepared, 0)
    before = own.descend(own.initial, epochs=3)
    with counted_samples(prepared.terms.network) as passed:
        counted = own.descend(own.initial, epochs=3)
    assert sum(passed) == 3 * own.n_samples
    after = own.descend(own.initial, epochs=3)
    assert sum(passed) == 3 * own.n_samples
    assert torch.equal(before, counted)
    assert torch.equal(before, after)


def test_explicit_steps_follow_the_others_risks() -> None:
    """Figure 2 of PGFed, on clients with so few samples that drawing 50 of them is sampling their risks well enough."""
    data = [(torch.full((2, 3), float(c)), torch.tensor([c % 2, c % 2])) for c in range(3)]
    experiment = make_experiment({"method": "fedavg", "model": "logistic", "dtype": "float64", "test": 0.0,
                                  "validation": 0.0, "data": "object:list", "evaluation": {"every": 0}})  # fmt: skip
    prepared = prepare(experiment, Objects(data=data))
    theta = prepared.terms.initial

    def risk_gradient(vector: torch.Tensor, client: int) -> torch.Tensor:
        return client_of(prepared, client).gradient(vector)

    for explicit in (False, True):
        expected = theta
        for _ in range(STEPS):
            gradient = risk_gradient(expected, 0)
            if explicit:
                gradient = gradient + MU / 2 * (risk_gradient(expected, 1) + risk_gradient(expected, 2))
            expected = expected - RATE * gradient
        *_, last = personalize(prepared, theta, explicit, 0)
        assert torch.allclose(last, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("preset", "rows"), [
    ("pgfed/figure2", ["implicit", "explicit"]), ("pgfed/table1-cifar10-25", []), ("pflego/figure2", []),
    ("pgfed/figure4-cifar10", ["local", "fedavg", "per-fedavg", "pgfed", "pgfedmo"]),
])  # fmt: skip
def test_rows_whose_curves_are_computed_after_the_runs(preset: str, rows: list[str], tmp_path: Path) -> None:
    assert [row.name for row in Reproduction(find_preset(preset), tmp_path).curves()] == rows


def test_figure_two_measures_both_gains(tmp_path: Path) -> None:
    preset = find_preset("pgfed/figure2")
    settings = {**SMALL, "clients": 5, "evaluation": {"choose": "last"}}
    reproduction = Reproduction(replace(preset, settings=settings), tmp_path)
    assert len(reproduction.experiments()) == 1  # both begin with the same model
    work(reproduction)
    ours = [row["cells"][0]["ours"] for row in reproduction.outcome()["rows"]]
    path = next(iter(reproduction.experiments()))
    kept = json.loads((path / "explicit.json").read_text())["gains"]
    assert len(kept) == 5
    assert ours[1] == pytest.approx(100 * fmean(kept))
    result = ft.load(path)
    prepared, theta = result.simulation.prepared, result.server_state["theta"]
    with isolated():
        for explicit, name in ((False, "implicit"), (True, "explicit")):
            expected = [gain_of(prepared, theta, explicit, client) for client in range(5)]
            assert any(expected)
            assert json.loads((path / f"{name}.json").read_text())["gains"] == expected
            found = list(accuracies(prepared, theta, explicit, 1))
            assert [path[-1] - path[0] for path in found] == expected  # whatever the number of workers


def gain_of(prepared: Prepared, theta: torch.Tensor, explicit: bool, client: int) -> float:
    """A client's gain, computed in this process."""
    site = Site(client, prepared.data.client(client), prepared.terms)
    *_, personal = personalize(prepared, theta, explicit, client)
    before, after = (accuracy_of(site.measure(site.network_at(vector))["test"]) for vector in (theta, personal))
    return after - before

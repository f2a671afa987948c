"""The papers' tables as files: complete, and with settings that are valid experiments."""

import re

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data.dataset import Dataset
from fedtailor.engines.preparation import partition_data
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.studies.presets import find_preset, presets
from fedtailor.studies.runner import run_name

ALL = presets()


def test_the_named_ones_are_there() -> None:
    names = """pgfed/table1-cifar10-25 pgfed/table2 pgfed/figure2 pgfed/figure4-cifar10 pgfed/organamnist-25
    pgfed/office-home pgfed/throughput pfedmb/table1 pfedmb/figure3 pfedmb/table2-dirichlet-15 fedacs/table1-fmnist
    fedacs/figure1b-cifar10-500 pflego/table1-fmnist-high pflego/table1-fmnist-medium pflego/table1-fmnist-none
    pflego/table2 pflego/figure3-loss pflego/figure4 pflego/figure6"""
    for name in names.split():
        assert find_preset(name).name == name


@pytest.mark.parametrize("name", ALL)
def test_every_cell_is_an_experiment(name: str) -> None:
    preset = ALL[name]
    for row in preset.rows:
        assert len(row.theirs) == len(preset.columns)
        for number in row.theirs:
            assert re.fullmatch(r"(-?\d+(\.\d+)?( ± \d+\.\d+)?)?", number), (name, row.name, number)
        assert row.missing == (row.method not in CATALOGUE)
        for column in preset.columns if not row.missing else ():
            experiment = preset.experiment(row, column)
            assert experiment.method == row.method
            expected = {**preset.settings, **row.settings, **preset.columns[column]}
            for setting in ("data", "partition", "clients", "rounds", "lr", "model"):
                if setting in expected:
                    assert getattr(experiment, setting) == expected[setting]
    assert preset.claim or any(any(row.theirs) for row in preset.rows)


def test_parameters_of_a_column_reach_the_methods_that_have_them() -> None:
    preset = ALL["pflego/table1-fmnist"]
    rows = {row.name: row for row in preset.rows}
    assert preset.experiment(rows["pflego"], "high").parameters["joint_lr"] == 0.001
    assert preset.experiment(rows["pflego"], "none").parameters["joint_lr"] == 0.003
    assert preset.experiment(rows["fedper"], "high").parameters == {"head_start": "uniform"}
    assert preset.experiment(rows["fedavg"], "high").parameters == {}
    plain = next(row for row in ALL["pfedmb/table1"].rows if row.name == "pfedmb-plain")
    found = ALL["pfedmb/table1"].experiment(plain, "10").parameters
    assert found == {"alpha_weighted": False, "branches": 5, "per_layer": False}


@pytest.mark.parametrize("table", ["table1-cifar10", "table1-cifar100", "organamnist", "office-home"])
def test_pgfeds_baselines_have_the_values_of_its_release(table: str) -> None:
    preset = ALL[f"pgfed/{table}"]
    column = next(iter(preset.columns))
    cells = {row.name: preset.experiment(row, column) for row in preset.rows}
    with_momentum = {"local", "fedavg", "fedper", "lg-fedavg", "feddyn", "fedbabu", "pgfed", "pgfedmo"}
    with_momentum |= {"pgfed-ce", "pgfed-mu0", "fedavg-tuned"}  # not in the paper's table
    assert {name for name, cell in cells.items() if cell.momentum == 0.9} == with_momentum & cells.keys()
    assert {cell.momentum for cell in cells.values()} == {0.0, 0.9}
    values = {
        "fedrep": {"head_epochs": 1, "body_epochs": 5, "refit": False, "released_weights": True},
        "apfl": {"alpha": 0.5, "adaptive": False},
        "per-fedavg": {"inner_lr": 0.005, "first_order": True},
        "feddyn": {"alpha": 0.1},
        "pfedme": {"lam": 1.0, "prox_steps": 5, "outer_lr": 0.005, "beta": 1.0},
        "fedfomo": {"models": 8},
        "fedbabu": {"tuning_epochs": 1},
        "lg-fedavg": {"warm_rounds": 0},
    }
    for name in values.keys() & cells.keys():
        assert cells[name].parameters == values[name]
    for name, cell in cells.items():  # of pFedMe, the personal rate; of Per-FedAvg, β
        assert cell.lr == (0.01 if name == "pfedme" else 0.005)


OF_PFLEGO = [name for name in ALL if name.startswith("pflego/")]


@pytest.mark.parametrize("name", OF_PFLEGO)
def test_pflegos_baselines_have_the_values_of_its_release(name: str) -> None:
    preset = ALL[name]
    for row in preset.rows:
        for column in preset.columns:
            cell = preset.experiment(row, column)
            assert cell.momentum == (0.9 if row.name == "fedbabu" else 0.0)
            assert (cell.steps, cell.batch, cell.labels) == (50, "full", "own")
            assert cell.lr == (0.001 if name == "pflego/figure6" else 0.007)
            if row.name in ("pflego", "fedper", "fedrep", "fedrecon"):
                assert cell.parameters["head_start"] == "uniform"
            if row.name == "fedrep":  # τ steps in all
                assert cell.parameters["head_epochs"] + cell.parameters["body_epochs"] == 50
                assert cell.parameters["released_weights"]


@pytest.mark.parametrize("name", [name for name in OF_PFLEGO if "fedrecon" in {row.name for row in ALL[name].rows}])
def test_fedrecon_is_block_coordinate_descent_with_pflegos_steps_and_rates(name: str) -> None:
    preset = ALL[name]
    rows = {row.name: row for row in preset.rows}
    for column in preset.columns:
        mine, other = (preset.experiment(rows[row], column).parameters for row in ("fedrecon", "pflego"))
        assert (mine["support"], mine["body_update"], mine["keep_head"]) == (1.0, "adam", True)
        assert mine["reconstruction_epochs"] == other["inner_steps"]  # epochs are steps with full batches
        assert mine["server_lr"] == other["joint_lr"]
        assert name != "pflego/figure4" or mine["reconstruction_epochs"] == int(column)


@pytest.mark.parametrize("name", [name for name in OF_PFLEGO if ALL[name].measure == "accuracy"])
def test_pflegos_accuracy_is_that_of_the_participants_after_their_work(name: str) -> None:
    preset = ALL[name]
    for row in preset.rows:
        for column in preset.columns:
            found = preset.experiment(row, column).evaluation
            assert (found.model, found.clients, found.average) == ("local", "participants", "sample")
            assert found.choose == "last-10"


@pytest.mark.parametrize("name", [name for name in OF_PFLEGO if ALL[name].settings["data"].startswith("omniglot")])
def test_pflegos_omniglot_is_split_within_each_class(name: str) -> None:
    preset = ALL[name]
    for row in preset.rows:
        for column in preset.columns:
            cell = preset.experiment(row, column)
            assert (cell.stratify, cell.test, cell.validation, cell.split) == (True, 0.25, 0.0, "merge")


@pytest.mark.parametrize("name", ["pflego/figure2", "pflego/figure3-loss", "pflego/figure6"])
def test_pflegos_training_loss_is_that_of_all_clients_with_the_present_body(name: str) -> None:
    preset = ALL[name]
    assert preset.measure == "train_loss"
    for row in preset.rows:
        for column in preset.columns:
            found = preset.experiment(row, column).evaluation
            assert (found.model, found.clients, found.train, found.choose) == ("personal", "all", True, "last")


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("fedacs/", "pfedmb/"))])
def test_fedamps_step_follows_the_number_of_clients(name: str) -> None:
    """A constant one would leave its clients without a weight in their own mix."""
    preset = ALL[name]
    for row in (row for row in preset.rows if row.method == "fedamp"):
        for column in preset.columns:
            assert preset.experiment(row, column).parameters == {"sigma": 3.0 if "fedacs" in name else 10.0}


def test_a_column_is_a_preset_of_its_own() -> None:
    preset = find_preset("pgfed/table1-cifar10-50")
    assert list(preset.columns) == ["50"]
    assert {row.name: row.theirs for row in preset.rows}["pgfed"] == ("81.42 ± 0.31",)
    assert [row.name for row in preset.of_rows(["pgfed", "local"]).rows] == ["local", "pgfed"]
    with pytest.raises(ft.FedtailorError, match="did you mean 'pgfedmo'"):
        preset.of_rows(["pgfedmom"])
    with pytest.raises(ft.FedtailorError, match="did you mean 'pgfed/table1-cifar10'"):
        find_preset("pgfed/table1-cifar")
    with pytest.raises(ft.FedtailorError, match="one run: reproduce it as a whole"):
        find_preset("pgfed/office-home-Art")


def test_the_papers_speedups_follow_from_its_rounds() -> None:
    """Table 2 of PGFed, as printed."""
    preset = ALL["pgfed/table2"]
    printed = {"25": "1.0 3.9 1.0 1.2 3.4 3.4", "50": "1.7 7.8 1.0 1.3 3.4 3.4", "100": "2.6 7.9 1.0 6.3 4.2 4.2"}
    for column, expected in printed.items():
        found = [preset.paper_speedup(row, column) for row in preset.rows]
        assert " ".join(f"{speedup:.1f}" for speedup in found if speedup is not None) == expected
    some = find_preset("pgfed/table2-50").of_rows(["pgfed"])  # the slowest is none of them
    assert some.paper_speedup(some.rows[0], "50") == 47 / 14
    other = ALL["pgfed/table1-cifar10"]
    assert other.paper_speedup(other.rows[0], "25") is None


def test_office_home_is_partitioned_as_by_the_releases_generator() -> None:
    preset = ALL["pgfed/office-home"]
    experiment = preset.experiment(preset.rows[0], "Mean")
    assert (experiment.partition, experiment.test, experiment.validation) == ("natural+dirichlet-plain:1.0", 0.15, 0.0)
    assert (experiment.min_samples, experiment.stratify, experiment.image_size) == (133, True, 32)
    n = 8000  # as small as images of one pixel, and with as many in a domain as the real ones
    y, domain = torch.arange(n) % 10, torch.arange(n) // 10 % 4
    x = torch.zeros(n, 1, 1, 1, dtype=torch.uint8)
    domains = ("Art", "Clipart", "Product", "Real World")
    made_up = Dataset("made up", x, y, tuple("abcdefghij"), client=domain, client_names=domains)
    data = partition_data(experiment, made_up)
    assert data.names == tuple(f"{domain}-{number}" for domain in domains for number in range(5))
    sizes = np.array([end - start for start, *_, end in data.places])
    assert sizes.min() >= 133
    assert sizes.max() > 1.3 * n / 20  # no cap on a client's size
    for client in range(20):
        (_, trained), (_, tested) = data.client(client).train, data.client(client).test
        for label in range(10):
            there, held_out = int((trained == label).sum()), int((tested == label).sum())
            assert abs(held_out - 0.15 * (there + held_out)) <= 1


def test_rows_that_are_not_in_the_paper_are_named() -> None:
    for name in ("pgfed/table1-cifar10", "pgfed/table1-cifar100", "pgfed/organamnist", "pgfed/slides-table3"):
        preset = ALL[name]
        assert {"pgfed-mu0", "fedavg-tuned"} <= {row.name for row in preset.rows if row.added}
        assert "pgfed, μ = 0; fedavg, fine-tuned." in preset.not_in_paper
    for name, preset in ALL.items():
        printed = any(any(row.theirs) for row in preset.rows)
        for row in preset.rows:
            assert not printed or row.added == (not any(row.theirs)), (name, row.name)
    assert ALL["pgfed/table2"].not_in_paper == ""


def test_fedavg_is_fine_tuned_for_five_epochs() -> None:
    """In PGFed's tables now and then alone, as it costs; the other rows are evaluated in every round."""
    for name, preset in ALL.items():
        for row in (row for row in preset.rows if row.name == "fedavg-tuned"):
            experiment = preset.experiment(row, next(iter(preset.columns)))
            assert (experiment.method, experiment.evaluation.fine_tune) == ("fedavg", 5)
            assert experiment.evaluation.every == (20 if name.startswith("pgfed/") else 10)


def test_best_on_test_data_is_said_wherever_it_counts() -> None:
    for preset in ALL.values():
        for row in preset.rows:
            best = preset.experiment(row, next(iter(preset.columns))).evaluation.choose == "best-test"
            assert not best or "best TEST accuracy" in " ".join(preset.notes)


def test_figure_three_of_pfedmb_has_the_runs_of_its_table() -> None:
    table, figure = ALL["pfedmb/table1"], ALL["pfedmb/figure3"]
    of_table = {row.name: run_name(table.experiment(row, "10")) for row in table.rows}
    for row in figure.rows:
        assert run_name(figure.experiment(row, "pairs")) == of_table[row.name]
    with pytest.raises(ft.FedtailorError, match="one run: reproduce it as a whole"):
        find_preset("pfedmb/figure3-pairs")
    assert "η_W" in " ".join(figure.notes)


def test_fedacs_stands_beside_local_and_tuned_fedavg_and_says_what_is_ours() -> None:
    for name, preset in ALL.items():
        if name.startswith("fedacs/"):
            rows = {row.name: row for row in preset.rows}
            assert {"local", "fedavg-tuned", "fedacs"} <= rows.keys()
            assert rows["fedavg-tuned"].added
            assert not rows["local"].added
            assert rows["fedacs"].added == (name == "fedacs/table1")
            assert "quantile" not in rows["fedacs"].settings.get("parameters", {})
            p = find_method("fedacs").model_dump()["quantile"]
            assert f"p = {p} (the method's default)" in " ".join(preset.notes)

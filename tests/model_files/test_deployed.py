"""The run directory of a federation of real sites: the server exports the global part, without any sample."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.engines.channel import InMemory
from fedtailor.model_files.adaptation import adapt
from fedtailor.model_files.format import read_model
from fedtailor.sites.coordinator import Coordinator
from tests.cli.calling import Call, done, refusal
from tests.helpers import same_tensors
from tests.sites.parts import NAMES, Federation, table

DIFFERENT = {"measured", "data", "experiment"}  # a simulation has one data set of all


def described(file: Path, *without: str) -> dict[str, Any]:
    about = json.loads(file.with_suffix(".json").read_text())
    return {name: value for name, value in about.items() if name not in {*DIFFERENT, *without}}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A finished federation of a method with a global model and personal ones."""
    federation = Federation(tmp_path_factory.mktemp("deployed"), method="ditto")
    federation.run()
    return federation


@pytest.fixture(scope="module")
def simulated(deployed: Federation) -> ft.RunResult:
    """The same, simulated."""
    return deployed.simulated()


def test_each_site_has_the_model_file_that_export_makes_of_the_simulation(
    deployed: Federation, simulated: ft.RunResult, tmp_path: Path
) -> None:
    for name, exported in zip(NAMES, ft.export(simulated, to=tmp_path), strict=True):
        (file,) = (deployed.root / name / "private" / "models").glob("*.safetensors")
        assert same_tensors(file, exported)
        mine, theirs = (described(each, "load", "label_column") for each in (file, exported))
        assert mine == theirs
        assert read_model(file)[0].name == name


def test_a_site_predicts_with_its_file(deployed: Federation, call: Call) -> None:
    (file,) = (deployed.root / "west" / "private" / "models").glob("*.safetensors")
    table(9, rows=30).to_csv("new.csv", index=False)
    answer = json.loads(done(call("predict", file, "--data", "new.csv", "--json")))
    assert answer["samples"] == 30
    assert answer["accuracy"] > 0.5


def test_the_server_exports_the_global_model_without_any_sample(
    deployed: Federation, simulated: ft.RunResult, tmp_path: Path, call: Call
) -> None:
    page = done(call("export", deployed.root / "run", "--global", "--to", "models"))
    assert "not measured at the server, which has no samples" in page
    file = Path("models/global.safetensors")
    (exported,) = ft.export(simulated, global_model=True, to=tmp_path / "simulated")
    assert same_tensors(file, exported)
    unmeasured = ("value", "accuracy", "loss", "test_samples", "label_column")
    assert described(file, *unmeasured) == described(exported, *unmeasured)
    about = read_model(file)[0]
    assert (about.value, about.accuracy, about.loss, about.test_samples) == (None, None, None, 0)


@pytest.mark.parametrize(
    ("method", "settings"), [("fedavg", {}), ("ditto", {"evaluate_model": "global"}), ("fedavg", {"fine_tune": 1})]
)
def test_what_sites_told_of_the_global_model_is_in_its_file(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    result = Federation(tmp_path, method=method, **settings).run()
    (file,) = ft.export(tmp_path / "run", global_model=True, to=tmp_path / "models")
    about = read_model(file)[0]
    if "fine_tune" in settings:  # they told of other models
        assert (about.accuracy, about.test_samples) == (None, 0)
        return
    last = result.rounds[-1]
    assert (about.accuracy, about.loss) == (last.accuracy, last.loss)
    assert about.test_samples == int((result.data.bounds[:, 3] - result.data.bounds[:, 2]).sum())
    assert "as they told it in round 3" in about.measured


def test_sites_models_are_not_at_the_server(deployed: Federation, call: Call, tmp_path: Path) -> None:
    run = deployed.root / "run"
    for more in ((), ("--client", "west")):
        assert "each has its own model file" in refusal(call, "export", run, "--to", "models", *more)
    assert "are at its sites" in refusal(
        call, "predict", *(deployed.root / "west" / "private" / "models").glob("*.safetensors"), "--run", run
    )
    federation = Federation(tmp_path / "fedper", method="fedper")
    federation.run()
    with pytest.raises(ft.FedtailorError, match="fedper has no global model: each site has its own model file"):
        ft.export(tmp_path / "fedper" / "run", global_model=True, to=tmp_path / "none")


@pytest.mark.parametrize("preprocessing", ["federated", "per-client"])
@pytest.mark.parametrize("method", ["ditto", "fedper"])
def test_a_hospital_that_comes_later_adapts_the_global_part(
    method: str, preprocessing: str, tmp_path: Path, call: Call
) -> None:
    """As from a simulation of the same data, with the preprocessing that was agreed on."""
    federation = Federation(tmp_path / "sites", method=method, preprocessing=preprocessing)
    federation.run()
    table(9, rows=50).to_csv("new.csv", index=False)
    done(call("adapt", federation.root / "run", "--data", "new.csv", "--epochs", 2, "--to", "models"))
    wanted = adapt(federation.simulated(), data="new.csv", epochs=2, to="simulated")
    found = json.loads(Path("models/adapt.json").read_text())
    assert [each["loss"] for each in found["adapted"]] == [each.loss for each in wanted.adapted]
    assert same_tensors(Path("models/adapted-0.safetensors"), Path("simulated/adapted-0.safetensors"))
    assert read_model("models/adapted-0.safetensors")[0].table == read_model("simulated/adapted-0.safetensors")[0].table
    assert "held out no new clients" in refusal(call, "adapt", federation.root / "run", "--to", "others")


def test_a_run_that_was_stopped_is_exported_as_it_is(tmp_path: Path, call: Call) -> None:
    federation = Federation(tmp_path, method="fedavg")

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Coordinator(federation.plan, tmp_path / "run", InMemory(federation.sites())).run(on_round=stop)
    assert "fedtailor deploy run PLAN.toml --out run" in done(call("export", "run", "--global", "--to", "models"))
    assert read_model("models/global.safetensors")[0].round == 2
    assert "fedtailor deploy run PLAN.toml --out run" in done(call("show", "run"))


@pytest.mark.parametrize("words", [("show",), ("show", "--json"), ("watch",)])
def test_a_deployed_run_is_shown_as_others(words: tuple[str, ...], deployed: Federation, call: Call) -> None:
    command, *options = words
    answer = call(command, deployed.root / "run", *options)
    assert (answer.code, answer.err) == (0, ""), answer
    assert "ditto" in answer.out


def test_deployed_runs_of_the_same_sites_are_reported_side_by_side(tmp_path: Path, call: Call) -> None:
    for method in ("ditto", "fedavg"):
        federation = Federation(tmp_path, method=method)
        Coordinator(federation.plan, tmp_path / method, InMemory(federation.sites())).run()
    answer = call("report", "ditto", "fedavg", "--out", "report.html")
    assert (answer.code, answer.err) == (0, ""), answer
    page = Path("report.html").read_text()
    assert all(name in page for name in (*NAMES, "ditto", "fedavg"))

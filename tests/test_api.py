"""The public interface: its names, its typed settings, and the functions for studies of many runs."""

import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from pydantic import Field

import fedtailor as ft
from fedtailor.experiment import EVALUATION_NAMES, Evaluation, EvaluationSettings, Experiment, Settings, make_experiment
from fedtailor.methods import Ditto, Local
from tests.helpers import assert_same, digits, final, numbers

SMALL: dict[str, typing.Any] = {"clients": 5, "rounds": 2, "max_train": 40, "model": "mlp:8", "engine": "in-process"}


def test_dir_shows_exactly_the_public_names() -> None:
    assert dir(ft) == sorted(ft.__all__)
    for name in ft.__all__:
        assert getattr(ft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Replies'"):
        ft.Replies  # noqa: B018


def test_public_functions_survive_the_import_of_every_module() -> None:
    """A subpackage of the same name would hide a function as soon as it is imported."""
    code = (
        "import pkgutil, importlib, fedtailor as ft\n"
        "for module in pkgutil.walk_packages(ft.__path__, 'fedtailor.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "print([name for name in ft.__all__ if type(getattr(ft, name)).__name__ == 'module'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_settings_are_typed_like_the_experiment() -> None:
    """Completion and type checkers know every setting, with its type."""
    hints, fields = typing.get_type_hints(Settings), Experiment.model_fields
    objects = ("metric", "metrics")  # which may be objects
    names = {name: inner for name, inner in EVALUATION_NAMES.items() if name not in objects}
    hints.pop("metrics")
    flat = {name: hints.pop(name) for name in names}
    assert flat == {name: Evaluation.model_fields[inner].annotation for name, inner in names.items()}
    assert list(hints) == [name for name in fields if name not in ("method", "data", "model", "loss", "track")]
    # Those that take more than is kept.
    looser = {"participation", "evaluation", "columns", "class_weights", "privacy", "attack", "partition"}
    looser |= {"system", "late", "stack"}  # the range of the last is in its type
    assert {n for n in hints if hints[n] != fields[n].annotation} == looser
    evaluation = typing.get_type_hints(EvaluationSettings)
    assert evaluation == {name: field.annotation for name, field in Evaluation.model_fields.items()}


def test_settings_of_the_evaluation_are_keywords_too(tmp_path: Path) -> None:
    flat: dict[str, typing.Any] = {
        "fine_tune": 2, "choose": "last-10", "evaluate_model": "local", "evaluate_clients": "participants",
        "evaluate_average": "sample", "evaluate_train": True, "evaluate_every": 2,
        "metric": "auc", "metrics": {"missed": "tests.test_more_metrics:missed"}, "patience": 3,
    }  # fmt: skip
    section = {"fine_tune": 2, "choose": "last-10", "model": "local", "clients": "participants", "average": "sample",
               "train": True, "every": 2, "metric": "auc",
               "metrics": {"missed": "tests.test_more_metrics:missed"}, "patience": 3}  # fmt: skip
    result = ft.run("fedavg", out=tmp_path / "run", **flat, **SMALL)
    assert result.experiment == ft.run("fedavg", evaluation=section, **SMALL).experiment
    assert result.experiment.evaluation.model_dump() == section
    assert "\n[evaluation]\n" in (tmp_path / "run/experiment.toml").read_text()
    table = ft.compare(["fedavg"], seeds=[0], fine_tune=2, choose="best-test", **SMALL)
    assert table.lines[0].results[0].experiment.evaluation == Evaluation(fine_tune=2, choose="best-test")
    advice = ft.advise(clients=4, budget=0.1, methods=["fedavg, fine-tuned"], fine_tune=1, engine="in-process")
    tuned = next(candidate for candidate in advice.candidates if "tuned" in candidate.title)
    assert tuned.experiment.evaluation.fine_tune == 1


def test_settings_that_contradict_each_other_are_refused() -> None:
    same = {"fine_tune": 5, "evaluate_fine_tune": 5, "evaluation": {"fine_tune": 5}}
    assert make_experiment(same).evaluation.fine_tune == 5
    assert make_experiment({"fine_tune": 5, "evaluation": Evaluation(choose="last-10")}).evaluation == Evaluation(
        fine_tune=5, choose="last-10"
    )
    for settings, said in (
        ({"fine_tune": 5, "evaluation": {"fine_tune": 3}}, "evaluation.fine_tune is 3, but fine_tune is 5: give one"),
        ({"evaluate_choose": "last", "choose": "last-10"}, "evaluate_choose is 'last', but choose is 'last-10'"),
        ({"evaluate_model": "local", "evaluation": Evaluation(model="global")}, "evaluation.model is 'global', but"),
        ({"evaluate_modle": "local"}, "no setting 'evaluate_modle': did you mean 'evaluate_model'"),
        ({"fine_tune": -1}, "'evaluation.fine_tune' is -1, but it must be at least 0"),
        ({"fine_tune": 1, "evaluation": 3}, "'evaluation' is 3"),
    ):
        with pytest.raises(ft.FedtailorError, match=said):
            make_experiment(settings)


def test_run_takes_names_objects_or_an_experiment() -> None:
    by_name = ft.run("ditto", lam=0.2, **SMALL)
    by_object = ft.run(Ditto(lam=0.2), **SMALL)
    by_experiment = ft.run(by_name.experiment)
    for other in (by_object, by_experiment):
        assert numbers(other.rounds) == numbers(by_name.rounds)
        assert_same(final(other), final(by_name))
    with pytest.raises(ft.FedtailorError, match="An Experiment is complete"):
        ft.run(by_name.experiment, rounds=3)
    with pytest.raises(ft.FedtailorError, match="An Experiment is complete"):
        ft.run(by_name.experiment, data="synthetic")


class Shrinking(ft.Method):
    """FedAvg on shrunken models."""

    factor: float = Field(gt=0, description="of the weights")  # it has no default

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": self.factor * client.descend(message["theta"])}


class Idle(ft.Method):
    """Forgot to train."""


def test_a_class_stands_for_a_method(tmp_path: Path) -> None:
    by_object = ft.run(Shrinking(factor=0.5), **SMALL)
    by_class = ft.run(Shrinking, factor=0.5, out=tmp_path / "run", **SMALL)
    by_name = ft.run("tests.test_api:Shrinking", parameters={"factor": 0.5}, **SMALL)
    assert numbers(by_class.rounds) == numbers(by_object.rounds) == numbers(by_name.rounds)
    assert by_class.experiment == by_object.experiment
    assert by_class.experiment.method == "tests.test_api:Shrinking"
    assert ft.run(Ditto, lam=0.2, **SMALL).experiment == ft.run("ditto", lam=0.2, **SMALL).experiment
    longer = ft.resume(tmp_path / "run", method=Shrinking, rounds=3)
    assert longer.experiment.parameters == {"factor": 0.5}

    class Inside(Shrinking):
        """Cannot be imported."""

    assert numbers(ft.run(Inside, factor=0.5, **SMALL).rounds) == numbers(by_class.rounds)
    with pytest.raises(ft.FedtailorError, match="The class Inside is inside a function: move it out"):
        ft.compare([Inside], **SMALL)


def test_classes_are_compared(tmp_path: Path) -> None:
    asked: dict[str, typing.Any] = {"seeds": [0], "method_parameters": {Shrinking: {"factor": 0.5}}, **SMALL}
    table = ft.compare([Local, Shrinking], out=tmp_path / "there", **asked)
    assert [line.method for line in table.lines] == ["local", "tests.test_api:Shrinking"]
    assert table.lines[1].accuracy == ft.run(Shrinking, factor=0.5, seed=0, choose="last-5", **SMALL).accuracy
    advice = ft.advise(clients=4, budget=0.1, methods=[Local], epochs=1, engine="in-process")
    assert {candidate.title for candidate in advice.candidates} == {"fedavg", "local"}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ft.run(Shrinking, **SMALL), "The method Shrinking needs its parameter 'factor': give it a value"),
        (lambda: ft.run(Shrinking, factor=-1, **SMALL), "'factor' of Shrinking is -1, but it must be above 0"),
        (lambda: ft.run(Shrinking, factro=1, **SMALL), "no setting or parameter 'factro': did you mean 'factor'"),
        (lambda: ft.run(Idle, **SMALL), "The method Idle has no function train"),
        (lambda: ft.run(Idle(), **SMALL), "The method Idle has no function train"),
        (lambda: ft.run(dict, **SMALL), "dict is not a method: it must be a subclass of fedtailor.Method"),
        (lambda: ft.run(Ditto(lam=0.2), lam=0.5, **SMALL), r"'lam' cannot be set beside it: write Ditto\(lam=…\)"),
        (lambda: ft.compare([Ditto()], **SMALL), "Give the class Ditto, not an object of it"),
        (lambda: ft.compare([Idle], **SMALL), "The method Idle has no function train"),
        (lambda: ft.compare([dict], **SMALL), "dict is not a method"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(call: typing.Callable[[], typing.Any], said: str) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        call()


def test_a_result_shows_itself(tmp_path: Path) -> None:
    result = ft.run("fedavg", out=tmp_path / "run", **SMALL)
    assert result.accuracy is not None
    assert repr(result) == (
        f"<RunResult fedavg on digits, 5 clients, 2 of 2 rounds: accuracy {100 * result.accuracy:.2f} % "
        f"(personal models, last round), in {tmp_path / 'run'}>"
    )
    page = result._repr_html_()
    assert page.count("<tr>") == 3  # the header, and a row a round
    assert result.experiment.evaluation.in_words() in page


def test_records_as_tables_of_pandas() -> None:
    result = ft.run("fedavg", **SMALL)
    rounds = result.to_pandas()
    assert list(rounds.index) == [1, 2]
    assert rounds.loc[2, "accuracy"] == result.accuracy
    clients = result.to_pandas("clients")
    assert len(clients) == 2 * 5 * 2  # rounds, clients, validation and test
    last = clients[(clients["round"] == 2) & (clients["split"] == "test")]
    assert last["accuracy"].tolist() == [result.per_client[client].accuracy for client in range(5)]
    assert last["n_samples"].tolist() == [len(result.data.client(client).test[1]) for client in range(5)]
    with pytest.raises(ft.FedtailorError, match="There is no table 'round'"):
        result.to_pandas("round")  # type: ignore[arg-type]


def test_compare_in_memory_and_in_a_directory_agree(tmp_path: Path) -> None:
    asked: dict[str, typing.Any] = {"seeds": [0, 1], "target": 0.3, "grid": {"lam": [0.1, 1.0]}, **SMALL}
    seen: list[str] = []
    table = ft.compare(["local", "ditto"], on_run=lambda title, result: seen.append(title), **asked)
    assert len(seen) == 6
    assert [line.title for line in table.lines] == ["local", "ditto, lam=0.1", "ditto, lam=1"]
    assert table.best is not None
    written = ft.compare(["local", "ditto"], out=tmp_path / "there", **asked)
    assert [line.accuracy for line in written.lines] == [line.accuracy for line in table.lines]
    again = ft.compare(["local", "ditto"], out=tmp_path / "there", on_run=lambda *_: pytest.fail("run again"), **asked)
    assert [line.accuracy for line in again.lines] == [line.accuracy for line in table.lines]
    more = ft.compare(
        ["local", "fedavg", "ditto"], out=tmp_path / "there", on_run=lambda title, _: seen.append(title), **asked
    )
    assert seen[6:] == ["fedavg, seed 0", "fedavg, seed 1"]
    assert [line.accuracy for line in more.lines if line.method != "fedavg"] == [line.accuracy for line in table.lines]
    written = more
    result = json.loads((tmp_path / "there/result.json").read_text())
    assert [line["accuracy"] for line in result["lines"]] == [line.accuracy for line in more.lines]
    assert (tmp_path / "there/table.tex").read_text() == written.latex()
    assert str(written) == (tmp_path / "there/table.txt").read_text()
    assert written._repr_html_().count("<tr>") == 5
    assert table.to_pandas().loc["local", "accuracy"] == table.lines[0].accuracy


def test_compare_takes_objects(tmp_path: Path) -> None:
    data = digits([40, 40, 40])
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    table = ft.compare(["local", "fedavg"], data=data, model=network, seeds=[0], rounds=2, engine="in-process")
    single = ft.run("fedavg", data=data, model=network, seed=0, rounds=2, engine="in-process")
    assert table.lines[1].accuracy == pytest.approx(sum(record.accuracy or 0 for record in single.rounds) / 2)
    asked: dict[str, typing.Any] = {"data": data, "model": network, "seeds": [0], "rounds": 2, "engine": "in-process"}
    recorded = ft.compare(["local", "fedavg"], **asked, out=tmp_path / "cmp")
    assert [line.accuracy for line in recorded.lines] == [line.accuracy for line in table.lines]
    ft.compare(["local", "fedavg"], **asked, out=tmp_path / "cmp", on_run=lambda *_: pytest.fail("run again"))


def test_compare_has_the_parameters_of_each_method() -> None:
    asked: dict[str, typing.Any] = {"seeds": [0], **SMALL}
    table = ft.compare(["ditto"], method_parameters={"ditto": {"lam": 0.2}}, **asked)
    assert table.lines[0].accuracy == ft.run("ditto", lam=0.2, seed=0, choose="last-5", **SMALL).accuracy
    with pytest.raises(ft.FedtailorError, match="give method_parameters="):
        ft.compare(["ditto"], parameters={"lam": 0.2}, **asked)


def test_report_of_results_and_of_directories(tmp_path: Path) -> None:
    kept = ft.run("local", out=tmp_path / "runs/local", **SMALL)
    in_memory = ft.run("pgfed", **SMALL)
    page = ft.report([tmp_path / "runs", in_memory], to=tmp_path / "page.html").read_text()
    assert "local" in page
    assert "pgfed" in page
    assert ft.report(kept, to=tmp_path / "one.html").is_file()


def test_advise_and_reproduce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtailor.studies.advice._first_rung", lambda budget, seconds: 25)  # on a slow machine, too
    settings = {"clients": 4, "partition": "classes:2", "budget": 1, "engine": "in-process"}  # which is easy to decide
    advice = ft.advise(data="digits", methods=["fedavg", "local"], **settings)
    assert advice.chosen in ("fedavg", "local")
    assert str(advice).splitlines()[-1].startswith("Recommended:")
    with pytest.raises(ft.FedtailorError, match="There is no preset"):
        ft.reproduce("pgfed/table99", out=tmp_path)


def test_data_by_the_public_names() -> None:
    clients = ft.federate(ft.load_data("digits"), partition="iid", clients=3)
    assert clients.n_clients == 3
    assert len(clients.client(0).train[1]) == int(clients.n_samples[0])

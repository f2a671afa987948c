"""Settings of any kind: a valid experiment, or one sentence that names the first wrong one."""

import time
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor._common.toml import parse_toml, write_toml
from fedtailor.cli.options import parse_assignments
from fedtailor.experiment import Experiment, make_experiment, read_experiment
from fedtailor.studies.comparison import make_comparison

HUGE = 10**5_000  # Python writes no number of so many digits


def refused(path: Path, content: bytes) -> str:
    (path / "mine.toml").write_bytes(content)
    began = time.process_time()
    with pytest.raises(FedtailorError) as caught:
        make_experiment(read_experiment(path / "mine.toml"))
    assert time.process_time() - began < 3
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a = " + b"[" * 100_000, "not valid TOML: nested too deep"),
        (b"a = " + b"{a=" * 20_000, "not valid TOML: nested too deep"),
        (b".".join([b"a"] * 100_000) + b" = 1", "a name of more than 50 parts"),
        (b"[" + b" . ".join([b'"a"'] * 100_000) + b"]", "a name of more than 50 parts"),
        (b"rounds = " + b"9" * 10_000, "not valid TOML: Exceeds the limit"),
        (b"data = '" + b"x" * 1_100_000 + b"'", "more than 1,000,000 characters"),
        (b"#" * 5_000_000, "is too large"),
        (b"data = '\xff'", "not valid TOML: 'utf-8' codec"),
        (b"\0", "not valid TOML"),
        (b"rounds = 2020-01-01", "The setting 'rounds' is datetime.date(2020, 1, 1), but it must be"),
        (b"lr = inf", "but it must be a finite number"),
        (b"evaluation = 3", "The setting 'evaluation' is 3, but it must be a table"),
        (b"[[evaluation]]\nmodel = 'x'", "The setting 'evaluation' is"),
        (b"parameters = [1]", "The setting 'parameters' is [1], but it must be a table"),
        (b"[[parameters]]\nlam = 1", "The setting 'parameters' is"),
        (b"[rounds]\nx = 1", "The setting 'rounds' is {'x': 1}, but it must be"),
        (b"rounds = 10000000000000", "but it must be at most 1e+09"),
        (b"batch = 10000000000000", "The setting 'batch' is 10000000000000"),
        (b"participation = 1" + b"0" * 400, "The setting 'participation'"),
        (b"head = 99999999999999", "The setting 'head'"),
        (b'data = "\\ud800"', "not valid TOML"),
        (b"x" * 10_000 + b" = 1", "There is no setting 'xxx"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refused(tmp_path, content)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfrounds = 3\n")
    assert make_experiment(read_experiment(tmp_path / "mine.toml")).rounds == 3


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").mkdir()
    with pytest.raises(FedtailorError, match="cannot be read: Is a directory"):
        read_experiment(tmp_path / "mine.toml")

    def no_permission(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "other.toml").write_text("")
    monkeypatch.setattr(Path, "read_text", no_permission)
    with pytest.raises(FedtailorError, match="cannot be read: Permission denied"):
        read_experiment(tmp_path / "other.toml")


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("nan"), [None], {1: 2}, {1}, b"\xff", object(), 1j], ids=type)
@pytest.mark.parametrize("name", Experiment.model_fields)
def test_any_value_of_any_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FedtailorError, match=name):
        make_experiment({name: value})


@pytest.mark.parametrize("text", ["\ud800", "x" * 1_100_000])
def test_text_that_no_file_can_hold_is_refused(text: str) -> None:
    with pytest.raises(FedtailorError, match=r"The setting 'data' is .*, which no experiment file can hold"):
        make_experiment({"data": text})


@pytest.mark.parametrize("text", ["\x7f", "\0\x1f", "a\nb", '"', "\\", "é\u202e", "'''"])
def test_text_comes_back_from_a_file_as_it_was(text: str) -> None:
    written = write_toml(make_experiment({"data": text, "parameters": {text: text}}).model_dump())
    again = make_experiment(parse_toml(written))
    assert (again.data, again.parameters) == (text, {text: text})


class Anything(ft.Method):
    """A method with a parameter of any kind."""

    thing: Any = 1

    def train(self, client: Any, message: Any) -> Any:
        raise AssertionError("no round may begin")


@pytest.mark.parametrize(
    "thing",
    [
        [None],
        [1, [None]],
        [{"a": 1}],
        {"a": 1},
        {1, 2},
        (1, (2,)),
        b"x",
        float("nan"),
        float("inf"),
        object(),
        "\ud800",
        HUGE,
    ],
    ids=type,
)
def test_parameters_that_no_file_can_hold_are_refused_before_the_run(tmp_path: Path, thing: Any) -> None:
    """And not when it is resumed."""
    for method, more in (
        (Anything(thing=thing), {}),
        ("tests.test_settings:Anything", {"parameters": {"thing": thing}}),
    ):
        with pytest.raises(FedtailorError, match="cannot be written to an experiment file: give numbers, texts"):
            ft.run(method, out=tmp_path / "run", clients=2, rounds=1, engine="in-process", **more)
        assert not (tmp_path / "run").exists()


def test_parameters_that_are_no_table() -> None:
    for wrong in (3, [1], "x", None):
        with pytest.raises(FedtailorError, match="The setting 'parameters' is"):
            ft.run("ditto", parameters=wrong, lam=1.0)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"methods": 3}, "must be a list of methods' names, not 3"),
        ({"methods": ["fedavg"], "seeds": [HUGE]}, "The setting 'seed' is an? int that is too large"),
        ({"methods": ["fedavg"], "target": HUGE}, "The target is an? int that is too large"),
        ({"methods": ["fedavg"], "parameters": [1]}, "stand in a section for each method"),
        ({"methods": ["fedavg"], "grid": {"lr": HUGE}}, "must be a list of values, not an? int"),
        (
            {
                "methods": ["fedavg"],
                "grid": {name: [0.1] * 100 for name in ("lr", "momentum", "weight_decay", "epochs")},
            },
            "would have 300,000,000 runs, more than 10,000: ask for fewer",
        ),
    ],
    ids=type,
)
def test_comparisons_that_cannot_be(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(FedtailorError, match=said):
        make_comparison(asked)


def test_values_of_set_are_read_in_any_case() -> None:
    deep, long = "[" * 100_000, "9" * 10_000
    assert parse_assignments([f"a={deep}", f"b={long}", "c=[1, 2]"]) == {"a": deep, "b": long, "c": [1, 2]}

"""An exception inside a client's work reaches its author: with file, line and the original exception as its cause."""

import re
import traceback
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from tests.engines import faults
from tests.engines.faults import NeedsTwo, OutOfReagent, Raising

SMALL: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 3, "epochs": 1, "model": "mlp:4"}
LINE = 1 + next(
    number for number, line in enumerate(Path(faults.__file__).read_text().splitlines()) if "# RAISED HERE" in line
)
ENGINES = pytest.mark.parametrize("engine", [{"engine": "in-process"}, {"engine": "processes", "workers": 2}])


def failure(kind: str, **settings: Any) -> ft.FedtailorError:
    """The error with which a run ends whose client fails so."""
    with pytest.raises(ft.FedtailorError) as caught:
        ft.run(Raising(kind=kind), on_failure="stop", **SMALL, **settings)
    return caught.value


@ENGINES
def test_the_error_is_one_sentence_with_the_place(engine: dict[str, Any]) -> None:
    said = str(failure("own", **engine))
    assert said == f"Raising, round 2: client 1 failed: OutOfReagent: bottle 7 is empty (faults.py, line {LINE})."


@ENGINES
@pytest.mark.parametrize(("kind", "type_"), [("own", OutOfReagent), ("library", KeyError)])
def test_its_cause_is_the_original_exception(kind: str, type_: type[Exception], engine: dict[str, Any]) -> None:
    cause = failure(kind, **engine).__cause__
    assert type(cause) is type_
    assert cause.args == (("bottle 7 is empty",) if kind == "own" else ("theta",))


def test_from_a_worker_comes_the_text_of_its_traceback() -> None:
    cause = failure("own", engine="processes", workers=2).__cause__
    assert cause is not None
    remote = cause.__cause__
    assert type(remote).__name__ == "RemoteTraceback"
    text = str(remote)
    assert re.search(rf'File ".*tests/engines/faults\.py", line {LINE}, in train', text)
    assert "OutOfReagent: bottle 7 is empty" in text
    assert "KeyError: 'reagent'" in text  # and what was behind it there
    shown = "".join(traceback.format_exception(failure("own", engine="processes", workers=2)))
    assert f"line {LINE}, in train" in shown  # so Python prints all of it
    assert shown.index("KeyError: 'reagent'") < shown.index("FedtailorError: Raising, round 2")


def test_in_process_the_exception_has_its_own_traceback() -> None:
    cause = failure("own", engine="in-process").__cause__
    assert cause is not None
    frames = traceback.extract_tb(cause.__traceback__)
    assert (Path(frames[-1].filename).name, frames[-1].lineno, frames[-1].name) == ("faults.py", LINE, "train")
    assert isinstance(cause.__cause__, KeyError)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("local", "Local: bottle 7 is empty"),
        ("cannot be unpacked", "NeedsTwo: bottle 7 and 8"),
        ("holds a function", "OutOfReagent: bottle 7 is empty"),
    ],
)
def test_an_exception_that_cannot_be_sent_arrives_as_its_text(kind: str, says: str) -> None:
    error = failure(kind, engine="processes", workers=2)
    assert type(error.__cause__) is RuntimeError
    assert str(error.__cause__) == says
    assert f"line {LINE}, in train" in str(error.__cause__.__cause__)
    assert f"client 1 failed: {says} (faults.py, line {LINE})." in str(error)
    original = failure(kind, engine="in-process").__cause__
    assert type(original) is not RuntimeError
    if kind == "cannot be unpacked":
        assert isinstance(original, NeedsTwo)


@ENGINES
def test_an_exception_with_a_tensor_in_it(engine: dict[str, Any]) -> None:
    cause = failure("with a tensor", **engine).__cause__
    assert isinstance(cause, OutOfReagent)


@pytest.mark.parametrize("engine", ["auto", "in-process", "processes"])
@pytest.mark.parametrize("on_failure", ["skip", "stop"])
def test_debug_stops_at_the_first_exception_with_the_place(engine: str, on_failure: str) -> None:
    """In process, whatever the engine; also where a failure would only be left out."""
    with pytest.raises(OutOfReagent, match="bottle 7 is empty") as caught:
        ft.run(Raising(), debug=True, engine=engine, workers=2, on_failure=on_failure, **SMALL)
    assert caught.value.__notes__ == ["In Raising, round 2, client 1."]
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert (frames[-1].lineno, frames[-1].name) == (LINE, "train")
    assert isinstance(caught.value.__cause__, KeyError)


@ENGINES
def test_a_client_that_is_left_out_is_named_with_the_place(engine: dict[str, Any]) -> None:
    says = rf"Raising, round 2: client 1 left out: OutOfReagent: bottle 7 is empty \(faults\.py, line {LINE}\)\."
    with pytest.warns(ft.ClientFailure, match=says):
        result = ft.run(Raising(), **SMALL, **engine)
    assert [record.failed for record in result.rounds] == [[], [1], []]


class Stumbling(ft.Method):
    """FedAvg that fails at the server, in one of its functions."""

    where: str = "receive"

    def _stumble(self, here: str, server: ft.Server) -> None:
        if here == self.where and (server.round == 2 or here == "start"):
            raise OutOfReagent("the shelf is empty")

    def start(self, server: ft.Server) -> None:
        self._stumble("start", server)
        super().start(server)

    def send_all(self, server: ft.Server) -> dict[int, ft.Message]:
        self._stumble("send", server)
        return dict(super().send_all(server))

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        self._stumble("receive", server)
        super().receive(server, total)

    def observe(self, server: ft.Server) -> ft.Message:
        self._stumble("observe", server)
        return {}


@pytest.mark.parametrize("where", ["start", "send", "receive", "observe"])
def test_a_fault_at_the_server_says_in_which_function(where: str) -> None:
    round = 0 if where == "start" else 2
    with pytest.raises(ft.FedtailorError) as caught:
        ft.run(Stumbling(where=where), engine="in-process", **SMALL)
    said = str(caught.value)
    place = r"OutOfReagent: the shelf is empty \(test_errors\.py, line \d+\)\."
    assert re.fullmatch(rf"Stumbling, round {round}, {where}: {place}", said)
    assert isinstance(caught.value.__cause__, OutOfReagent)
    with pytest.raises(OutOfReagent) as original:
        ft.run(Stumbling(where=where), debug=True, **SMALL)
    assert original.value.__notes__ == [f"In Stumbling, round {round}, {where}."]


@ENGINES
def test_an_evaluation_that_fails_names_its_cause(engine: dict[str, Any]) -> None:
    class Blind(ft.Method):
        def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
            return {"theta": client.descend(message["theta"])}

        def personal_model(self, client: ft.Client, message: ft.Message) -> Any:
            if client.id == 2:
                raise OutOfReagent("no light")
            return message["theta"]

    with pytest.raises(ft.FedtailorError, match="The evaluation of client 2 failed: OutOfReagent: no light") as caught:
        ft.run(Blind(), **SMALL, **engine, on_failure="stop")
    assert isinstance(caught.value.__cause__, OutOfReagent)
    with pytest.warns(ft.ClientFailure, match="Blind, round 1: client 2 not measured: OutOfReagent: no light") as said:
        result = ft.run(Blind(), **SMALL, **engine)
    assert len(said) == 1
    assert all(record.missing == [2] for record in result.rounds)

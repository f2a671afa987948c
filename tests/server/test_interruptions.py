"""A run that is interrupted anywhere goes on to the same numbers, and nothing of a half-done round is left."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor as ft
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.server.failures import MAX_FAILED_ROUNDS
from fedtailor.server.loop import Loop
from fedtailor.server.observations import Observations
from fedtailor.server.records import RoundRecord
from tests.helpers import assert_same, files, final, numbers
from tests.server.diary import Diary, armed

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 4,
    "participation": 3,
    "model": "mlp:4",
    "rounds": 6,
    "epochs": 1,
    "engine": "in-process",
    "checkpoint_every": 3,
    "seed": 9,  # client 2 takes part in rounds 1, 4 and 5, and not in all
}


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    armed.clear()
    yield
    armed.clear()


@cache
def whole(in_place: bool = False, keeping: bool = False) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The numbers and the last tensors of a run that was never interrupted."""
    result = ft.run(Diary(in_place=in_place, keeping=keeping), **SMALL)
    assert [2 in record.participants for record in result.rounds] == [True, True, False, True, True, False]
    return numbers(result.rounds), final(result)


def saved_round(run: Path) -> int:
    return int(json.loads((run / "checkpoint/manifest.json").read_text())["round"])


def interrupt(run: Path, method: Diary, where: str, round: int, **settings: Any) -> None:
    armed.add((where, round))
    with pytest.raises(KeyboardInterrupt):
        ft.run(method, out=run, **{**SMALL, **settings})
    assert not armed


def check_resumed(run: Path, method: Diary) -> None:
    resumed = ft.resume(run, method=method)
    expected, tensors = whole(method.in_place, method.keeping)
    assert numbers(resumed.rounds) == expected
    assert_same(final(resumed), tensors)


@pytest.mark.parametrize("states", ["memory", "disk"])
@pytest.mark.parametrize("where", ["send", "train", "receive", "evaluation", "observe"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_interruption_anywhere_changes_no_number(where: str, states: str, in_place: bool, tmp_path: Path) -> None:
    method = Diary(in_place=in_place)
    interrupt(tmp_path / "run", method, where, 5, states=states)
    assert len(ft.load(tmp_path / "run").rounds) == 4
    check_resumed(tmp_path / "run", method)
    whole_run = ft.run(method, out=tmp_path / "whole", **{**SMALL, "states": states})
    assert whole_run.finished
    for part in ("checkpoint", "observed"):
        assert files(tmp_path / "run" / part) == files(tmp_path / "whole" / part)


@pytest.mark.parametrize("where", ["receive", "evaluation", "observe"])
def test_a_half_done_round_is_not_checkpointed(where: str, tmp_path: Path) -> None:
    """Round 4 is done and would be saved; but round 5 has begun to change things, so the checkpoint before counts."""
    before = tmp_path / "before"
    ft.run(Diary(), out=before, **{**SMALL, "rounds": 3})
    interrupt(tmp_path / "run", Diary(), where, 5)
    assert saved_round(tmp_path / "run") == 3
    assert files(tmp_path / "run/checkpoint") == files(before / "checkpoint")


@pytest.mark.parametrize("where", ["send", "train"])
def test_before_its_first_effect_a_round_is_undone_and_the_one_before_saved(where: str, tmp_path: Path) -> None:
    """The server's state is rolled back, so that nothing of four rounds is lost."""
    before = tmp_path / "before"
    ft.run(Diary(), out=before, **{**SMALL, "rounds": 4})
    interrupt(tmp_path / "run", Diary(), where, 5)
    assert saved_round(tmp_path / "run") == 4
    assert files(tmp_path / "run/checkpoint") == files(before / "checkpoint")


@pytest.mark.parametrize("where", ["send", "train"])
@pytest.mark.parametrize("how", ["in_place", "keeping"])
def test_what_cannot_be_undone_is_not_saved(where: str, how: str, tmp_path: Path) -> None:
    """`send` changed a tensor in place, or what it keeps of clients: then the last checkpoint counts."""
    method = Diary(**{how: True})
    interrupt(tmp_path / "run", method, where, 5)
    assert saved_round(tmp_path / "run") == 3
    check_resumed(tmp_path / "run", method)


@pytest.mark.parametrize("where", ["send", "receive", "observe"])
def test_with_workers_too(where: str, tmp_path: Path) -> None:
    interrupt(tmp_path / "run", Diary(), where, 5, engine="processes", workers=2)
    check_resumed(tmp_path / "run", Diary())


@pytest.mark.parametrize("where", ["send", "train", "receive", "evaluation", "observe"])
def test_an_interruption_of_the_very_first_round(where: str, tmp_path: Path) -> None:
    interrupt(tmp_path / "run", Diary(), where, 1)
    assert saved_round(tmp_path / "run") == 0
    check_resumed(tmp_path / "run", Diary())


def test_two_interruptions_one_after_the_other(tmp_path: Path) -> None:
    interrupt(tmp_path / "run", Diary(), "evaluation", 4)
    for where, round in (("receive", 5), ("send", 6)):
        armed.add((where, round))
        with pytest.raises(KeyboardInterrupt):
            ft.resume(tmp_path / "run", method=Diary())
    check_resumed(tmp_path / "run", Diary())


def test_a_simulation_can_repeat_a_round_that_was_undone(tmp_path: Path) -> None:
    """Without a restart, in one process: the sites have stepped ahead, and step back."""
    simulation = Simulation(prepare(make_experiment(SMALL), Objects(method=Diary())))
    simulation.start()
    for number in range(1, SMALL["rounds"] + 1):
        if number == 5:
            armed.add(("train", 5))
            with pytest.raises(KeyboardInterrupt):
                simulation.round(number)
        simulation.round(number)
    assert numbers(simulation.loop.rounds) == whole()[0]


def test_inference_mode_at_the_server(tmp_path: Path) -> None:
    """Its tensors do not count their changes, so an interrupted round with them is never saved."""

    class Inferring(Diary):
        def receive(self, server: ft.Server, total: ft.Total) -> None:
            with torch.inference_mode():
                super().receive(server, total)
                server.state["theta"] = server.state["theta"] * 1.0

    assert numbers(ft.run(Inferring(), **SMALL).rounds) == whole()[0]
    armed.add(("send", 5))
    with pytest.raises(KeyboardInterrupt):
        ft.run(Inferring(), out=tmp_path / "run", **SMALL)
    assert saved_round(tmp_path / "run") == 3
    assert numbers(ft.resume(tmp_path / "run", method=Inferring()).rounds) == whole()[0]


# --- what was recorded after the checkpoint is made again, and is gone until then ---


def test_what_came_after_the_checkpoint_is_gone_before_the_first_round(tmp_path: Path) -> None:
    interrupt(tmp_path / "run", Diary(), "receive", 6, checkpoint_every=3)
    run = tmp_path / "run"
    assert set(files(run / "observed")) == {f"round-{number}.safetensors" for number in range(1, 6)}
    found: list[tuple[int, set[str], int, int]] = []

    def look(loop: Loop) -> None:
        lines = [len((run / f"{name}.jsonl").read_text().splitlines()) for name in ("rounds", "clients")]
        found.append((loop.finished, set(files(run / "observed")), *lines))  # type: ignore[arg-type]

    ft.resume(run, method=Diary(), on_start=look)
    assert found == [(3, {f"round-{number}.safetensors" for number in (1, 2, 3)}, 3, 3)]


def test_later_observations_are_cut_off(tmp_path: Path) -> None:
    observations = Observations(tmp_path / "observed", 10_000)
    for round in range(1, 6):
        observations.put(round, {"a": torch.full((3,), float(round))})
    observations.cut(2)
    assert observations.rounds() == [1, 2]
    assert set(files(tmp_path / "observed")) == {"round-1.safetensors", "round-2.safetensors"}
    observations.cut(2)
    assert observations.rounds() == [1, 2]
    in_memory = Observations(None, 10_000)
    for round in range(1, 6):
        in_memory.put(round, {"a": torch.full((3,), float(round))})
    in_memory.cut(0)
    assert in_memory.rounds() == []


def test_interrupted_between_rounds_everything_is_saved(tmp_path: Path) -> None:
    def stop(record: RoundRecord) -> None:
        if record.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run(Diary(), out=tmp_path / "run", on_round=stop, **SMALL)
    assert saved_round(tmp_path / "run") == 5
    check_resumed(tmp_path / "run", Diary())


# --- rounds in which everybody fails ---


class Failing(ft.Method):
    """FedAvg in which clients from `who` on fail in these rounds."""

    rounds: tuple[int, ...] = ()
    who: int = 0

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        if client.round in self.rounds and client.id >= self.who:
            raise OSError("no network")
        return {"theta": client.descend(message["theta"])}


@pytest.mark.filterwarnings("ignore::fedtailor.ClientFailure")
def test_only_failed_rounds_in_a_row_end_a_run() -> None:
    settings = {**SMALL, "rounds": 12, "participation": "all"}
    result = ft.run(Failing(rounds=(1, 2, 4, 5, 7, 8, 10, 12)), **settings)
    assert len(result.rounds) == 12
    assert [record.round for record in result.rounds if record.failed] == [1, 2, 4, 5, 7, 8, 10, 12]
    says = r"Failing: no client could do its work in 3 rounds in a row: OSError: no network \(test_interruptions\.py"
    with pytest.raises(ft.FedtailorError, match=says) as caught:
        ft.run(Failing(rounds=(1, 2, 4, 5, 6)), **settings)
    assert isinstance(caught.value.__cause__, OSError)
    assert MAX_FAILED_ROUNDS == 3


class Differing(ft.Method):
    """Every client fails, each in its own way."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        raise OSError("no network") if client.id % 2 else KeyError("theta")


def test_different_faults_are_told_apart_and_the_last_one_has_its_own_cause() -> None:
    with pytest.warns(ft.ClientFailure) as warned, pytest.raises(ft.FedtailorError) as caught:
        ft.run(Differing(), **{**SMALL, "participation": "all"})
    first = [str(warning.message).split(" (")[0] for warning in warned[:2]]
    assert first == [
        "Differing, round 1: clients 0, 2 left out: KeyError: 'theta'",
        "Differing, round 1: clients 1, 3 left out: OSError: no network",
    ]
    assert "3 rounds in a row: OSError: no network" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_short_run_in_which_nobody_replied_ends_with_an_error() -> None:
    with (
        pytest.warns(ft.ClientFailure),
        pytest.raises(ft.FedtailorError, match="no client could do its work in 2 rounds in a row"),
    ):
        ft.run(Failing(rounds=(1, 2)), **{**SMALL, "rounds": 2})


@pytest.mark.filterwarnings("ignore::fedtailor.ClientFailure")
def test_a_round_without_replies_leaves_the_servers_state() -> None:
    settings = {**SMALL, "participation": "all"}
    some, none = (
        ft.run("fedavg", **{**settings, "rounds": 1}),
        ft.run(Failing(rounds=(2,)), **{**settings, "rounds": 2}),
    )
    assert_same(some.server_state, none.server_state)
    assert none.rounds[1].bytes_up == 0
    assert none.rounds[1].bytes_down == none.rounds[0].bytes_down > 0
    assert none.rounds[1].accuracy == none.rounds[0].accuracy

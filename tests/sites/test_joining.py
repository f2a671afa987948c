"""Sites join by declaring facts: classes, columns by name, constants. The run is the one of a simulation."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from fedtailor._common.errors import ClientFailure, FedtailorError
from fedtailor._common.version import __version__
from fedtailor.data.agreement import read_agreement
from fedtailor.engines.channel import InMemory
from fedtailor.messages.letters import FAULTS, Letter, read_letter
from tests.sites.parts import Federation, Recorded, close_metrics, heard, same_server, table, tables

METHODS = ("pgfed", "pflego", "fedavg", "ditto", "pfedmb", "fedacs")


@pytest.mark.parametrize("method", METHODS)
def test_the_run_is_that_of_a_simulation(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, method=method)
    sites = federation.sites()
    real, simulated = federation.run(Recorded(sites)), federation.simulated()
    assert same_server(real.simulation, simulated.simulation)
    assert close_metrics(real, simulated)
    for number in range(3):
        assert torch.equal(federation.personal(number, real, sites), simulated.simulation.personal_model(number))
    agreement = read_agreement(tmp_path / "run")
    assert agreement is not None
    data = simulated.simulation.data
    assert data.preprocessing is not None
    assert agreement.common.preprocessing == data.preprocessing.model_copy(update={"ignored": ()})
    assert [hello.train for hello in agreement.declared] == data.n_samples.tolist()


def test_columns_go_by_name_and_not_by_place(tmp_path: Path) -> None:
    mixed = {name: frame[sorted(frame, reverse=bool(number))] for number, (name, frame) in enumerate(tables().items())}
    one, other = Federation(tmp_path / "one"), Federation(tmp_path / "other", mixed)
    first = {name: frame[list(mixed["north"])] for name, frame in mixed.items()}
    assert same_server(other.run().simulation, Federation(tmp_path / "same", first).run().simulation)
    declared = [read_agreement(each.root / "run") for each in (one, other) if each.run()]
    assert [{fact.name for fact in each.declared[0].facts or ()} for each in declared if each] == [
        {"f0", "f1", "f2", "f3", "sex", "ward"}
    ] * 2


def test_classes_are_those_of_all_sites(tmp_path: Path) -> None:
    data = tables()
    data["north"] = data["north"][data["north"].label == "well"].reset_index(drop=True)  # no site of class 0
    data["west"]["label"] = data["west"]["label"].replace("ill", "very ill")
    federation = Federation(tmp_path, data)
    real = federation.run()
    assert real.partition["classes"] == ["ill", "very ill", "well"]
    assert same_server(real.simulation, federation.simulated().simulation)


def test_a_class_that_the_plan_does_not_have_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, plan={"classes": ["well", "dead"]})
    with pytest.raises(FedtailorError, match=r"3 of 3 sites did not join: north: its data do not fit the federation"):
        federation.run()
    log = (tmp_path / "north" / "private" / "site.log").read_text()
    assert "The site north has the class 'ill', which the federation does not: its classes are well, dead." in log


def test_a_rare_class_is_not_declared(tmp_path: Path) -> None:
    data = tables()
    data["south"].loc[3, "label"] = "secret diagnosis"
    with pytest.raises(FedtailorError, match="1 of 3 sites did not join: south"):
        Federation(tmp_path, data).run()
    assert not any("secret" in path.read_text("latin1") for path in (tmp_path / "run").rglob("*") if path.is_file())
    federation = Federation(tmp_path / "given", data, plan={"classes": ["ill", "secret diagnosis", "well"]})
    assert federation.run().partition["classes"] == ["ill", "secret diagnosis", "well"]


@pytest.mark.parametrize(("change", "message"), [
    (lambda frame: frame.drop(columns="f2"), "'f2'"),
    (lambda frame: frame.assign(extra=1.5 + frame.f0), "'extra'"),
    (lambda frame: frame.assign(f0=[f"text {value:.0f}" for value in frame.f0]), "'f0'"),
])  # fmt: skip
def test_other_columns_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    data = tables()
    data["south"] = change(data["south"])
    with pytest.raises(FedtailorError, match=message) as caught:
        Federation(tmp_path, data).run()
    assert "south" in str(caught.value)


def test_features_of_the_plan_are_taken_from_wider_tables(tmp_path: Path) -> None:
    features = {"f0": "number", "f1": "number", "sex": ["f", "m"], "ward": "category"}
    wide, narrow = tables(), {name: frame[["label", *features]] for name, frame in tables().items()}
    one = Federation(tmp_path / "wide", wide, plan={"features": features})
    other = Federation(tmp_path / "narrow", narrow)
    assert same_server(one.run().simulation, other.run().simulation)
    hellos = read_agreement(one.root / "run")
    assert hellos is not None
    assert {fact.name: fact.values for fact in hellos.declared[0].facts or ()}["sex"] == ()
    del wide["west"]["f1"]
    with pytest.raises(FedtailorError, match="west: its data do not fit"):
        Federation(tmp_path / "without", wide, plan={"features": features}).run()


def test_a_column_that_one_site_never_filled(tmp_path: Path) -> None:
    data = tables()
    data["south"]["f1"] = float("nan")
    federation = Federation(tmp_path, data, plan={"features": dict.fromkeys(["f0", "f1", "f2"], "number")})
    assert len(federation.run().rounds) == 3


def test_balanced_classes_are_counted_at_the_sites(tmp_path: Path) -> None:
    federation = Federation(tmp_path, class_weights="balanced")
    assert same_server(federation.run().simulation, federation.simulated().simulation)


def test_labels_of_each_site_of_its_own(tmp_path: Path) -> None:
    data = tables()
    data["west"]["label"] = pd.cut(data["west"]["f0"], 3, labels=["low", "middle", "high"]).astype(str)
    federation = Federation(tmp_path, data, method="pflego", labels="own")
    real = federation.run()
    assert same_server(real.simulation, federation.simulated().simulation)
    text = (tmp_path / "run" / "federation.json").read_text()
    assert '"own_classes": 3' in text
    assert "middle" not in text


def test_a_regression(tmp_path: Path) -> None:
    data = {name: frame.assign(label=frame.f0 + 0.1 * frame.f1.fillna(0)) for name, frame in tables().items()}
    federation = Federation(tmp_path, data, method="fedavg", loss="mse", lr=0.01, clip=1.0)
    real = federation.run()
    assert same_server(real.simulation, federation.simulated().simulation)
    assert real.rounds[-1].rmse is not None


# --- silence, and coming back ---


def test_a_silent_site_is_left_out_and_comes_back(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="ditto", rounds=6, checkpoint_every=2)

    def away(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return "it is not connected" if site == "south" and round in (2, 3) else answer

    with heard() as said:
        real = federation.run(Recorded(federation.sites(), away))
    left, back, _ = said  # and at the end, how often
    assert left == "Ditto, round 2: client south left out: it is not connected."
    assert back == "Ditto, round 4: client south is back."
    assert [record.failed for record in real.rounds] == [[], [1], [1], [], [], []]
    assert not any(record.missing for record in real.rounds)  # the site's own model is still that of round 1


def test_a_silent_site_is_missing_where_the_model_is_shared(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedavg", rounds=4)

    def away(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return "it is not connected" if site == "south" and round in (2, 3) else answer

    with heard():
        real = federation.run(Recorded(federation.sites(), away))
    assert [record.missing for record in real.rounds] == [[], [1], [1], []]
    assert [record.evaluated for record in real.rounds] == [3, 2, 2, 3]


def test_a_silent_site_steps_on_from_its_own_state(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=4)

    def away(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return "it is not connected" if site == "south" and round == 3 else answer

    with heard():
        real = federation.run(Recorded(federation.sites(), away))
    assert real.simulation.loop.versions == {0: 4, 1: 4, 2: 4}


@pytest.mark.parametrize("killed", ["the coordinator", "all sites", "both"])
def test_who_is_restarted_goes_on_to_the_same_bits(killed: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=7, checkpoint_every=3, method="pgfed")
    sites = federation.sites()

    class Killed(Exception):
        pass

    def stop(record: Any) -> None:
        if killed != "the coordinator":
            sites.update(federation.sites())
        if record.round == 5 and killed != "all sites":
            raise Killed

    channel = Recorded(sites)
    if killed == "all sites":
        real = federation.run(channel, on_round=stop)
    else:
        with pytest.raises(Killed):
            federation.run(channel, on_round=stop)
        real = federation.run(Recorded(federation.sites()))
    simulated = federation.simulated()
    assert same_server(real.simulation, simulated.simulation)
    for number in range(3):
        assert torch.equal(federation.personal(number, real), simulated.simulation.personal_model(number))


def test_a_killed_server_steps_back(tmp_path: Path) -> None:
    """A server that dies without a word goes on from its last checkpoint; its sites step back with it."""
    federation = Federation(tmp_path, rounds=7, checkpoint_every=3)
    sites = federation.sites()
    saved = tmp_path / "saved"

    def keep(record: Any) -> None:
        if record.round == 5:  # the checkpoint on the disk is of round 3
            shutil.copytree(tmp_path / "run", saved)
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        federation.run(Recorded(sites), on_round=keep)
    shutil.rmtree(tmp_path / "run")
    saved.rename(tmp_path / "run")
    real = federation.run(Recorded(sites))
    assert same_server(real.simulation, federation.simulated().simulation)


def test_a_site_that_is_away_at_the_end_gets_its_model_later(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=2)

    def away(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return "it is not connected" if site == "south" and kind == "finish" else answer

    federation.run(Recorded(federation.sites(), away))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["phase"] == "incomplete"
    assert status["sites"]["south"] == "it has no model file yet: it is not connected"
    written = [path.read_bytes() for path in sorted((tmp_path / "west" / "private" / "models").iterdir())]
    federation.run()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["phase"] == "done"
    assert len(list((tmp_path / "south" / "private" / "models").iterdir())) == 2
    assert [path.read_bytes() for path in sorted((tmp_path / "west" / "private" / "models").iterdir())] == written


def test_a_lost_state_is_refused_in_one_sentence(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=3)
    federation.run()
    more = Federation(tmp_path, rounds=3)
    assert len(more.run().rounds) == 3  # nothing is left to do
    states = next((tmp_path / "south" / "private" / "runs").iterdir()) / "states"
    lost = states.rename(tmp_path / "lost")
    sites = federation.sites()
    run = next((tmp_path / "south" / "private" / "runs").iterdir()).name
    letter = work_letter(run, round=3, client=1, accepted=2)
    fault = read_letter(sites["south"].answer(letter)).header["fault"]
    assert FAULTS[fault].startswith("the state that the server asks for is not there: the site has lost it, or is")
    lost.rename(states)
    assert "fault" not in read_letter(federation.sites()["south"].answer(letter)).header
    others = next((tmp_path / "west" / "private" / "runs").iterdir()) / "states"
    for path in others.iterdir():
        path.rename(states / path.name.replace("client-2", "client-1"))
    fault = read_letter(federation.sites()["south"].answer(letter)).header["fault"]
    assert fault in ("state", "work")


def test_a_site_that_lost_its_state_is_named_and_writes_no_model(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="ditto", rounds=4, checkpoint_every=1)

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run(on_round=stop)
    (next((tmp_path / "south" / "private" / "runs").iterdir()) / "states").rename(tmp_path / "lost")
    said: list[str] = []

    def look(record: Any) -> None:
        said.append(json.loads((tmp_path / "run" / "status.json").read_text())["sites"]["south"])

    with pytest.warns(ClientFailure) as warned:
        federation.run(on_round=look)
    assert "client south left out: the state that the server asks for is not there" in str(warned[0].message)
    assert said == [f"it failed in round {round}: its own log says why" for round in (3, 4)]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["phase"] == "incomplete"
    assert status["sites"]["south"].startswith(
        "it has no model file yet: the state that the server asks for is not there"
    )
    assert not (tmp_path / "south" / "private" / "models").exists()
    assert len(list((tmp_path / "west" / "private" / "models").iterdir())) == 2


def work_letter(run: str, **header: Any) -> bytes:
    given = {"run": run, "asked": "train", "measure": 0, "durable": 0, **header}
    return Letter("work", given, {"theta": torch.zeros(1)}).pack()


def test_changed_data_are_noticed(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=4, checkpoint_every=1)

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run(on_round=stop)
    changed = table(1, rows=91)
    changed.to_csv(tmp_path / "south" / "patients.csv", index=False)
    with heard() as said:
        real = federation.run()
    assert "south left out: its data have changed since it joined" in said[0]
    assert [record.failed for record in real.rounds] == [[], [], [1], [1]]


def test_all_sites_must_be_there_at_the_beginning(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    sites = {name: site for name, site in federation.sites().items() if name != "west"}
    with pytest.raises(FedtailorError, match=r"1 of 3 sites did not join: west: it is not connected\."):
        federation.run(InMemory(sites))
    assert len(federation.run().rounds) == 3


def test_a_site_of_another_version_is_refused_with_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At joining, and when it comes back to a run."""
    federation = Federation(tmp_path, method="fedavg", rounds=2)
    older = Recorded(federation.sites())

    def ask(letters: Any, deadline: Any) -> Any:
        for site in letters:
            with monkeypatch.context() as patched:
                patched.setattr("fedtailor.sites.declaration.__version__", "0.0.9" if site == "south" else __version__)
                yield from Recorded.ask(older, {site: letters[site]}, deadline)

    why = f"south: it has fedtailor '0.0.9', but the server '{__version__}': install the same on both."
    with pytest.raises(FedtailorError, match=f"^1 of 3 sites did not join: {re.escape(why)}$"):
        federation.run(SimpleNamespace(ask=ask))
    federation.run()
    shutil.rmtree(tmp_path / "south" / "private" / "models")
    (tmp_path / "run" / "result.json").unlink()
    with heard():
        federation.run(SimpleNamespace(ask=ask))
    assert json.loads((tmp_path / "run" / "status.json").read_text())["sites"]["south"].endswith(why[7:-1])
    assert not (tmp_path / "south" / "private" / "models").exists()

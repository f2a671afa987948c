"""Clients that join a run that has begun."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.data.client_data import FederatedData, Join
from fedtailor.methods.fedacs import FedACS
from fedtailor.methods.fedamp import FedAMP
from fedtailor.methods.feddyn import FedDyn
from fedtailor.methods.scaffold import SCAFFOLD
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.page import html, prepare
from fedtailor.server.records import RoundRecord
from fedtailor.studies.summary import summarize
from tests.helpers import Quadratic, assert_same, digits, final, mean_output, numbers, rewrite, uneven_clients

SMALL: dict[str, Any] = {"model": "mlp:8", "epochs": 1, "participation": 2, "engine": "in-process"}
RULES = ["fedavg", "scaffold", "pgfed", "fedacs", "fedamp", "fedfomo", "pflego"]


def save(path: Path, parts: list[tuple[Tensor, Tensor]], names: list[str] | None = None) -> Path:
    """Write clients to an npz file; without names, it names none."""
    owner = np.repeat(names or [], [len(y) for _, y in parts] if names else [])
    x, y = (np.concatenate([part[side].numpy() for part in parts]) for side in (0, 1))
    np.savez(path, x=x, y=y, **({"client": owner} if names else {}))
    return path


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four clients, with two of four rounds done and a fifth client's file beside it."""
    monkeypatch.chdir(tmp_path)
    parts = digits([30, 40, 50, 60, 45], seed=2)
    save(tmp_path / "all.npz", parts[:4], ["a", "b", "c", "d"])
    save(tmp_path / "north.npz", parts[4:])
    return begin("fedavg")


def begin(method: Any, out: str = "run", **settings: Any) -> Path:
    """Interrupt a run after two of four rounds."""

    def stop(record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run(method, data="all.npz", rounds=4, out=out, on_round=stop, **{**SMALL, **settings})
    return Path(out)


def refused(path: Path, *said: str, **asked: Any) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ft.FedtailorError) as caught:
        ft.resume(path, **asked)
    for words in said:
        assert words in str(caught.value)
    after = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert after == before


class TestNumbers:
    @pytest.mark.parametrize("after", [1, 3])
    def test_fedavg_on_quadratics_is_the_mean_of_those_who_are_there(self, tmp_path: Path, after: int) -> None:
        """By hand: θ ← Σ n_i/n (θ − η H_i (θ − c_i)), over four clients and then over five."""
        data, centres, curvatures = uneven_clients(5)
        settings: dict[str, Any] = {"steps": 1, "batch": "full", "dtype": "float64", "test": 0.0, "validation": 0.0}
        settings |= {"evaluation": {"every": 0}, "engine": "in-process"}
        objects: dict[str, Any] = {"data": data[:4], "model": Quadratic(4), "loss": mean_output}
        ft.run("fedavg", **objects, rounds=after, out=tmp_path / "run", **settings)
        late = {"late": data[4]}
        result = ft.resume(tmp_path / "run", **objects, add_clients=late, rounds=after + 2)
        theta = torch.zeros(4, dtype=torch.float64)
        for round in range(1, after + 3):
            there = range(4 if round <= after else 5)
            n = torch.tensor([float(len(data[i][1])) for i in there], dtype=torch.float64)
            moved = [theta - 0.1 * curvatures[i] @ (theta - centres[i]) for i in there]
            theta = sum((share * each for share, each in zip(n / n.sum(), moved, strict=True)), torch.zeros_like(theta))
        found = result.global_vector()
        assert found is not None
        assert torch.allclose(found, theta, rtol=1e-12)
        assert [len(record.participants) for record in result.rounds] == [4] * after + [5] * 2
        assert result.simulation.server.n_samples.tolist() == [1, 2, 3, 1, 2]

    def test_participation_is_drawn_from_all_of_them(self, started: Path) -> None:
        result = ft.resume(started, add_clients="north.npz", rounds=20)
        called = [record.participants for record in result.rounds]
        assert all(4 not in participants for participants in called[:2])
        assert any(4 in participants for participants in called[2:])
        assert all(len(set(participants)) == 2 for participants in called)

    @pytest.mark.parametrize("method", RULES)
    @pytest.mark.usefixtures("started")
    def test_the_same_bits_on_every_engine_and_after_a_stop(self, method: str) -> None:
        """Rounds 1 and 2 stay as they are; rounds 3 and 4 do not depend on how they are computed."""
        begin(method, "begun", participation=3)
        first = numbers(ft.load("begun").rounds)
        for name in ("whole", "workers", "stopped", "disk"):
            shutil.copytree("begun", name)
        whole = ft.resume("whole", add_clients="north.npz")
        workers = ft.resume("workers", add_clients="north.npz", engine="processes", workers=2)
        disk = ft.resume("disk", add_clients="north.npz", states="disk")

        def stop(record: RoundRecord) -> None:
            raise KeyboardInterrupt

        def at_once(loop: object) -> None:
            raise KeyboardInterrupt

        for when in ({"on_start": at_once}, {"on_round": stop}):  # right after it was written down, and a round later
            with pytest.raises(KeyboardInterrupt):
                ft.resume("stopped", add_clients="north.npz", **when)
        stopped = ft.resume("stopped")
        assert numbers(whole.rounds)[:2] == first
        for other in (workers, stopped, disk):
            assert numbers(other.rounds) == numbers(whole.rounds)
            assert numbers(other.clients) == numbers(whole.clients)
            assert_same(final(other), final(whole))
        assert 4 in {client for record in whole.rounds for client in record.participants}

    def test_old_clients_train_as_before(self, started: Path) -> None:
        """Whoever shares nothing does not notice the newcomer: streams are the clients' own."""
        begin("local", "joined", participation="all")
        shutil.copytree("joined", "alone")
        joined = ft.resume("joined", add_clients="north.npz")
        alone = ft.resume("alone")
        for client in "abcd":
            assert torch.equal(joined.personal_vector(client), alone.personal_vector(client))


class TestRules:
    """What the server has of a client that joins is what it had of one that it did not call yet."""

    @pytest.mark.usefixtures("started")
    @pytest.mark.parametrize(("kind", "name"), [(SCAFFOLD, "c"), (FedDyn, "h")])
    def test_means_over_all_clients_stay_means(self, kind: type[ft.Method], name: str) -> None:
        begin(kind, "begun")
        before = ft.load("begun", method=kind()).server_state[name]
        with pytest.raises(KeyboardInterrupt):
            ft.resume("begun", method=kind, add_clients="north.npz", on_start=_interrupt)
        after = ft.load("begun", method=kind())
        assert torch.allclose(after.server_state[name], 4 / 5 * before)
        own = "c" if kind is SCAFFOLD else "gradient"
        states = [after.client_state(client).get(own, torch.zeros_like(before)) for client in range(5)]
        assert torch.allclose(after.server_state[name], torch.stack(states).mean(0), atol=1e-6)

    @pytest.mark.usefixtures("started")
    def test_fedacs_and_fedamp_compare_with_the_initial_vector(self) -> None:
        for kind, name in ((FedACS, "S"), (FedAMP, "D")):
            begin(kind, name)
            with pytest.raises(KeyboardInterrupt):
                ft.resume(name, method=kind, add_clients="north.npz", on_start=_interrupt)
            result = ft.load(name, method=kind())
            initial = result.simulation.terms.initial.double()
            models = [result.client_state(client).get("w", initial).double() for client in range(5)]
            found = result.server_state[name]
            for client, w in enumerate(models):
                expected = w @ initial / w.norm() / initial.norm() if name == "S" else (w - initial).square().sum()
                assert float(found[4, client]) == pytest.approx(float(expected), abs=1e-5)
            assert torch.equal(found[4], found[:, 4])
            if name == "D":
                mean = torch.stack(models).mean(0)
                assert torch.allclose(result.server_state["mean"].double(), mean, atol=1e-6)

    @pytest.mark.usefixtures("started")
    def test_others_get_what_start_gives(self) -> None:
        begin("pgfed", "begun")
        before = ft.load("begun").server_state["A"]
        with pytest.raises(KeyboardInterrupt):
            ft.resume("begun", add_clients="north.npz", on_start=_interrupt)
        after = ft.load("begun").server_state["A"]
        assert torch.equal(after[:4, :4], before)
        assert torch.equal(after[4], torch.full((5,), 0.5))  # 1/M with two participants
        assert torch.equal(after[:, 4], torch.full((5,), 0.5))


def _interrupt(loop: object) -> None:
    raise KeyboardInterrupt


class Counting(ft.Method):
    """Its state grows in a way that `start` does not know of."""

    def start(self, server: ft.Server) -> None:
        super().start(server)
        server.state["seen"] = torch.zeros(server.n_clients)

    def receive(self, server: ft.Server, total: ft.Total) -> None:
        super().receive(server, total)
        server.state["seen"] = torch.zeros(3, 7)

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}


class Closed(Counting):
    """It takes no new clients."""

    shared_part: ClassVar[str] = "nothing"

    def join(self, server: ft.Server, before: int) -> None:
        raise ft.FedtailorError("Closed takes no new clients: use `fedtailor adapt`.")


class TestRecord:
    def test_who_joined_when_and_from_where_is_written_down(self, started: Path) -> None:
        result = ft.resume(started, add_clients="north.npz")
        partition = json.loads((started / "partition.json").read_text())
        assert partition["clients"] == ["a", "b", "c", "d", "north"]
        (join,) = partition["joined"]
        assert (join["after"], join["clients"], join["source"]) == (2, ["north"], "north.npz")
        assert sum(map(sum, (partition[split][4] for split in ("train", "validation", "test")))) == 45
        assert partition["train"][4] == result.data.counts("train")[4].tolist()
        assert json.loads((started / "result.json").read_text())["joined"] == [{"after": 2, "clients": ["north"]}]
        loaded = ft.load(started)
        assert loaded.names == result.names == ("a", "b", "c", "d", "north")
        assert [record.evaluated for record in loaded.rounds] == [4, 4, 5, 5]
        assert torch.equal(loaded.personal_vector("north"), result.personal_vector("north"))

    def test_shares_are_the_runs(self, started: Path) -> None:
        begin("local", "half", test=0.4, validation=0.2, max_train=10)
        result = ft.resume("half", add_clients="north.npz")
        train, validation, test = (
            len(part[1]) for part in (result.data.train(4), result.data.validation(4), result.data.test(4))
        )
        assert (train, test) == (10, 18)
        assert validation < 9  # thinned as the training samples are

    def test_models_of_clients_that_joined_are_exported_and_used(self, started: Path) -> None:
        ft.resume(started, add_clients="north.npz")
        (file,) = ft.export(started, client="north", to="models")
        about = json.loads(file.with_suffix(".json").read_text())
        assert (about["client"], about["name"]) == (4, "north")
        other = json.loads(
            ft.export(begin("fedavg", "other"), client="a", to="other-models")[0].with_suffix(".json").read_text()
        )
        assert about["experiment"] != other["experiment"]
        from fedtailor.model_files.prediction import Model

        model = Model(file)
        samples = model.of_run(started, "north", "test")
        assert len(samples.labels) == about["test_samples"]
        found = model.predict(samples.inputs, samples.labels)
        assert found.accuracy == pytest.approx(about["accuracy"])

    def test_the_same_call_goes_on(self, started: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            ft.resume(started, add_clients=["north.npz"], on_start=_interrupt)
        result = ft.resume(started, add_clients=["north.npz"])
        assert result.names.count("north") == 1
        assert result.finished

    def test_a_second_one_joins_later(self, started: Path) -> None:
        ft.resume(started, add_clients="north.npz")
        save(Path("more.npz"), digits([20, 25], seed=5), ["e", "f"])
        result = ft.resume(started, add_clients={"west": "north.npz"}, rounds=5)
        result = ft.resume(started, add_clients="more.npz", rounds=6)
        assert result.names == ("a", "b", "c", "d", "north", "west", "e", "f")
        assert [record.evaluated for record in result.rounds] == [4, 4, 5, 5, 6, 8]
        assert [join.after for join in result.partition["joined"]] == [2, 4, 5]

    def test_clients_that_the_run_held_out(self, started: Path) -> None:
        begin("fedavg", "held", new_clients=2)
        before = ft.load("held")
        data = before.data
        training, held = before.names[:2], before.names[2:]
        result = ft.resume("held", add_clients=held[1])
        assert result.names == (*training, held[1], held[0])
        assert result.partition["new"] == [3]
        assert torch.equal(result.data.x, data.x)
        assert torch.equal(result.data.train(2)[0], data.train(3)[0])
        assert [record.evaluated for record in result.rounds] == [2, 2, 3, 3]
        assert ft.adapt("held", epochs=1).per_client[3].name == held[0]
        result = ft.resume("held", add_clients="north.npz", rounds=5)
        assert result.names == (*training, held[1], "north", held[0])

    def test_python_objects_are_given_again(self, started: Path) -> None:
        parts = digits([30, 40, 50], seed=2)
        settings: dict[str, Any] = {**SMALL, "data": parts[:2]}
        ft.run("ditto", rounds=2, out="own", **settings)
        late = {"late": parts[2]}
        ft.resume("own", data=parts[:2], add_clients=late, rounds=3)
        refused(Path("own"), "'late' joined the run as a Python object: pass it again", data=parts[:2], rounds=4)
        result = ft.resume("own", data=parts[:2], add_clients=late, rounds=4)
        assert result.names == ("0", "1", "late")
        again = ft.load("own", data=parts[:2], joined=late)
        assert torch.equal(again.personal_vector("late"), result.personal_vector("late"))
        changed = {"late": (parts[2][0] + 1, parts[2][1])}
        refused(Path("own"), "not those that joined the run", data=parts[:2], add_clients=changed, rounds=5)

    def test_labels_of_its_own_and_images(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        rng = np.random.default_rng(0)

        def images(name: str, classes: list[int], clients: list[str]) -> None:
            n = 40 * len(clients)
            x = rng.integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)
            np.savez(name, x=x, y=rng.choice(classes, n), client=np.repeat(clients, 40))

        images("images.npz", [0, 1, 2], ["a", "b"])
        images("other.npz", [7, 9], ["c"])
        settings: dict[str, Any] = {"model": "lenet", "labels": "own", "rounds": 1, "epochs": 1, "engine": "in-process"}
        before = ft.run("fedper", data="images.npz", out="run", **settings)
        result = ft.resume("run", add_clients="other.npz", rounds=2)
        assert result.data.x.stride() == before.data.x.stride()
        assert torch.equal(result.data.x[: len(before.data.x)], before.data.x)
        assert result.data.classes_of(2)[:2] == ("7", "9")
        images("many.npz", [0, 1, 2, 3], ["d"])
        refused(Path("run"), "has 4 classes, but none of the run's had more than 3", add_clients="many.npz", rounds=3)


class TestRefusals:
    def test_a_finished_run_needs_more_rounds(self, started: Path) -> None:
        ft.resume(started)
        refused(started, "has done all its 4 rounds", "--rounds 8", add_clients="north.npz")
        assert ft.resume(started, add_clients="north.npz", rounds=5).rounds[-1].evaluated == 5

    def test_a_run_that_has_not_begun(self, started: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            ft.run("fedavg", data="all.npz", out="new", on_start=_interrupt, **SMALL)
        refused(Path("new"), "has no finished round yet", add_clients="north.npz")

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ("nowhere.npz", "There is no file nowhere.npz"),
            ("a", "The run has a client 'a' already"),
            ({"b": "north.npz"}, "The run has a client 'b' already"),
            ("all.npz", "The run has a client 'a' already"),
            ({"x": "all.npz"}, "The data of 'x' name 4 clients (a, b, c, d): give no name"),
            ("narrow.npz", "have the shape 3, but the run's have 64"),
            ("strange.npz", "has the class 'zebra', which the run does not"),
        ],
    )
    def test_what_does_not_fit_is_named(self, started: Path, asked: Any, said: str) -> None:
        x, y = digits([20], seed=7)[0]
        np.savez("narrow.npz", x=x[:, :3].numpy(), y=y.numpy())
        np.savez("strange.npz", x=x.numpy(), y=np.array(["zebra", "1"] * 10))
        refused(started, said, add_clients=asked)

    def test_an_unknown_name_where_some_are_held_out(self, started: Path) -> None:
        begin("fedavg", "held", new_clients=1)
        held = ft.load("held").names[3]
        refused(Path("held"), "There is no client or file 'nobody'", f"held out ({held})", add_clients="nobody")
        begin("fedavg", "new", new_clients=1, evaluate_clients="new")
        refused(Path("new"), "measures the clients that it held out", "fedtailor adapt", add_clients=held)

    @pytest.mark.parametrize(
        ("kind", "said"), [(Counting, "its state 'seen' has no room"), (Closed, "Closed takes no")]
    )
    def test_a_method_that_cannot(self, started: Path, kind: type[ft.Method], said: str) -> None:
        begin(kind, "mine")
        refused(Path("mine"), said, "fedtailor adapt", method=kind, add_clients="north.npz")

    def test_other_data_than_those_that_joined(self, started: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            ft.resume(started, add_clients="north.npz", on_start=_interrupt)
        save(Path("north.npz"), digits([45], seed=9))
        refused(started, "The samples of north ('north.npz') are not those that joined the run")
        Path("north.npz").unlink()
        refused(started, "There is no file north.npz")
        assert ft.load(started).names[4] == "north"  # looking needs no data

    def test_an_older_checkpoint(self, started: Path) -> None:
        shutil.copytree(started / "checkpoint", "kept")
        ft.resume(started, add_clients="north.npz")
        rewrite(started / "partition.json", joined=[{**_join(started), "after": 4}])
        shutil.rmtree(started / "checkpoint")
        shutil.copytree("kept", started / "checkpoint")
        refused(started, "Clients have joined this run after round 4, but its checkpoint is of round 2", rounds=5)

    def test_a_partition_that_contradicts_itself(self, started: Path) -> None:
        ft.resume(started, add_clients="north.npz")
        rewrite(started / "partition.json", joined=[{**_join(started), "clients": ["a"]}])
        with pytest.raises(ft.FedtailorError, match=r"partition.json is damaged .*names other clients that joined"):
            ft.load(started)


def _join(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "partition.json").read_text())["joined"][0]
    return found


def test_data_keep_their_place() -> None:
    """Appended samples come last; a client that joins comes before those that are still new."""
    x, y = torch.arange(12.0)[:, None], torch.zeros(12)
    bounds = torch.tensor([[0, 2, 3, 4], [4, 6, 7, 8], [8, 10, 11, 12]])
    data = FederatedData("d", x, y, bounds, (), ("a", "b", "n"), frozenset({2}))
    other = FederatedData("o", x[:4] + 100, y[:4], bounds[:1], (), ("late",))
    joined = data.with_new(other).with_joined(Join(1, ("late",), "o", None, ""))
    assert joined.names == ("a", "b", "late", "n")
    assert joined.new == {3}
    assert torch.equal(joined.x[:12], x)
    assert joined.train(2)[0].flatten().tolist() == [100, 101]
    assert joined.test(3)[0].flatten().tolist() == data.test(2)[0].flatten().tolist() == [11]


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("method", ["pgfed", "pfedmb", "fedacs", "fedamp", "fedfomo", "apfl", "ifca", "local"])
def test_tables_and_figures_say_so(method: str) -> None:
    """Diagnostics of rounds with fewer clients are drawn too."""
    begin(method, "run-of-it")
    result = ft.resume("run-of-it", add_clients="north.npz")
    said = "1 client joined after round 2 (north)."
    assert said in summarize([result]).caption
    report = prepare(read_runs([Path("run-of-it")]))
    assert said in html(report)
    assert said.rstrip(".") in report.figures[0].caption
    assert any(section.anchor.startswith("method-") for section in report.sections) == (method != "local")

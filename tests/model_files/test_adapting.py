"""Clients that never took part: the method's own model for them, epoch by epoch, beside one from scratch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.data import federate, load
from tests.helpers import defined, digits, files

SMALL: dict[str, Any] = {"data": "digits", "clients": 7, "new_clients": 3, "model": "mlp:16", "rounds": 2, "epochs": 2,
                         "engine": "in-process", "seed": 2}  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "ditto", "pfedmb", "ifca", "fedbabu"])
def test_each_epoch_is_what_a_run_that_fine_tunes_so_long_measures_of_its_new_clients(method: str) -> None:
    outcome = ft.adapt(ft.run(method, **SMALL), epochs=3)
    assert set(outcome.per_client) == {4, 5, 6}
    for epochs in (0, 3):
        run = ft.run(method, **SMALL, evaluation={"clients": "new", "fine_tune": epochs})
        for client, metrics in run.per_client.items():
            assert defined(outcome.per_client[client].adapted[epochs]) == pytest.approx(defined(metrics), rel=1e-6)
        assert outcome.adapted[epochs].accuracy == pytest.approx(run.accuracy, abs=1e-12)


def test_the_reference_begins_with_the_networks_first_vector_and_sees_the_same_batches() -> None:
    """It is Local: what a new client would have alone after so many epochs."""
    outcome = ft.adapt(ft.run("ditto", **SMALL), epochs=2)
    for epochs in range(3):
        alone = ft.run("local", **SMALL, evaluation={"clients": "new", "fine_tune": epochs})
        for client, metrics in alone.per_client.items():
            assert defined(outcome.per_client[client].local[epochs]) == pytest.approx(defined(metrics), rel=1e-6)
    first, _, last = (of_epoch.accuracy for of_epoch in outcome.local)
    assert first is not None
    assert last is not None
    assert last > first


def test_the_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    ft.run("pgfed", **SMALL, out=tmp_path / "run")
    before = files(tmp_path / "run")
    one = ft.adapt(tmp_path / "run", epochs=2, to=tmp_path / "one", engine="in-process")
    two = ft.adapt(tmp_path / "run", epochs=2, to=tmp_path / "two", engine="processes", workers=2)
    assert one.per_client == two.per_client
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert files(tmp_path / "run") == before
    assert set(files(tmp_path / "one")) == {
        *("adapt.json", "adapt.csv"),
        *(f"adapted-{client}.{kind}" for client in (4, 5, 6) for kind in ("json", "safetensors")),
    }


def test_what_is_exported_is_the_model_after_the_last_epoch(tmp_path: Path) -> None:
    result = ft.run("ditto", **SMALL)
    outcome = ft.adapt(result, epochs=2, to=tmp_path)
    for client in (4, 5, 6):
        file = tmp_path / f"adapted-{client}.safetensors"
        about = json.loads(file.with_suffix(".json").read_text())
        x, y = result.data.test(client)
        hits = (ft.load_model(file)(x).argmax(1) == y).double().mean().item()
        assert hits == about["accuracy"] == outcome.per_client[client].adapted[2].accuracy
        assert (about["kind"], about["client"], about["fine_tuned"]) == ("adapted", client, 2)
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, outcome.models[client][name])
    written = json.loads((tmp_path / "adapt.json").read_text())
    assert [record["accuracy"] for record in written["adapted"]] == [one.accuracy for one in outcome.adapted]
    assert [one["local"] for one in written["clients"]] == [
        [defined(metrics) for metrics in one.local] for one in outcome.per_client.values()
    ]
    lines = (tmp_path / "adapt.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2"]
    assert float(lines[3].split(",")[1]) == outcome.adapted[2].accuracy


def write(path: Path, labels: list[int], names: dict[int, str] | None = None, **more: Any) -> Path:
    """The digits with these labels (under other names), as a new client would have them."""
    x, y = digits([600])[0]
    chosen = torch.isin(y, torch.tensor(labels))
    named = [(names or {}).get(label, str(label)) for label in y[chosen].tolist()]
    clients = {key: np.resize(value, len(named)) for key, value in more.items()}
    np.savez(path, x=x[chosen].numpy().reshape(-1, 1, 8, 8), y=np.array(named), **clients)
    return path


def test_new_data_without_clients_are_one_clients_and_classes_go_by_their_names(tmp_path: Path) -> None:
    """A new client need not have all classes: 7 is 7, and not the second of two."""
    result = ft.run("fedavg", **{**SMALL, "partition": "iid", "rounds": 4})
    outcome = ft.adapt(result, data=write(tmp_path / "new.npz", [4, 7]), epochs=1, to=tmp_path / "out")
    assert list(outcome.per_client) == [0]
    assert (outcome.adapted[0].accuracy or 0) > 0.5  # of the global model, that knows the digits
    client = federate(load(str(tmp_path / "new.npz")), partition="iid", clients=1, seed=2)
    x, y = client.test(0)
    found = ft.predict(tmp_path / "out" / "adapted-0.safetensors", x)
    assert len(found.classes) == 10
    hits = [name == client.classes[label] for name, label in zip(found.predicted, y.tolist(), strict=True)]
    assert np.mean(hits) == outcome.per_client[0].adapted[1].accuracy
    assert np.mean(hits) > 0.8
    assert outcome.per_client[0].n_test == len(y)


def test_new_data_may_name_clients_or_be_partitioned(tmp_path: Path) -> None:
    result = ft.run("fedavg", **SMALL)
    named = write(tmp_path / "named.npz", [1, 2, 3], client=["a", "b"])
    assert [one.name for one in ft.adapt(result, data=named, epochs=1).per_client.values()] == ["a", "b"]
    three = ft.adapt(result, data=named, epochs=1, clients=3, partition="iid", test=0.5)
    assert [one.name for one in three.per_client.values()] == ["0", "1", "2"]
    halves = [one.n_test / (one.n_train + one.n_test) for one in three.per_client.values()]
    assert all(0.5 <= half < 0.6 for half in halves)  # and a tenth to validate, as in the run
    x, y = digits([60])[0]
    assert len(ft.adapt(result, data=[(x.view(-1, 1, 8, 8), y)], epochs=1).per_client) == 1


def test_labels_of_the_clients_own(tmp_path: Path) -> None:
    """A new client's head has as many outputs that count as it has classes, whatever they are called."""
    x, y = digits([500])[0]
    groups = [torch.isin(y, torch.tensor(labels)) for labels in ([0, 1, 2], [3, 4, 5])]
    clients = [(x.view(-1, 1, 8, 8)[mask][:40], y[mask][:40]) for mask in groups]
    settings = {"data": clients, "labels": "own", "clients": None, "new_clients": 0}
    result = ft.run("fedper", **{**SMALL, **settings})
    animals = write(tmp_path / "new.npz", [8, 9], {8: "cat", 9: "dog"})
    ft.adapt(result, data=animals, epochs=1, to=tmp_path / "out")
    about = json.loads((tmp_path / "out" / "adapted-0.json").read_text())
    assert (about["classes"], about["counted"], about["outputs"]) == (["cat", "dog"], 2, 3)
    many = write(tmp_path / "many.npz", [5, 6, 7, 8])
    with pytest.raises(ft.FedtailorError, match="has 4 classes, but none of the run's had more than 3"):
        ft.adapt(result, data=many)


def test_what_does_not_fit_the_run_is_refused(tmp_path: Path) -> None:
    result = ft.run("fedavg", **{**SMALL, "new_clients": 0})
    strange = write(tmp_path / "strange.npz", [1, 2], {2: "cat"})
    x, y = digits([60])[0]
    for data, settings, said in (
        (None, {}, "held out no new clients: give it data of new ones with --data"),
        (None, {"partition": "iid"}, "'partition' says something of new data: name these with --data too"),
        (strange, {}, "has the class 'cat', which the run does not: it knows 0, 1, 2,"),
        ([(x, y)], {}, "have the shape 64, but the run's have 1×8×8"),
        ([(x.view(-1, 1, 8, 8), y.double())], {}, "are not of the run's kind"),
        (strange, {"partitoin": "iid"}, "no setting of new data 'partitoin': did you mean 'partition'"),
        (strange, {"pixels": "signed"}, "no setting of new data 'pixels'"),
        (strange, {"epochs": 0}, "fine-tune for at least 1"),
        (strange, {"engine": "spark"}, "The setting 'engine' is 'spark'"),
    ):
        with pytest.raises(ft.FedtailorError, match=said):
            ft.adapt(result, data=data, to=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_files_are_not_written_over_unless_that_is_allowed(tmp_path: Path) -> None:
    result = ft.run("fedavg", **SMALL)
    (tmp_path / "adapt.csv").write_text("mine")
    with pytest.raises(ft.FedtailorError, match=r"adapt.csv exists already"):
        ft.adapt(result, epochs=1, to=tmp_path)
    assert files(tmp_path) == {"adapt.csv": b"mine"}
    ft.adapt(result, epochs=1, to=tmp_path, overwrite=True)
    assert len(files(tmp_path)) == 8


class Failing(ft.Method):
    """Cannot serve a client that did not train."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        client.state["there"] = torch.ones(1)
        return {"theta": message["theta"]}

    def personal_model(self, client: ft.Client, message: ft.Message) -> torch.Tensor:
        return message["theta"] * client.state["there"]


def test_a_method_that_cannot_serve_new_clients_says_so() -> None:
    with pytest.raises(ft.FedtailorError, match="New client 4 cannot be served: KeyError: 'there'"):
        ft.adapt(ft.run(Failing(), **SMALL), epochs=1, engine="in-process")

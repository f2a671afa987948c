"""Hostile clients: each attack against a slow version, the same bits on all engines and after any interruption."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.engines.hostile import Tampering, little_z
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment.attack import Attack, Kind
from fedtailor.messages import NEVER, Declaration, Reply, Request, State, Train
from fedtailor.messages.store import Store
from fedtailor.messages.transport import Relay
from fedtailor.methods import CATALOGUE
from fedtailor.methods.fedavg import FedAvg
from fedtailor.server.checkpoint import read_manifest
from fedtailor.server.run_directory import RunDirectory
from fedtailor.sites.plan import Plan
from tests.helpers import assert_same, digits, final, make_simulation, numbers
from tests.kills.engine import killed_while_writing

KINDS = get_args(Kind)
REFUSED = ("nan", "wrong-shape", "wrong-name")
HOSTILE = (1, 4, 7, 8)
SMALL: dict[str, Any] = {"clients": 10, "epochs": 1, "batch": 50, "lr": 0.05, "model": "mlp:8", "dtype": "float64"}


def attack(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "clients": HOSTILE, **more}


@pytest.fixture(autouse=True)
def failures_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def uploads(made: Simulation, number: int = 1) -> tuple[dict[int, State], dict[int, Any]]:
    """Have the participants of a round train: what each of them uploads, and what it was sent."""
    made.loop.call(number)
    messages = made.loop._messages()
    requests = [Train(number, client, message, NEVER) for client, message in messages.items()]
    replies = {reply.clients[0]: reply for reply in made.transport.ask(requests)}
    assert not any(reply.error for reply in replies.values())
    return {client: replies[client].upload for client in sorted(replies)}, messages


def both(kind: str, method: str = "fedavg", **settings: Any) -> tuple[dict[int, State], dict[int, State], Any]:
    """What clients upload without the attack and with it, and what they were sent."""
    factor = {"factor": settings.pop("factor")} if "factor" in settings else {}
    honest, _ = uploads(make_simulation(method, **SMALL, **settings))
    tampered, sent = uploads(make_simulation(method, **SMALL, **settings, attack=attack(kind, **factor)))
    for client in set(honest) - set(HOSTILE):
        assert_same(honest[client], tampered[client])
    return honest, tampered, sent


# --- each attack against a slow version ---


@pytest.mark.parametrize(("kind", "given", "times"), [
    ("sign-flip", None, -1.0), ("sign-flip", 3.0, -3.0), ("scaling", None, 10.0), ("scaling", 0.5, 0.5),
])  # fmt: skip
def test_changes_are_multiplied(kind: str, given: float | None, times: float) -> None:
    """SCAFFOLD uploads a model, which is a change of what was sent, and a change."""
    honest, tampered, sent = both(kind, "scaffold", **({} if given is None else {"factor": given}))
    for client in HOSTILE:
        before, now = honest[client]["theta"].tolist(), tampered[client]["theta"].tolist()
        start = sent[client]["theta"].tolist()
        wanted = [s + times * (x - s) for s, x in zip(start, before, strict=True)]
        assert now == pytest.approx(wanted, rel=1e-12, abs=1e-14)
        assert any(abs(x - s) > 1e-4 for s, x in zip(start, before, strict=True))
        wanted = [times * x for x in honest[client]["change"].tolist()]
        assert tampered[client]["change"].tolist() == pytest.approx(wanted, rel=1e-12)


def test_gaussian_noise_has_the_norm_of_the_change_and_a_stream_of_its_own() -> None:
    honest, tampered, sent = both("gaussian")
    noise = []
    for client in HOSTILE:
        change = honest[client]["theta"].numpy() - sent[client]["theta"].numpy()
        noise.append(tampered[client]["theta"].numpy() - sent[client]["theta"].numpy())
        assert np.linalg.norm(noise[-1]) == pytest.approx(np.linalg.norm(change), rel=0.1)  # of 600 numbers
        assert abs(np.corrcoef(noise[-1], change)[0, 1]) < 0.2
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.2
    _, twice, _ = both("gaussian", factor=2.0)
    for client, before in zip(HOSTILE, noise, strict=True):
        now = twice[client]["theta"].numpy() - sent[client]["theta"].numpy()
        np.testing.assert_allclose(now, 2 * before, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("given", [None, 1.5])
def test_little_stays_z_deviations_below_the_mean_of_the_colluding_clients(given: float | None) -> None:
    honest, tampered, sent = both("little", **({} if given is None else {"factor": given}))
    z = NormalDist().inv_cdf((10 - 4 - 2) / (10 - 4)) if given is None else given  # s = 5 + 1 − 4
    start = sent[0]["theta"].tolist()
    for place in range(0, len(start), 37):
        changes = [float(honest[client]["theta"][place]) - start[place] for client in HOSTILE]
        mean = sum(changes) / 4
        deviation = (sum((change - mean) ** 2 for change in changes) / 4) ** 0.5
        for client in HOSTILE:
            assert float(tampered[client]["theta"][place]) == pytest.approx(start[place] + mean - z * deviation)


def rows_of(uploads: dict[int, State], sent: Any, clients: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.stack([(uploads[client]["theta"] - sent[client]["theta"]).numpy() for client in clients])


def test_min_max_is_as_far_from_an_honest_change_as_two_of_these_are_from_each_other() -> None:
    """Against the search of the paper: γ is halved until it is known."""
    honest, tampered, sent = both("min-max")
    known = rows_of(honest, sent, set(range(10)) - set(HOSTILE))
    mean = known.mean(0)
    unit = -mean / np.linalg.norm(mean)
    widest = max(np.linalg.norm(one - other) for one in known for other in known)
    low, high = 0.0, 100.0
    for _ in range(60):
        gamma = (low + high) / 2
        inside = max(np.linalg.norm(mean + gamma * unit - row) for row in known) <= widest
        low, high = (gamma, high) if inside else (low, gamma)
    assert low > np.linalg.norm(mean)  # it points away from where the honest clients go
    for row in rows_of(tampered, sent, HOSTILE):
        np.testing.assert_allclose(row, mean + low * unit, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("given", "times"), [(None, -10.0), (0.5, -0.5)])
def test_inner_product_is_the_negative_mean_of_the_honest_changes(given: float | None, times: float) -> None:
    honest, tampered, sent = both("inner-product", **({} if given is None else {"factor": given}))
    mean = rows_of(honest, sent, set(range(10)) - set(HOSTILE)).mean(0)
    for row in rows_of(tampered, sent, HOSTILE):
        np.testing.assert_allclose(row, times * mean, rtol=1e-9, atol=1e-13)


class Fixed(Relay):
    """Sites that upload what is given, in this order; None: an error."""

    def __init__(self, uploads: dict[int, list[float] | None]) -> None:
        self.uploads = uploads

    def ask(self, requests: Any) -> Iterator[Reply]:
        for client, x in self.uploads.items():
            yield Reply((client,), error="no") if x is None else Reply((client,), {"theta": torch.tensor(x).double()})


def colluded(kind: str, uploads: dict[int, list[float] | None], hostile: list[int]) -> dict[int, list[float]]:
    transport = Tampering(Fixed(uploads), Attack(kind=kind), hostile, FedAvg(), 0, Store(None, "hostile"))  # type: ignore[arg-type]
    requests = [Train(1, client, {"theta": torch.zeros(2).double()}) for client in sorted(uploads)]
    return {reply.clients[0]: reply.upload["theta"].tolist() for reply in transport.ask(requests) if not reply.error}


@pytest.mark.parametrize("kind", ["little", "min-max", "inner-product"])
def test_colluding_clients_reply_last_with_the_same_bits_in_any_order(kind: str) -> None:
    some: dict[int, list[float] | None] = {
        0: [0.1, 0.2],
        1: [0.7, -0.3],
        2: [1e-9, 3.3],
        3: [1 / 3, 9.0],
        4: [5.0, 1.0],
    }
    found = colluded(kind, some, [0, 3])
    assert list(found) == [1, 2, 4, 0, 3]
    assert found[0] == found[3]
    assert colluded(kind, dict(reversed(some.items())), [0, 3]) == found


def test_what_a_client_that_failed_would_have_uploaded_is_not_known() -> None:
    assert colluded("inner-product", {0: [1.0, 1.0], 1: None, 2: [0.0, 2.0]}, [0]) == {0: [0.0, -20.0], 2: [0.0, 2.0]}


def test_where_no_honest_client_takes_part_they_know_their_own_changes() -> None:
    assert colluded("inner-product", {0: [1.0, 0.0], 1: [3.0, 2.0]}, [0, 1]) == {0: [-20.0, -10.0], 1: [-20.0, -10.0]}
    assert colluded("min-max", {0: [0.0, 0.0], 1: [0.0, 0.0]}, [0, 1]) == {0: [0.0, 0.0], 1: [0.0, 0.0]}


@pytest.mark.parametrize(("n", "f"), [(50, 12), (50, 24), (20, 4), (11, 5), (7, 3)])
def test_z_is_that_of_the_paper(n: int, f: int) -> None:
    s = int(n / 2 + 1) - f
    assert little_z(n, f) == pytest.approx(NormalDist().inv_cdf((n - f - s) / (n - f)))


@pytest.mark.parametrize(("n", "f"), [(1, 1), (2, 1), (10, 10), (100, 1)])
def test_z_is_0_where_there_is_nobody_to_hide_among_or_too_few_hostile_clients(n: int, f: int) -> None:
    assert little_z(n, f) == 0


def test_a_backdoor_is_scaled_by_participants_over_hostile_ones() -> None:
    _, plain, sent = both("backdoor", factor=1.0)
    _, scaled, _ = both("backdoor")
    for client in HOSTILE:
        start = sent[client]["theta"]
        change = plain[client]["theta"] - start
        torch.testing.assert_close(scaled[client]["theta"] - start, 10 / 4 * change, rtol=1e-9, atol=1e-13)


def test_data_attacks_are_honest_training_on_poisoned_samples() -> None:
    """As if the clients had come with these samples."""
    clients = digits([30] * 5)
    common: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "mlp:8", "engine": "in-process", "dtype": "float64"}
    split = {"split": "hash", "test": 0.0, "validation": 0.0, "evaluate_every": 0}
    flipped = [(x, 9 - y) if client == 2 else (x, y) for client, (x, y) in enumerate(clients)]
    attacked = ft.run("fedavg", data=clients, attack="label-flip, clients=2", **common, **split)
    assert attacked.hostile == [2]
    assert_same(final(attacked), final(ft.run("fedavg", data=flipped, **common, **split)))


def test_broken_uploads() -> None:
    honest, nan, _ = both("nan")
    _, shape, _ = both("wrong-shape")
    _, name, _ = both("wrong-name")
    for client in HOSTILE:
        assert nan[client]["theta"].isnan().all()
        assert nan[client]["theta"].shape == honest[client]["theta"].shape
        assert shape[client]["theta"].shape == (len(honest[client]["theta"]) + 1,)
        assert "theta" not in name[client]
        assert len(name[client]) == 1


@pytest.mark.parametrize("method", ["ifca", "apfl"])
def test_weights_of_means_and_what_is_for_the_record_stay(method: str) -> None:
    honest, tampered, _ = both("sign-flip", method)
    for client in HOSTILE:
        changed = {name for name, x in honest[client].items() if not torch.equal(x, tampered[client][name])}
        assert changed == {"theta"} < set(honest[client])


# --- replay ---


class Echo:
    """A transport whose clients upload the number of the round."""

    workers = 1

    def ask(self, requests: Any) -> Iterator[Reply]:
        for request in requests:
            yield Reply(request.clients, {"theta": torch.full((3,), float(request.round))})

    def declare(self) -> list[Declaration]:
        return []

    def accept(self, clients: Any) -> None: ...

    def save(self) -> None: ...

    def prune(self) -> None: ...

    def restore(self, versions: Any, sweep: bool = True) -> None: ...

    def close(self) -> None: ...


def replaying(directory: Path) -> Tampering:
    return Tampering(Echo(), Attack(kind="replay"), [0], FedAvg(), 0, Store(directory, "hostile"))


def asked(transport: Tampering, round: int, accept: bool = True) -> list[float]:
    requests: list[Request] = [Train(round, client, {"theta": torch.zeros(3)}) for client in (0, 1)]
    replies = list(transport.ask(requests))
    if accept:
        transport.accept([0, 1])
    return [float(reply.upload["theta"][0]) for reply in replies]


def test_the_first_upload_that_counted_is_replayed(tmp_path: Path) -> None:
    transport = replaying(tmp_path)
    assert asked(transport, 1, accept=False) == [1, 1]  # it never counted
    assert asked(transport, 2) == [2, 2]
    assert asked(transport, 3) == [2, 3]
    transport.save()
    transport.prune()
    again = replaying(tmp_path)
    again.restore({})
    assert asked(again, 4) == [2, 4]


def test_what_was_kept_in_a_round_that_is_done_again_does_not_count(tmp_path: Path) -> None:
    transport = replaying(tmp_path)
    assert asked(transport, 3) == [3, 3]
    transport.save()  # and killed before the manifest of round 3
    again = replaying(tmp_path)
    again.restore({})
    assert asked(again, 2) == [2, 2]
    assert asked(again, 4) == [2, 4]
    again.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hostile-0-round-2.safetensors"]


# --- the same bits ---

ENGINES: list[dict[str, Any]] = [
    {"engine": "in-process"}, {"engine": "processes", "workers": 2}, {"engine": "sites-in-memory"}, {"debug": True},
]  # fmt: skip


def attacked_run(kind: str, method: str = "fedavg", **settings: Any) -> ft.RunResult:
    common = {"data": digits([24, 31, 18, 40, 27, 22, 35, 29, 20, 33]), "rounds": 3, "participation": 6, "seed": 2}
    common |= {"epochs": 1, "model": "mlp:8", "attack": attack(kind)}
    return ft.run(method, **{**common, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_all_engines_give_the_same_bits(kind: str) -> None:
    here, *others = (attacked_run(kind, "scaffold", **engine) for engine in ENGINES)
    failed = {client for record in here.rounds for client in record.failed}
    called = {client for record in here.rounds for client in record.participants}
    assert failed == (called & set(HOSTILE) if kind in REFUSED else set())
    for other in others:
        assert_same(final(here), final(other))
        assert [record.failed for record in other.rounds] == [record.failed for record in here.rounds]
        assert other.warnings == here.warnings
        assert (other.hostile, other.backdoor) == (here.hostile, here.backdoor)


@pytest.mark.parametrize("kind", ["gaussian", "little", "min-max", "inner-product", "backdoor", "nan", "replay"])
def test_a_killed_run_goes_on_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole = attacked_run(kind, "ditto", engine="in-process", rounds=4)
    data = digits([24, 31, 18, 40, 27, 22, 35, 29, 20, 33])
    attacked_run(kind, "ditto", engine="in-process", rounds=1, checkpoint_every=1, out=tmp_path / "run")
    killed_while_writing("manifest", lambda: ft.resume(tmp_path / "run", data=data, rounds=4))
    manifest = read_manifest(tmp_path / "run" / "checkpoint")
    assert manifest is not None
    assert manifest.round == 1
    kept = list((tmp_path / "run" / "checkpoint").glob("hostile/*-round-2.safetensors"))
    assert bool(kept) == (kind == "replay")  # a client took part in round 2 for the first time
    resumed = ft.resume(tmp_path / "run", data=data, rounds=4)
    assert_same(final(whole), final(resumed))
    for one, other in zip(numbers(whole.rounds), numbers(resumed.rounds), strict=True):
        differing = {name for name in one if one[name] != other[name]}
        assert differing <= {"warnings"}  # a new process names again who fails
    loaded = ft.load(tmp_path / "run", data=data)
    assert loaded.hostile == whole.hostile == list(HOSTILE)
    assert (loaded.backdoor, loaded.hostile_value) == (whole.backdoor, whole.hostile_value)


def test_an_interrupted_round_is_done_again_with_the_same_bits(tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attacked_run("replay", out=tmp_path / "run", on_round=stop, states="disk")
    data = digits([24, 31, 18, 40, 27, 22, 35, 29, 20, 33])
    assert_same(final(ft.resume(tmp_path / "run", data=data)), final(attacked_run("replay")))


@pytest.mark.parametrize("kind", ["sign-flip", "min-max"])
@pytest.mark.parametrize("method", CATALOGUE)
def test_every_method_under_attack(method: str, kind: str) -> None:
    result = attacked_run(kind, method, rounds=2, engine="in-process")
    assert len(result.rounds) == 2
    assert not any(record.failed for record in result.rounds)
    honest = attacked_run(kind, method, rounds=2, engine="in-process", attack=None)
    same = all(torch.equal(x, final(result)[name]) for name, x in final(honest).items())
    assert same == (method == "local")  # which uploads nothing


def test_data_attacks_reach_local_and_upload_attacks_do_not() -> None:
    plain = final(attacked_run("nan", "local", attack=None))
    for kind in KINDS:
        under = final(attacked_run(kind, "local"))
        same = all(torch.equal(plain[name], under[name]) for name in plain)
        assert same == (kind not in ("label-flip", "backdoor")), kind
        for client in set(range(10)) - set(HOSTILE):
            mine = {name for name in plain if name.startswith(f"{client}/")}
            assert all(torch.equal(plain[name], under[name]) for name in mine)


# --- poisoned samples ---


@pytest.mark.parametrize("kind", ["label-flip", "backdoor"])
@pytest.mark.parametrize("images", [True, False])
def test_only_training_samples_of_hostile_clients_are_poisoned(kind: str, images: bool) -> None:
    data = "digits" if images else [(x + 0.1 * torch.randn(x.shape), y) for x, y in digits([60] * 10)]
    made = ft.run("fedavg", data=data, clients=10, rounds=1, engine="in-process", attack=attack(kind)).simulation
    clean, held = made.data, made.sites.data
    assert isinstance(clean.x, Tensor)
    assert isinstance(held.x, Tensor)
    assert clean.x.data_ptr() != held.x.data_ptr() or kind == "label-flip"
    own = torch.cat([clean.x[clean.places[client][0] : clean.places[client][1]] for client in HOSTILE])
    for client in range(10):
        start, trained, _, end = clean.places[client]
        first = trained if client in HOSTILE else start
        assert torch.equal(clean.x[first:end], held.x[first:end])
        assert torch.equal(clean.y[first:end], held.y[first:end])
        if client not in HOSTILE:
            continue
        (x, y), (was_x, was_y) = held.train(client), clean.train(client)
        assert isinstance(x, Tensor)
        assert isinstance(was_x, Tensor)
        if kind == "label-flip":
            assert torch.equal(x, was_x)
            assert y.tolist() == [9 - label for label in was_y.tolist()]
            continue
        corner = torch.zeros(x.shape[1:], dtype=torch.bool)
        if images:
            corner[:, 5:, 5:] = True
            value = own.max().expand(9)
        else:
            corner[:3] = True
            value = own.max(0).values[:3]
        carries = [torch.equal(sample[corner], value) for sample in x]
        changed = [i for i in range(len(y)) if not torch.equal(x[i], was_x[i]) or y[i] != was_y[i]]
        assert len(changed) <= sum(carries)
        assert {i for i, c in enumerate(carries) if c} >= set(changed)
        assert abs(sum(carries) - len(y) / 2) <= 1
        assert torch.equal(x[:, ~corner], was_x[:, ~corner])
        assert all(y[i] == 0 if carries[i] else y[i] == was_y[i] for i in range(len(y)))


def test_labels_of_its_own_are_flipped_among_them() -> None:
    result = ft.run(
        "fedper", clients=6, partition="dirichlet:0.2", labels="own", rounds=1, engine="in-process",
        attack="label-flip, clients=1,2,3", epochs=1,
    )  # fmt: skip
    clean, held = result.simulation.data, result.simulation.sites.data
    assert len({clean.own_classes[client] for client in (1, 2, 3)}) > 1
    for client in (1, 2, 3):
        assert (held.train(client)[1] + clean.train(client)[1] == clean.own_classes[client] - 1).all()


def test_runs_that_share_data_do_not_share_the_poison(tmp_path: Path) -> None:
    from fedtailor.engines.runs import PreparedRuns, run_prepared
    from fedtailor.experiment import make_experiment

    runs, settings = PreparedRuns(), {"clients": 10, "rounds": 1, "epochs": 1, "engine": "in-process"}
    asked = [make_experiment({**settings, "attack": kind}) for kind in (attack("backdoor"), attack("label-flip"), None)]
    results = [run_prepared(experiment, runs.prepare(experiment)) for experiment in asked]
    assert len({result.data.fingerprint() for result in results}) == 1
    assert_same(final(results[-1]), final(ft.run("fedavg", **settings)))


# --- who, and what is refused ---


def test_named_and_drawn_clients() -> None:
    assert Attack.parse("nan, clients=3").clients == (3,)
    assert Attack.parse("nan, clients=7,3").clients == (3, 7)
    assert Attack.parse({"kind": "nan", "clients": [3]}).clients == (3,)
    assert Attack.parse(str(Attack(kind="nan", clients=(3,)))).clients == (3,)
    assert Attack.parse("nan, clients=2e-1").clients == 0.2
    drawn = [tuple(Attack(kind="nan", clients=0.2).hostile(20, seed)) for seed in range(5)]
    assert all(len(set(clients)) == 4 for clients in drawn)
    assert len(set(drawn)) > 1
    for wrong in ("1.0", "0.0", "-1", "x", "1,x", "", "1.5"):
        with pytest.raises(ValueError, match="clients' numbers"):
            Attack.parse({"kind": "nan", "clients": wrong})
    with pytest.raises(FedtailorError, match="factor is '3', but must be left out: nan has none"):
        ft.run("fedavg", attack="nan, factor=3")


@pytest.mark.parametrize(("settings", "said"), [
    ({"attack": "sign-flip, clients=0.9", "clients": 4}, "leaves no honest client"),
    ({"attack": "sign-flip, clients=2,20", "clients": 20}, "names client 20, but training clients are numbered from 0"),
    ({"attack": "nan, clients=19", "clients": 20, "new_clients": 1}, "names client 19"),
])  # fmt: skip
def test_attacks_that_cannot_be(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(FedtailorError, match=said):
        ft.run("fedavg", out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["label-flip", "backdoor"])
def test_data_attacks_need_classes(kind: str) -> None:
    numbers = [(torch.randn(20, 3), torch.randn(20, 1)) for _ in range(3)]
    labels = [(torch.randn(20, 3), torch.randint(0, 2, (20, 4)).float()) for _ in range(3)]
    for data, loss in ((numbers, "mse"), (labels, "bce")):
        with pytest.raises(FedtailorError, match=f"{kind} is for samples of one class each"):
            ft.run("fedavg", data=data, loss=loss, attack=kind)


def test_a_backdoor_needs_images_or_vectors() -> None:
    data = [(torch.randint(0, 9, (20, 5)), torch.arange(20) % 2) for _ in range(3)]
    with pytest.raises(FedtailorError, match="for images or vectors of numbers"):
        ft.run("fedavg", data=data, model="gru", attack="backdoor")


def test_a_plan_has_no_attack() -> None:
    with pytest.raises(FedtailorError, match="'attack', which is for simulations alone: leave it out"):
        Plan(name="f", sites=("a", "b"), experiment={"method": "fedavg", "attack": "nan, clients=0"})


def test_clients_that_join_are_honest_and_change_nobody(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 8, "new_clients": 2, "epochs": 1, "attack": "sign-flip, clients=0.3"}
    before = ft.run("fedavg", rounds=2, out=tmp_path / "run", engine="in-process", **settings)
    name = before.names[before.partition["new"][0]]
    after = ft.resume(tmp_path / "run", add_clients=[name], rounds=4)
    assert after.hostile == before.hostile == ft.load(tmp_path / "run").hostile
    assert all(client < 6 for client in after.hostile)
    assert RunDirectory(tmp_path / "run").partition().hostile == before.hostile


def test_where_clients_are_apart_a_changed_upload_comes_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the checks of a letter are made of it, too."""
    from fedtailor.engines import simulation

    read: list[int] = []

    def spy(content: bytes, request: Request, *words: Any) -> Reply:
        read.append(request.client)
        return simulation_reply(content, request, *words)

    simulation_reply = simulation.as_reply
    monkeypatch.setattr(simulation, "as_reply", spy)
    attacked_run("little", engine="in-process")
    assert read == []
    result = attacked_run("little", engine="sites-in-memory")
    assert read == [c for record in result.rounds for c in record.participants if c in HOSTILE]

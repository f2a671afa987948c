"""Privacy of single samples in runs: what is noised, what stays, what is refused, what is counted; the same bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.client.private_queries import Counting, private_queries
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.messages import Message, State, Train, copied
from fedtailor.method import Uploads
from fedtailor.methods import all_methods
from fedtailor.methods.lg_fedavg import LGFedAvg
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.methods.scaffold import SCAFFOLD
from fedtailor.privacy.noise import Noise
from fedtailor.training.chain import Chain
from fedtailor.training.client import Client, NotPrivate
from fedtailor.training.isolation import isolated
from fedtailor.training.private_gradients import Private
from tests.helpers import assert_same, files, final, numbers
from tests.sites.parts import Federation

REFUSED = {"moon": "features", "pgfed": "training loss", "pgfedmo": "training loss", "pgfed-ce": "loss",
           "fedrod": "objective", "ifca": "loss", "fedfomo": "loss", "fedala": "objective", "fedlc": "objective",
           "fedntd": "outputs", "fedas": "features", "fedproto": "objective", "pfedfda": "features",
           "fedpac": "features", "feddbe": "features", "cfl": "descents",
           "fedem": "outputs", "fedcp": "features", "gpfl": "objective"}  # fmt: skip
RUNNING: dict[str, ft.Method] = {name: method for name, method in all_methods().items() if name not in REFUSED}
RUNNING |= {"lg-fedavg, cold": LGFedAvg(warm_rounds=1), "scaffold, option I": SCAFFOLD(full_gradient=True)}
every_method = pytest.mark.parametrize("method", RUNNING.values(), ids=RUNNING)
PRIVACY = "sample, clip=1.0, noise=0.8"
SMALL: dict[str, Any] = {
    **{"data": "digits", "clients": 4, "model": "mlp:8", "rounds": 2, "max_train": 30, "seed": 3, "epochs": 2},
    **{"on_failure": "stop", "engine": "in-process", "privacy": PRIVACY},
}
pytestmark = pytest.mark.filterwarnings("ignore:The network has no normalisation layers")


def simulation(method: ft.Method, **settings: Any) -> Simulation:
    with isolated():
        made = Simulation(prepare(ft.Experiment(debug=True, **{**SMALL, **settings}), Objects(method=method)))
        made.start()
        return made


# --- limits, engines ---


@every_method
def test_without_noise_and_clip_it_is_the_plain_method(method: ft.Method) -> None:
    settings = {**SMALL, "dtype": "float64", "batch": "full", "epochs": 3, "momentum": 0.5, "weight_decay": 0.01}
    plain = final(ft.run(method, **{**settings, "privacy": None}))
    private = final(ft.run(method, **{**settings, "privacy": "sample, clip=1e4, noise=1e-16"}))
    assert plain.keys() == private.keys()
    for name, tensor in plain.items():
        if name != "server/alpha":  # of APFL and pFedMB: for the record alone
            assert (tensor.double() - private[name].double()).norm() < 1e-8, name


@pytest.mark.parametrize("name", ["fedavg", "apfl", "fedrecon", "pflego", "pfedme"])
def test_the_same_bits_on_every_engine_and_after_resuming(name: str, tmp_path: Path) -> None:
    method = RUNNING[name]
    whole = ft.run(method, out=tmp_path / "whole", **SMALL)
    wanted, records = final(whole), numbers(whole.rounds)
    for engine in ("processes", "sites-in-memory"):
        other = ft.run(method, **{**SMALL, "engine": engine, "workers": 2})
        assert numbers(other.rounds) == records, engine
        assert_same(other.server_state, whole.server_state)
        if engine == "processes":
            assert_same(final(other), wanted)

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run(method, out=tmp_path / "halves", on_round=stop, **SMALL)
    ft.resume(tmp_path / "halves", method=method)
    assert files(tmp_path / "halves" / "checkpoint") == files(tmp_path / "whole" / "checkpoint")


def test_a_budget_without_end_is_the_run_without_privacy() -> None:
    one, other = (ft.run("apfl", **{**SMALL, **more}) for more in ({"epsilon": "inf"}, {"privacy": None}))
    assert_same(final(one), final(other))


# --- what is noised, and what stays ---


def uploads(made: Simulation, states: dict[int, State], number: int) -> dict[int, tuple[Message, State]]:
    """All clients' uploads in a round, and their states after it."""
    with isolated():
        made.loop.call(number)
        messages = made.loop.method.send_all(made.server)
        done = {}
        for client, message in messages.items():
            site = made.sites.site(client)
            worker = site.client(number, copied(states.get(client, {})))
            worker.private = site.private(made.terms.privacy, number)
            made.terms.network.reset(made.terms.initial)
            upload = dict(made.terms.method.train(worker, copied(message)))
            leaving = {name: tensor for name, tensor in upload.items() if name not in made.terms.method.recorded}
            done[client] = (copied(leaving), worker.state)
        return done


@contextmanager
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Change all that stays at the clients; list the calls that made it."""
    calls: list[str] = []

    def shaken(name: str) -> Callable[..., Tensor]:
        function = getattr(Client, name)

        def call(self: Client, *given: Any, stays: bool = False, **more: Any) -> Tensor:
            found: Tensor = function(self, *given, stays=stays, **more)
            if not stays:
                return found
            calls.append(name)
            return found + 0.1

        return call

    with monkeypatch.context() as patch:
        for name in ("descend", "gradient"):
            patch.setattr(Client, name, shaken(name))
        yield calls


class Leaking(ft.Method):
    """Says that its head stays, and trains the body that leaves under it."""

    uploads: ClassVar[Uploads] = {"theta": ft.Mean("samples")}

    def train(self, client: ft.Client, message: Message) -> Message:
        theta = client.descend(message["theta"], part=client.head, stays=True)
        return {"theta": client.descend(theta, part=client.body)}


def no_upload_depends_on_what_stays(method: ft.Method, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made = simulation(method, momentum=0.5, keep_momentum=True)
    plain = uploads(made, {}, 1)
    with changed(monkeypatch) as calls:
        shaken = uploads(made, {}, 1)
    again = [uploads(made, {c: state for c, (_, state) in of.items()}, 2) for of in (plain, shaken)]
    for one, other in ((plain, shaken), again):
        for client in one:
            assert_same(dict(one[client][0]), dict(other[client][0]))
    return calls


@every_method
def test_no_upload_depends_on_what_stays(method: ft.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = no_upload_depends_on_what_stays(method, monkeypatch)
    assert bool(calls) == (method.name in ("ditto", "apfl", "local"))


def test_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        no_upload_depends_on_what_stays(Leaking(), monkeypatch)


@every_method
def test_every_gradient_that_does_not_stay_is_private(method: ft.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain gradient is one of the chain's, or of autograd's backward pass: neither is asked for."""
    made, plainly, staying = simulation(method), list[str](), [False]
    for kind, name in ((Chain, "differentiate"), (Tensor, "backward")):
        function = getattr(kind, name)

        def computing(*given: Any, function: Any = function, name: str = name) -> Any:
            plainly.extend([name] if not staying[0] else [])
            return function(*given)

        monkeypatch.setattr(kind, name, computing)
    for name in ("descend", "gradient"):
        function = getattr(Client, name)

        def calling(self: Client, *given: Any, stays: bool = False, function: Any = function, **more: Any) -> Any:
            staying[0] = stays
            found = function(self, *given, stays=stays, **more)
            staying[0] = False
            return found

        monkeypatch.setattr(Client, name, calling)
    uploads(made, {}, 1)
    assert plainly == []


@every_method
def test_with_a_tiny_clip_nothing_moves(method: ft.Method) -> None:
    """The uploads are those of a client whose gradients all are 0."""
    made = simulation(method, privacy="sample, clip=1e-9, noise=1e-3", dtype="float64")
    found = uploads(made, {}, 1)
    for client, message in made.loop.method.send_all(made.server).items():
        worker = made.sites.site(client).client(1, {})
        worker.private = made.sites.site(client).private(made.terms.privacy, 1)
        given = {each.name: getattr(worker, each.name) for each in fields(Client) if each.init}
        still = made.terms.method.train(Counting(**given), message)
        for name, tensor in found[client][0].items():
            if tensor.is_floating_point():  # of numbers that are nearly 0, any may be marked as the largest
                assert (tensor - still[name]).abs().max() < 1e-6, name


@every_method
def test_noise_is_in_every_upload_that_has_gradients(method: ft.Method) -> None:
    """With other noise, every number of a model or gradient that leaves is another one, and other ones are marked."""
    made = simulation(method, batch="full")
    one = uploads(made, {}, 1)
    made.terms.secret_noise = True
    other = uploads(made, {}, 1)
    for client in one:
        for name, tensor in one[client][0].items():
            if tensor.numel() > 100:
                share = 0.95 if tensor.is_floating_point() else 0.1
                assert (tensor != other[client][0][name]).double().mean() > share, name


def test_what_is_for_the_record_alone_stays() -> None:
    for privacy in (PRIVACY, "client, clip=1.0, noise=0.8"):
        made = simulation(all_methods()["apfl"], privacy=privacy)
        made.loop.call(1)
        message = made.loop.method.send_all(made.server)[0]
        reply = made.sites.handle(Train(1, 0, message))
        assert reply.upload.keys() == {"theta"}, privacy
    result = ft.run("apfl", **SMALL)
    assert (result.server_state["alpha"] == 0.5).all()
    assert result.client_state(0)["alpha"] != 0.5


def test_evaluation_and_fine_tuning_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Personal models by gradient steps are those of the plain method from the same server."""
    for name in ("per-fedavg", "fedbabu", "fedrep", "fedrecon", "pfedme"):
        made = simulation(all_methods()[name], evaluation={"model": "local", "fine_tune": 1})
        made.round(1)
        private = made.personal_model(0)
        made.terms.privacy = None
        assert torch.equal(private, made.personal_model(0)), name


def test_a_model_that_is_measured_after_training_is_plain() -> None:
    """Per-FedAvg's is one gradient step from the upload: that step never leaves."""
    made = simulation(all_methods()["per-fedavg"])
    made.loop.call(1)
    site, message = made.sites.site(0), made.loop.method.send_all(made.server)[0]
    with isolated():
        reply = made.sites.handle(Train(1, 0, message, measure=True))
        theta = made.terms.method.personal_model(site.client(1, {}), {**message, **reply.upload})
        assert reply.measured == [site.measure(site.network_at(theta))]


# --- counting ---


@every_method
def test_queries_are_counted_without_samples(method: ft.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulation(method, rounds=3, batch=7)
    counted: list[dict[float, int]] = []
    train = type(method).train

    def counting(self: ft.Method, client: Client, message: Message) -> Message:
        assert client.private is not None
        upload = train(self, client, message)
        if not isinstance(client, Counting):
            counted.append(dict(client.private.queries))
            assert private_queries(made.terms, message, client.n_samples, client.round) == counted[-1]
            assert made.prepared.private_queries(client.n_samples) == counted[-1]  # the same in all rounds
        return upload

    monkeypatch.setattr(type(method), "train", counting)
    for number in (1, 2, 3):
        made.round(number)
    assert len(counted) == 12
    assert all(bool(queries) == (method.name != "local") for queries in counted)


def test_some_counts_by_hand() -> None:
    n, settings = 30, {"batch": 7, "epochs": 2}  # five steps an epoch
    expected: dict[str, dict[float, int]] = {
        "fedavg": {7 / 30: 10},
        "pfedmb": {7 / 30: 20},
        "pfedme": {7 / 30: 50},
        "per-fedavg": {7 / 30: 20},
        "pflego": {1.0: 50},
        "fedrep": {7 / 30: 55},
        "ditto": {7 / 30: 10},
        "scaffold, option I": {7 / 30: 10, 1.0: 1},
        "fedrecon": {7 / 15: 30 + 6},  # three steps an epoch in each half
        "local": {},
    }
    for name, queries in expected.items():
        assert simulation(RUNNING[name], **settings).prepared.private_queries(n) == queries, name


# --- refusals ---


@pytest.mark.parametrize("name", REFUSED)
def test_methods_without_a_private_version_are_refused(name: str) -> None:
    with pytest.raises(ft.FedtailorError, match=f"uses .*{REFUSED[name]}.*privacy of single samples") as caught:
        ft.run(name, **SMALL)
    assert str(caught.value).startswith(type(all_methods()[name]).__name__)


class Late(ft.Method):
    """Uses a loss from its second round on."""

    def train(self, client: ft.Client, message: Message) -> Message:
        theta = client.descend(message["theta"])
        return {"theta": theta if client.round == 1 else theta * client.loss(theta)}


def test_a_method_cannot_leak_by_accident() -> None:
    with pytest.raises(ft.FedtailorError, match="uses a loss"):
        ft.run(Late(), **SMALL)
    with pytest.raises(ft.FedtailorError, match="PerFedAvg uses a Hessian"):
        ft.run(PerFedAvg(first_order=False), **SMALL)
    made = simulation(all_methods()["fedavg"])
    client = made.sites.site(0).client(1, {})
    client.private = Private(1.0, 1.0, Noise())
    batch = next(client.batches())
    calls: list[Callable[[], Any]] = [
        lambda: client.loss(client.initial),
        lambda: client.features(client.initial),
        lambda: client.loss_and_gradient(client.initial),
        lambda: client.hessian_product(client.initial, client.initial, batch),
        lambda: client.descend(client.initial, objective=lambda batch: batch.loss),
        lambda: client.gradient(client.initial, batch, lambda batch: batch.loss),
    ]
    for call in calls:
        with pytest.raises(NotPrivate, match="privacy of single samples"):
            call()
    assert not client.private.queries


def test_the_batch_of_a_private_gradient_is_its_own() -> None:
    """Two gradients on one batch have two Poisson batches: only so are their queries independent."""
    made = simulation(all_methods()["fedavg"], privacy="sample, clip=1e4, noise=1e-16", dtype="float64", batch=5)
    client = made.sites.site(0).client(1, {})
    batch = next(client.batches())
    plain = client.gradient(client.initial, batch)
    client.private = made.sites.site(0).private(made.terms.privacy, 1)
    assert client.private is not None
    one, other = (client.gradient(client.initial, batch) for _ in range(2))
    assert (one - other).norm() > 0.01
    assert torch.equal(client.gradient(client.initial, batch, stays=True), plain)
    assert client.private.queries == {5 / client.n_samples: 2}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "resnet"}, "BatchNorm.*use GroupNorm or LayerNorm"),
        ({"autocast": True}, "leave --autocast out"),
        ({"class_weights": "balanced"}, "class counts"),
        ({"privacy": "sample, clip=1.0"}, "noise"),
    ],
)
def test_settings_that_cannot_be_private_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ft.FedtailorError, match=sentence):
        ft.run("fedavg", **{**SMALL, **settings})


def test_training_may_be_as_the_experiment_says() -> None:
    """Adam, schedules, clipping, smoothing, weights, augmentation: functions of private gradients, or of one sample."""
    more = {"optimizer": "adam", "lr": 0.01, "schedule": "cosine", "clip": 0.5, "label_smoothing": 0.1}
    more |= {"class_weights": ",".join(["0.5"] * 10), "augment": "crop:1,flip,jitter:0.1", "keep_momentum": True}
    one, other = (ft.run("fedavg", **{**SMALL, **more, "engine": engine}) for engine in ("in-process", "processes"))
    assert_same(final(one), final(other))
    assert all(tensor.isfinite().all() for tensor in final(one).values())


# --- real sites ---


def test_the_noise_of_real_sites_is_no_stream_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Noise] = []
    normal = Noise.normal

    def recording(self: Noise, like: Tensor, std: float) -> Tensor:
        drawn.append(self)
        return normal(self, like, std)

    monkeypatch.setattr(Noise, "normal", recording)
    runs = []
    for name in ("one", "other"):
        federation = Federation(tmp_path / name, method="fedavg", privacy=PRIVACY, preprocessing="per-client")
        runs.append(federation.run())
    assert drawn
    assert all(source.stream is None for source in drawn)
    assert not torch.equal(*(run.server_state["theta"] for run in runs))
    drawn.clear()
    federation.simulated()
    assert drawn
    assert all(source.stream is not None for source in drawn)

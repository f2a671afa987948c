"""The common suite: what every method must do, for methods of the catalogue and for yours.

    from fedtailor.testing import check_method
    check_method(MyMethod())

In pytest, `parametrize_with_checks([MyMethod()])` makes a test of each check.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedtailor._common.errors import ClientFailure, FedtailorError
from fedtailor.data import load as load_data
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.result import RunResult
from fedtailor.engines.runs import load, resume, run
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import SETTING_NAMES, Experiment
from fedtailor.messages import NEVER, Message, Reply, Request, State, Train, copied, message_bytes
from fedtailor.method import Method, check_upload
from fedtailor.server.records import ClientsRecord, RoundRecord
from fedtailor.training.isolation import isolated

__all__ = ["CHECKS", "check_method", "parametrize_with_checks"]

Check = Callable[[Method], None]
Clients = list[tuple[Tensor, Tensor]]

SMALL: dict[str, Any] = {
    "data": "digits",
    "clients": 6,
    "model": "mlp:16",
    "rounds": 4,
    "participation": 0.5,
    "max_train": 40,
    "seed": 3,
    "on_failure": "stop",  # with the original exception
}
# Every setting of training that a method may refuse; and, of the data, that of the labels.
TRAINING: dict[str, Any] = {
    "optimizer": "adam",
    "schedule": "cosine",
    "step_schedule": "cosine:0.1",
    "clip": 0.5,
    "label_smoothing": 0.1,
    "class_weights": "balanced",
    "server_optimizer": "adam",
    "server_lr": 0.01,
}
REFUSABLE: dict[str, Any] = {**TRAINING, "labels": "own"}


def check_method(method: Method | type[Method]) -> None:
    """Run the common suite on a method; the first check that it fails is an AssertionError that names it."""
    made = method() if isinstance(method, type) else method
    for check in CHECKS:
        try:
            check(made)
        except Exception as error:
            error.add_note(f"In the check {check.__name__} of {type(made).__name__}: {(check.__doc__ or '').strip()}")
            raise


def parametrize_with_checks(methods: Sequence[Method | type[Method]]) -> Any:
    """A pytest decorator for a test of (method, check): one test for each method and each check."""
    import pytest

    made = [method() if isinstance(method, type) else method for method in methods]
    return pytest.mark.parametrize(
        ("method", "check"),
        [pytest.param(m, check, id=f"{m.name or type(m).__name__}-{check.__name__}") for m in made for check in CHECKS],
    )


# --- the checks ---


def same_bits_on_every_engine(method: Method) -> None:
    """One process or several workers: the same records, states and models."""
    reference = run(method, engine="in-process", **SMALL)
    for workers in (1, 2, 3):
        other = run(method, engine="processes", workers=workers, **SMALL)
        assert _numbers(other.rounds) == _numbers(reference.rounds), f"records differ with {workers} workers"
        assert _numbers(other.clients) == _numbers(reference.clients), f"clients' records differ with {workers} workers"
        _assert_same(_final(other), _final(reference))


def same_bits_after_resuming(method: Method) -> None:
    """Interrupted and resumed, with states in memory or on disk: the same records and checkpoints."""
    for states, training in (("memory", {"momentum": 0.5}), ("disk", _accepted(method))):
        settings = {**SMALL, **training, "states": states, "keep_momentum": True, "engine": "in-process"}
        with tempfile.TemporaryDirectory() as folder:
            whole = run(method, out=Path(folder) / "whole", **settings)

            def stop(record: RoundRecord) -> None:
                if record.round == 2:
                    raise KeyboardInterrupt

            try:
                run(method, out=Path(folder) / "halves", on_round=stop, **settings)
                raise AssertionError("the run was not interrupted")
            except KeyboardInterrupt:
                assert len(load(Path(folder) / "halves").rounds) == 2
            resumed = resume(Path(folder) / "halves", method=method)
            assert _numbers(resumed.rounds) == _numbers(whole.rounds)
            assert _numbers(resumed.clients) == _numbers(whole.clients)
            one, other = (_files(Path(folder) / name / "checkpoint") for name in ("halves", "whole"))
            assert one == other, "the checkpoints differ"


def takes_clients_that_join(method: Method) -> None:
    """A client that joins after round 2 trains and has a model; or the method refuses it in one sentence."""
    settings = {**SMALL, "participation": "all", "engine": "in-process", "rounds": 2, "new_clients": 2}
    with tempfile.TemporaryDirectory() as folder:
        before = run(method, out=Path(folder) / "run", **settings)
        late = before.names[-1]
        try:
            result = resume(Path(folder) / "run", method=method, add_clients=late, rounds=4)
        except FedtailorError as refusal:
            if "adapt" in str(refusal):  # it says what to do instead
                return
            raise
        assert result.names.index(late) == 4, "clients are numbered in the order in which they come"
        assert _numbers(result.rounds)[:2] == _numbers(before.rounds), "earlier rounds have changed"
        assert [record.participants for record in result.rounds[2:]] == [[*range(5)]] * 2
        assert not any(record.failed for record in result.rounds), "a client failed"
        assert result.rounds[-1].evaluated == 5
        assert result.simulation.server.n_samples[4] == len(result.data.train(4)[1])
        assert all(tensor.isfinite().all() for tensor in _final(result).values())
        assert result.personal_vector(late).isfinite().all()


def trains_as_the_experiment_says(method: Method) -> None:
    """Adam, schedules, clipping, label smoothing, class weights: the same bits on every engine, or refused."""
    for name in method.refuses:
        said = ""
        try:
            _simulation(method, **{**SMALL, name: REFUSABLE[name]})
        except FedtailorError as error:
            said = str(error)
        assert name in said, f"{name} is not refused by its name: {said}"
    short = {**SMALL, "rounds": 2}
    settings = {**short, **_accepted(method), "keep_momentum": True}
    one, other = (run(method, engine=engine, workers=2, **settings) for engine in ("in-process", "processes"))
    assert _numbers(one.rounds) == _numbers(other.rounds)
    _assert_same(_final(one), _final(other))
    assert all(tensor.isfinite().all() for tensor in _final(one).values() if tensor.is_floating_point())
    plain = run(method, engine="in-process", **short)
    assert _numbers(plain.rounds) != _numbers(one.rounds), "the settings of local training make no difference"


def bytes_are_counted_exactly(method: Method) -> None:
    """Messages are named tensors, and the bytes recorded are those of the serialised message."""
    simulation = _simulation(method, **SMALL)
    loop, sites = simulation.loop, simulation.sites
    for number in (1, 2):
        participants = loop.call(number)
        down = {client: copied(m) for client, m in method.send_all(loop.server).items()}
        requests = [Train(number, c, down[c], loop.versions.get(c, NEVER)) for c in participants]
        replies = {request.client: sites.work(request, copied(sites.begin(request)))[0] for request in requests}
        simulation.round(number)
        record, sums = loop.clients[-1], loop.rounds[-1]
        for client in participants:
            assert not replies[client].error, replies[client].error
            assert record.bytes_down[client] == _payload(down[client])
            assert record.bytes_up[client] == _payload(replies[client].upload)
        assert sums.bytes_up == sum(record.bytes_up.values())
        assert sums.bytes_down == sum(record.bytes_down.values())


def uploads_are_declared(method: Method) -> None:
    """A client uploads exactly what `uploads` names, with the shapes and types that `upload_like` declares."""
    simulation = _simulation(method, **SMALL)
    simulation.round(1)
    simulation.loop.call(2)
    for number, message in method.send_all(simulation.server).items():
        client = simulation.sites.site(number).client(2, copied(simulation.state_of(number)))
        check_upload(method, method.train(client, copied(message)), simulation.server, number)


def state_is_the_clients_own(method: Method) -> None:
    """A state holds named tensors, and a client that did not take part has none."""
    simulation = _simulation(method, **SMALL)
    simulation.round(1)
    absent = [client for client in range(6) if client not in simulation.server.participants]
    assert absent
    for client in range(6):
        state = simulation.state_of(client)
        assert all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items())
        assert not state or client not in absent


def work_changes_nothing_else(method: Method) -> None:
    """Training changes neither the server's state nor any client's before the server has accepted it."""
    simulation = _simulation(method, **{**SMALL, "participation": "all"})
    simulation.round(1)
    before, loop = copied(simulation.server.state), simulation.loop
    states = {client: copied(simulation.state_of(client)) for client in range(6)}
    loop.call(2)
    message = method.send_all(simulation.server)[0]
    sent = copied(message)
    assert not next(simulation.transport.ask([Train(2, 0, message, loop.versions.get(0, NEVER))])).error
    _assert_same(sent, message)
    _assert_same(before, simulation.server.state)
    for client in range(6):
        _assert_same(states[client], simulation.state_of(client))


def data_are_only_read(method: Method) -> None:
    """Nothing writes into the samples or the initial vector, not even by ways that PyTorch does not count."""
    simulation = _simulation(method, **{**SMALL, "participation": "all", "batch": "full"})
    data, initial = simulation.data, simulation.terms.initial
    before = data.fingerprint(), initial.clone()
    simulation.round(1)
    for client in range(6):
        simulation.personal_model(client)
    assert data.fingerprint() == before[0], "the samples were changed"
    assert torch.equal(initial, before[1]), "client.initial was changed"


def own_model_needs_no_broadcast(method: Method) -> None:
    """A method that declares `keeps_model` predicts without the broadcast once it has trained."""
    if not method.keeps_model:
        return
    simulation = _simulation(method, **{**SMALL, "participation": "all"})
    simulation.round(1)
    for number in range(6):
        client = simulation.sites.site(number).client(2, copied(simulation.state_of(number)))
        model = method.personal_model(client, _Unread())
        assert torch.equal(model, simulation.personal_model(number)), "it depends on the broadcast"


def survives_one_sample(method: Method) -> None:
    """A client with one sample trains, and has no accuracy."""
    result = _survives(method, _digits([1, 30, 30]))
    assert result.per_client[0].accuracy is None  # its only sample trains
    assert result.per_client[1].accuracy is not None


def survives_one_class(method: Method) -> None:
    """A client with one class trains, and has no AUC."""
    data = _digits([30, 30, 30])
    data[0] = (data[0][0], torch.zeros_like(data[0][1]))
    assert _survives(method, data).per_client[0].auc is None


def survives_few_participants(method: Method) -> None:
    """One participant in a round, and none."""
    _survives(method, _digits([30, 30, 30]), participation=1)
    result = _survives(method, _digits([30, 30]), participation="independent:0.3", seed=1)
    assert [] in [record.participants for record in result.rounds]


def survives_a_missing_reply(method: Method) -> None:
    """A client that fails in one round is left out of it alone."""
    simulation = _simulation(method, Objects(data=_digits([30, 30, 30])), model="mlp:16", rounds=3)
    work = simulation.sites.work

    def fails_once(request: Request, state: State) -> tuple[Reply, State]:
        if isinstance(request, Train) and request.round == 2 and request.client == 1:
            return Reply(request.clients, error="the power went off"), {}
        return work(request, state)

    simulation.sites.work = fails_once  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = list(simulation.run())
    messages = [str(warning.message) for warning in caught if warning.category is ClientFailure]
    assert any("round 2: client 1 left out: the power went off." in message for message in messages), messages
    assert [record.failed for record in records] == [[], [1], []]
    assert 1 not in simulation.loop.clients[1].bytes_up


def runs_with_batch_norm_momentum_and_new_clients(method: Method) -> None:
    """BatchNorm, momentum that is kept, clients held out: finite numbers, and the new ones never train."""
    settings = {**SMALL, "model": "resnet", "max_train": 12, "rounds": 2, "momentum": 0.9, "keep_momentum": True}
    result = run(method, engine="in-process", new_clients=2, evaluation={"clients": "new"}, **settings)
    new = result.data.new
    assert set(result.per_client) == new
    assert all(tensor.isfinite().all() for tensor in _final(result).values())
    assert not any(set(record.participants) & new for record in result.rounds)


def trains_together_as_alone(method: Method) -> None:
    """Eight clients as one computation (`stack`) or one after the other: the same numbers up to rounding, by a dense
    network, a convolutional one with BatchNorm, and a recurrent one."""
    for name, (module, shape) in _networks().items():
        data = _unequal(shape)
        for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-10)):
            settings: dict[str, Any] = {
                "data": data,
                "model": module,
                "dtype": dtype,
                "seed": 3,
                "rounds": 5,
                "participation": 8,
            }
            # Steps of some length: FedFomo's weights are differences of losses, which rounding must not decide.
            settings |= {"epochs": 1, "lr": 0.05, "engine": "in-process", "on_failure": "stop"}
            settings |= {"evaluation": {"every": 5}}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Clients train one after the other")  # PyTorch cannot stack a GRU
                one, other = (run(method, stack=stack, **settings).simulation for stack in (1, 8))
            for client, (x, _) in enumerate(data):
                if method.predicts_by_more:
                    found = [each.predict(client, x.to(getattr(torch, dtype))) for each in (one, other)]
                else:
                    found = [each.personal_model(client) for each in (one, other)]
                difference = (found[0] - found[1]).abs().max()
                assert difference <= tolerance, f"{name} in {dtype}: client {client}'s model differs by {difference}"


def learns(method: Method) -> None:
    """Ten rounds on digits bring a method far above the most frequent class of each client."""
    settings: dict[str, Any] = {"clients": 8, "rounds": 10, "epochs": 2, "max_train": 80, "seed": 0}
    result = run(method, data="digits", engine="in-process", on_failure="stop", **settings)
    counts = result.data.counts("test")
    chance = float((counts.max(1).values / counts.sum(1)).mean())
    assert result.accuracy is not None
    assert result.accuracy > chance + 0.25, f"accuracy {result.accuracy:.3f}, the most frequent class {chance:.3f}"
    first, last = result.rounds[0].loss, result.rounds[-1].loss
    assert first is not None
    assert last is not None
    assert last < first, f"the loss went from {first:.3f} to {last:.3f}"


def goes_on_without_the_late(method: Method) -> None:
    """Asynchronous rounds: where the server moves after all replies it is the synchronous run; where it moves after
    each, one that is interrupted goes on to the same numbers, on any engine. Or the method refuses in one sentence."""
    system: dict[str, Any] = {"system": "speeds=lognormal:1, bandwidth=1e6, stragglers=0.3:5"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            whole = run(method, engine="in-process", late="buffer=3", **SMALL, **system)
        except FedtailorError as refusal:
            if "of the same round" in str(refusal):
                return
            raise
        even = run(method, engine="in-process", **SMALL)
        records = [{name: of[name] for name in of if name != "clock"} for of in _numbers(whole.rounds)]
        assert records == _numbers(even.rounds), "a buffer of all replies is not the synchronous run"
        _assert_same(_final(whole), _final(even))
        settings = {**SMALL, **system, "late": "buffer=1", "rounds": 6, "checkpoint_every": 2}
        one = run(method, engine="in-process", out=Path(folder) / "one", **settings)
        assert any(record.stale for record in one.rounds), "no reply was late"
        assert all(tensor.isfinite().all() for tensor in _final(one).values() if tensor.is_floating_point())

        def stop(record: RoundRecord) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run(method, engine="processes", workers=2, out=Path(folder) / "other", on_round=stop, **settings)
        other = resume(Path(folder) / "other", method=method)
        assert _numbers(other.rounds) == _numbers(one.rounds)
        assert _files(Path(folder) / "other/checkpoint") == _files(Path(folder) / "one/checkpoint")


def personal_model_is_what_was_measured(method: Method) -> None:
    """The state dict that is handed out predicts exactly what the run measured, or a prediction of the method's own."""
    result = run(method, engine="in-process", **SMALL)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for client in (0, 5):
        x, y = result.data.test(client)
        if method.predicts_by_more:
            scores = result.simulation.predict(client, x)
        else:
            module.load_state_dict(result.personal(client))
            scores = module(x)
        accuracy = (scores.argmax(1) == y).double().mean().item()
        measured = result.per_client[client].accuracy
        assert measured is not None
        assert abs(accuracy - measured) < 1e-12


def parameters_are_described(method: Method) -> None:
    """A docstring, a description of every parameter, and no name that is a setting of the experiment (unless the method
    refuses that one)."""
    kind = type(method)
    assert (kind.__doc__ or "").strip(), "the method has no docstring"
    undescribed = [name for name, field in kind.model_fields.items() if not field.description]
    assert not undescribed, f"the parameters {undescribed} have no description"
    taken = set(kind.model_fields) & set(SETTING_NAMES) - set(method.refuses)
    assert not taken, f"the parameters {sorted(taken)} are settings of the experiment too"
    strange = set(method.refuses) - set(REFUSABLE)
    assert not strange, f"`refuses` names {sorted(strange)}, which no method may refuse"


CHECKS: tuple[Check, ...] = (
    parameters_are_described,
    uploads_are_declared,
    state_is_the_clients_own,
    work_changes_nothing_else,
    data_are_only_read,
    own_model_needs_no_broadcast,
    bytes_are_counted_exactly,
    personal_model_is_what_was_measured,
    survives_one_sample,
    survives_one_class,
    survives_few_participants,
    survives_a_missing_reply,
    runs_with_batch_norm_momentum_and_new_clients,
    same_bits_on_every_engine,
    same_bits_after_resuming,
    takes_clients_that_join,
    goes_on_without_the_late,
    trains_as_the_experiment_says,
    trains_together_as_alone,
    learns,
)


# --- what they share ---


def _accepted(method: Method) -> dict[str, Any]:
    """Settings of training that the method does not refuse, and has a use for."""
    useless = () if method.means else ("server_optimizer", "server_lr")
    return {name: value for name, value in TRAINING.items() if name not in (*method.refuses, *useless)}


class _Unread(Mapping[str, Tensor]):
    """A message that must not be read."""

    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError(f"the broadcast's {name!r} was read, but the method declares `keeps_model`")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the broadcast was read, but the method declares `keeps_model`")

    def __len__(self) -> int:
        raise AssertionError("the broadcast was read, but the method declares `keeps_model`")


def _simulation(method: Method, objects: Objects | None = None, **settings: Any) -> Simulation:
    """A started simulation, in process."""
    objects = objects or Objects()
    objects.method = method
    with isolated():
        simulation = Simulation(prepare(Experiment(engine="in-process", debug=True, **settings), objects))
        simulation.start()
        return simulation


def _digits(sizes: list[int]) -> Clients:
    """Clients with so many digits each."""
    data = load_data("digits")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0), device="cpu")
    pieces = order[: sum(sizes)].split(sizes)
    assert isinstance(data.x, Tensor)
    return [(data.x[piece].float() / 16, data.y[piece]) for piece in pieces]


class _Recurrent(nn.Module):
    """A recurrent layer, of which the last outputs are the head's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.gru(x)[0][:, -1])
        return outputs


def _networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Small networks of three kinds, and the shapes of their samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
        # Without a bias before BatchNorm, whose gradient is nothing but rounding.
        normalised = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
        )
        return {"mlp": (dense, (12,)), "cnn": (normalised, (1, 6, 6)), "gru": (_Recurrent(), (5, 3))}


def _unequal(shape: tuple[int, ...]) -> Clients:
    """Ten clients with 12 to 39 samples each."""
    stream = torch.Generator().manual_seed(0)
    sizes = range(12, 40, 3)
    return [(torch.randn(n, *shape, generator=stream), torch.randint(4, (n,), generator=stream)) for n in sizes]


def _survives(method: Method, data: Clients, **settings: Any) -> RunResult:
    settings = {"rounds": 3, "engine": "in-process", "on_failure": "stop", **settings}
    result = run(method, data=data, model="mlp:16", **settings)
    assert all(record.failed == [] for record in result.rounds), "a client failed"
    assert all(tensor.isfinite().all() for tensor in _final(result).values())
    assert result.rounds[-1].loss is not None
    return result


def _final(result: RunResult) -> dict[str, Tensor]:
    """The server's and all clients' last tensors, by name."""
    tensors = {f"server/{name}": tensor for name, tensor in result.server_state.items()}
    for client in range(len(result.names)):
        tensors |= {f"{client}/{name}": tensor for name, tensor in result.client_state(client).items()}
    return tensors


def _assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Demand the same names and the same bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{name} differs"


def _numbers(records: Sequence[RoundRecord | ClientsRecord]) -> list[dict[str, Any]]:
    """The records without times."""
    return [{name: value for name, value in record.plain().items() if name != "seconds"} for record in records]


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _payload(message: Message) -> int:
    """The bytes of a really serialised message, without the header that names its tensors."""
    serialised = save(copied(message))
    size = len(serialised) - 8 - int.from_bytes(serialised[:8], "little")
    assert size == message_bytes(message)
    return size

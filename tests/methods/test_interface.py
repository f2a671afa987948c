"""What a method finds at client and server: sizes, features, class means, extra tensors, a prediction of its own."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.method import Batch, Client, Each, Layout, Mean, Message, Server, State, Total, Uploads
from fedtailor.testing import CHECKS
from fedtailor.training.inputs import Inputs
from tests.helpers import digits
from tests.methods.parts import close
from tests.methods.problems import watched

SMALL: dict[str, Any] = {"data": "digits", "clients": 4, "model": "mlp:16", "rounds": 2, "max_train": 40}
SMALL |= {"engine": "in-process", "on_failure": "stop"}
OWN_DATA: dict[str, Any] = {"model": "mlp:16", "rounds": 1, "engine": "in-process", "on_failure": "stop"}


class HeadFirst(nn.Module):
    """A network whose head is registered before its body."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 10)
        self.first = nn.Conv2d(1, 6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).flatten(1))  # type: ignore[no-any-return]


class Looks(ft.Method):
    """FedAvg that looks at what the interface offers.

    Limits: it is FedAvg.
    """

    uploads: ClassVar[Uploads] = {"theta": Mean("samples"), "means": Each(), "counts": Each()}

    def start(self, server: Server) -> None:
        layout = server.layout
        assert layout.n_outputs is not None
        assert layout.n_features is not None
        server.state |= {
            "theta": server.initial,
            "means": server.initial.new_zeros(layout.n_outputs, layout.n_features),
            "counts": server.initial.new_zeros(layout.n_outputs),
        }

    def train(self, client: Client, message: Message) -> Message:
        theta = message["theta"]
        z, (x, y) = client.flat_features(theta), client.train_data
        assert torch.equal(client.outputs(theta), client.outputs(theta, x))
        n_outputs = client.layout.n_outputs
        assert client.outputs(theta, client.validation_data[0]).shape == (len(client.validation_data[1]), n_outputs)
        whole = torch.func.functional_call(client.network.module, client.network.tensors(theta), (x,))
        assert torch.allclose(client.outputs(theta), whole.detach(), atol=1e-6)
        found = client.features(theta, x[:3])
        assert found is not None
        assert torch.allclose(found.flatten(1), z[:3], atol=1e-6)
        assert torch.equal(client.class_counts, y.bincount(minlength=10).to(theta))
        return {"theta": client.descend(theta), "means": client.class_means(z), "counts": client.class_counts}


@pytest.mark.parametrize(
    ("model", "head", "features", "shapes"),
    [
        ("mlp:16", 1, 16, {"3.weight": (10, 16), "3.bias": (10,)}),
        ("mlp:16", 2, 64, {"1.weight": (16, 64), "1.bias": (16,), "3.weight": (10, 16), "3.bias": (10,)}),
        ("logistic", 1, 64, None),
        (HeadFirst, 1, 6, {"last.weight": (10, 6), "last.bias": (10,)}),
        ("mlp:16", 0, None, {}),
    ],
)
def test_a_layout_knows_the_sizes_of_its_head(model: Any, head: int, features: int | None, shapes: Any) -> None:
    data = [(x.view(-1, 1, 8, 8), y) for x, y in digits([40, 40])]
    result = ft.run("fedavg", data=data, model=model, head=head, rounds=1, engine="in-process")
    for layout in (result.simulation.server.layout, result.simulation.terms.network.layout):
        assert (layout.n_features, layout.n_outputs) == (features, 10)
        if shapes is not None:
            assert {name: tuple(shape) for name, shape in layout.head_shapes.items()} == shapes


class Softmaxed(HeadFirst):
    """A network that does something with its head's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(1)


@pytest.mark.parametrize(
    ("model", "head", "linear", "biased"),
    [
        ("mlp:16", 1, True, True),
        ("mlp:16", 2, False, False),
        ("mlp:16", 0, False, False),
        ("logistic", 1, True, True),
        ("resnet", 1, True, True),
        (HeadFirst, 1, True, True),
        (Softmaxed, 1, False, False),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False)), 1, True, False),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.LogSoftmax(1)), 1, False, False),
    ],
)
def test_a_layout_knows_whether_its_head_is_one_linear_layer(model: Any, head: int, linear: bool, biased: bool) -> None:
    data = [(x.view(-1, 1, 8, 8), y) for x, y in digits([40, 40])]
    result = ft.run("fedavg", data=data, model=model, head=head, rounds=1, engine="in-process")
    layout = result.simulation.server.layout
    for fits, bias in ((linear, False), (biased, True)):
        if fits:
            assert layout.linear_head("Mine", bias) == (10, layout.n_features)
            continue
        with pytest.raises(ft.FedtailorError, match=r"^Mine needs a head .*: set head=1\.$") as refused:
            layout.linear_head("Mine", bias)
        assert ("with a bias" in str(refused.value)) == bias


def test_targets_without_classes_have_outputs_alone() -> None:
    data = [(torch.rand(20, 3), torch.rand(20, 2)) for _ in range(2)]
    result = ft.run("fedavg", data=data, loss="mse", model="mlp:4", rounds=1, engine="in-process")
    assert result.simulation.server.layout.n_outputs == 2
    with pytest.raises(ft.FedtailorError, match="its targets must be one class label per sample"):
        ft.run(Looks(), data=data, loss="mse", model="mlp:4", rounds=1, engine="in-process", on_failure="stop")


@pytest.mark.parametrize("engine", ["in-process", pytest.param("processes", marks=pytest.mark.slow)])
def test_features_outputs_and_class_means_are_those_of_plain_pytorch(engine: str) -> None:
    data = digits([40, 30, 50])
    data[1] = (data[1][0][data[1][1] < 4], data[1][1][data[1][1] < 4])  # this client has four classes alone
    result = ft.run(Looks(), **{**OWN_DATA, "data": data, "engine": engine})
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    nn.utils.vector_to_parameters(result.simulation.server.initial, module.parameters())
    fitted = ft.run(Looks(), **{**OWN_DATA, "data": data}).simulation
    loop_message = fitted.server.initial
    for number in range(3):
        client = fitted.sites.site(number).client(1, {})
        x, y = client.train_data
        z = module[:3](x)
        means = client.class_means(client.flat_features(loop_message))
        for label in range(10):
            there = y == label
            expected = z[there].mean(0) if there.any() else torch.zeros(16)
            assert torch.allclose(means[label], expected, atol=1e-5)


class Shifted(ft.Method):
    """FedAvg with a shift of the features, an extra tensor that is trained beside the network, and kept at the client.

    Limits: it is FedAvg where the shift stays zero.
    """

    uploads: ClassVar[Uploads] = {"theta": Mean("samples")}

    def extra_tensors(self, layout: Layout) -> State:
        assert layout.n_features is not None
        return {"shift": torch.zeros(layout.n_features), "scale": torch.rand(2, 3)}

    def train(self, client: Client, message: Message) -> Message:
        theta = message["theta"].clone()
        place = client.layout.extra["shift"]
        if "shift" in client.state:
            theta[place] = client.state["shift"]

        def objective(batch: Batch) -> Tensor:
            head = batch.network.head_module()
            assert head is not None
            return batch.loss_function(head(batch.features + batch.extra["shift"]), batch.y)

        theta = client.descend(theta, objective=objective)
        client.state["shift"] = theta[place].clone()
        return {"theta": theta}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        theta = message["theta"].clone()
        shift = client.state.get("shift", client.extra(theta)["shift"])
        weight = theta[client.head][: 10 * len(shift)].view(10, -1)
        theta[client.head] = torch.cat([weight.flatten(), theta[client.head][weight.numel() :] + weight @ shift])
        return theta


def test_extra_tensors_are_trained_beside_the_network() -> None:
    """One client, compared with plain autograd: momentum and weight decay take the shift as they take the network."""
    (x, y) = digits([30])[0]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "batch": "full", "epochs": 4, "dtype": "float64"}
    settings |= {"test": 0.0, "validation": 0.0, "evaluation": {"every": 0}, "model": "mlp:16", "engine": "in-process"}
    result = ft.run(Shifted(), data=[(x, y)], rounds=2, keep_momentum=True, **settings)
    layout, initial = result.simulation.server.layout, result.simulation.server.initial
    assert layout.size == layout.head.stop + 16 + 6
    torch.manual_seed(0)
    theta = initial.clone()
    velocity = torch.zeros_like(theta)
    for _ in range(2 * 4):
        leaf = theta.clone().requires_grad_()
        w1, b1, w2, b2 = leaf[: 64 * 16].view(16, 64), leaf[1024:1040], leaf[1040:1200].view(10, 16), leaf[1200:1210]
        z = torch.relu(x.double().flatten(1) @ w1.T + b1) + leaf[1210:1226]
        loss = nn.functional.cross_entropy(z @ w2.T + b2, y)
        (gradient,) = torch.autograd.grad(loss, leaf)
        velocity = 0.9 * velocity + gradient + 0.01 * theta
        theta = theta - 0.1 * velocity
    close(result.server_state["theta"], theta)
    assert theta[1210:1226].abs().max() > 0.01
    close(result.client_state(0)["shift"], theta[1210:1226])


def test_what_an_extra_tensor_begins_with_depends_on_the_seed() -> None:
    def scale(seed: int) -> Tensor:
        result = ft.run(Shifted(), **{**SMALL, "rounds": 1, "seed": seed})
        return result.simulation.terms.network.layout.extras(result.simulation.server.initial)["scale"]

    assert torch.equal(scale(1), scale(1))
    assert not torch.equal(scale(1), scale(2))


class Leftover(Shifted):
    """Descends by the plain loss right after an objective that moved the extra tensors.

    Limits: none.
    """

    def train(self, client: Client, message: Message) -> Message:
        super().train(client, message)
        theta = client.descend(message["theta"])
        for name, tensor in client.extra(theta).items():
            assert torch.equal(tensor, client.extra(message["theta"])[name]), name
        return {"theta": theta}


def test_a_descent_by_the_plain_loss_leaves_extra_tensors_alone() -> None:
    ft.run(Leftover(), **SMALL)


def test_an_extra_tensor_that_is_none_is_refused() -> None:
    class Whole(Shifted):
        """Limits: none."""

        def extra_tensors(self, layout: Layout) -> State:
            return {"shift": torch.arange(3)}

    with pytest.raises(ft.FedtailorError, match="Whole, extra_tensors: 'shift' is no tensor of floating-point numbers"):
        ft.run(Whole(), **SMALL)


class Mixture(ft.Method):
    """FedAvg and a local model that predict together: the mean of their probabilities.

    Limits: it is FedAvg for the global model.
    """

    def train(self, client: Client, message: Message) -> Message:
        own = client.state.get("own", client.initial)
        client.state["own"] = client.descend(own, name="own")
        return {"theta": client.descend(message["theta"])}

    def predict(self, client: Client, message: Message, x: Inputs) -> Tensor:
        models = [message["theta"], client.state.get("own", client.initial)]
        return torch.stack([client.outputs(theta, x).softmax(1) for theta in models]).mean(0).log()


@pytest.mark.parametrize("engine", ["in-process", pytest.param("sites-in-memory", marks=pytest.mark.slow)])
def test_a_prediction_of_the_methods_own_is_what_is_measured(engine: str, tmp_path: Path) -> None:
    settings = {**SMALL, "engine": engine, "evaluation": {"train": True}}
    result = ft.run(Mixture(), out=tmp_path / "run", **settings)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for client in range(4):
        x, y = result.data.test(client)
        both = []
        for theta in (result.server_state["theta"], result.client_state(client)["own"]):
            nn.utils.vector_to_parameters(theta, module.parameters())
            both.append(module(x).softmax(1))
        scores = torch.stack(both).mean(0).log().detach()
        assert torch.allclose(result.simulation.predict(client, x), scores, atol=1e-5)
        assert result.per_client[client].accuracy == pytest.approx((scores.argmax(1) == y).double().mean().item())
        assert result.per_client[client].loss == pytest.approx(nn.functional.cross_entropy(scores, y).item(), abs=1e-5)
    with pytest.raises(ft.FedtailorError, match="Mixture predicts by more than one network's weights: no model file"):
        ft.export(result, client=0, to=tmp_path / "models")


def test_a_prediction_of_the_methods_own_is_measured_right_after_training_too() -> None:
    after = ft.run(Mixture(), **SMALL, evaluation={"model": "local"})
    assert after.accuracy is not None


def test_a_prediction_of_the_methods_own_is_not_adapted() -> None:
    result = ft.run(Mixture(), **SMALL, new_clients=1)
    with pytest.raises(ft.FedtailorError, match=r"Mixture predicts by more than .*: that cannot be fine-tuned"):
        ft.adapt(result, epochs=1)


def test_a_prediction_of_the_methods_own_is_not_fine_tuned() -> None:
    with pytest.raises(ft.FedtailorError, match=r"Mixture predicts by more than .*: leave --fine-tune out"):
        ft.run(Mixture(), **SMALL, evaluation={"fine_tune": 1})


class Hyper(ft.Method):
    """A network at the server makes each client's model of its embedding, as in pFedHN: θ_i = θ_0 + W v_i. It learns by
    autograd through the clients' changes. Limits: W = 0 sends the initial model."""

    uploads: ClassVar[Uploads] = {"theta": Each()}

    def start(self, server: Server) -> None:
        server.state["W"] = torch.zeros(len(server.initial), 3).to(server.initial)
        server.state["v"] = torch.randn(server.n_clients, 3, generator=torch.Generator().manual_seed(0))

    def models(self, server: Server, W: Tensor, v: Tensor) -> Tensor:
        return server.initial + v @ W.T

    def broadcast(self, server: Server) -> Message:
        return {"theta": server.initial}

    def send(self, server: Server, client: int) -> Message:
        return {"theta": self.models(server, server.state["W"], server.state["v"])[client]}

    def train(self, client: Client, message: Message) -> Message:
        client.state["theta"] = client.descend(message["theta"])
        return {"theta": client.state["theta"]}

    def receive(self, server: Server, total: Total) -> None:
        W, v = (server.state[name].clone().requires_grad_() for name in ("W", "v"))
        with torch.enable_grad():
            sent = self.models(server, W, v)[total.index]
            slopes = torch.autograd.grad(sent, (W, v), sent.detach() - total.rows("theta"))
        server.state |= {"W": W.detach() - 0.1 * slopes[0], "v": v.detach() - 0.1 * slopes[1]}

    def personal_model(self, client: Client, message: Message) -> Tensor:
        return client.state.get("theta", message["theta"])


def test_a_network_may_be_trained_at_the_server_through_the_clients_changes() -> None:
    method, log = watched(Hyper)
    ft.run(method, **{**SMALL, "rounds": 3})
    for number in (2, 3):
        W, v = (log.server[number - 1][name] for name in ("W", "v"))
        changes = torch.stack([log.down[number, i]["theta"] - log.up[number, i]["theta"] for i in range(4)])
        torch.testing.assert_close(log.server[number]["W"], W - 0.1 * changes.T @ v)
        torch.testing.assert_close(log.server[number]["v"], v - 0.1 * changes @ W)
        assert changes.abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("method", [Mixture(), Shifted()], ids=lambda method: type(method).__name__)
def test_such_methods_pass_the_common_suite(method: ft.Method, check: Any) -> None:
    check(method)

"""LoRA: the adapters are the trained vector, and a model file is the plain network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.methods import all_methods
from fedtailor.models.assembly import assemble
from fedtailor.models.lora import LoRA, plain
from fedtailor.training.network import Network
from tests.helpers import assert_same, final, numbers
from tests.models.nets import SMALL, Attention, Backbone, three_clients

X = torch.rand(6, 64)


def adapted(module: nn.Module, lora: int | str = 3, **settings: Any) -> Network:
    return assemble(copy.deepcopy(module), 1, X[:2], lora=lora, **settings).network()


@pytest.mark.parametrize("make", [Backbone, Attention])
def test_a_network_with_adapters_begins_as_it_was(make: type[nn.Module]) -> None:
    module = make().eval()
    network = adapted(module)
    network.module.eval()
    assert torch.equal(network(X), module(X))
    assert_same(network.state_dict(), module.state_dict())


def test_the_vector_is_the_adapters_and_the_head() -> None:
    network = adapted(Attention(), "3,alpha=6")
    assert network.head_names == ["classifier"]
    sizes = {name: place.stop - place.start for name, place in network.layout.layers.items()}
    assert sizes == {"query": 48, "key": 48, "value": 48, "up": 72, "down": 72, "classifier": 90}
    assert len(network.vector[network.layout.body]) == 288
    assert sum(p.numel() for p in network.module.parameters() if not p.requires_grad) == 3 * 72 + 144 + 136 + 16
    named = adapted(Attention(), "3,layers=query,value")
    assert list(named.layout.layers) == ["query", "value", "classifier"]


def test_training_is_that_of_a_plain_loop() -> None:
    """W x + (α/r) B A x written out, with SGD on A, B and the head."""
    (x, y), start = three_clients()[0], Backbone().double()
    settings: dict[str, Any] = {"rounds": 1, "steps": 4, "batch": "full", "lr": 0.3, "test": 0, "validation": 0}
    settings |= {"frozen": "encoder.0", "lora": "3,alpha=12", "dtype": "float64", "evaluate_every": 0}
    start.encoder[3].p = 0.0
    result = ft.run("fedavg", data=[(x, y)], model=start, **settings)
    network = result.simulation.terms.network
    assert list(network.layout.layers) == ["encoder.4", "classifier"]
    x, y = result.data.x, result.data.y
    first = result.simulation.terms.initial
    A, B = first[:60].view(3, 20).clone().requires_grad_(), torch.zeros(12, 3, dtype=torch.float64, requires_grad=True)
    bound = 1 / 20**0.5
    assert 0.6 * bound < A.abs().max() <= bound  # as a linear layer of 20 inputs
    head = copy.deepcopy(start.classifier)
    optimizer = torch.optim.SGD([A, B, *head.parameters()], lr=0.3)
    features = start.eval().encoder[:4](x).detach()
    W, b = start.encoder[4].weight.detach(), start.encoder[4].bias.detach()
    for _ in range(4):
        optimizer.zero_grad()
        outputs = head(torch.relu(features @ W.T + b + 12 / 3 * (features @ A.T) @ B.T))
        functional.cross_entropy(outputs, y).backward()
        optimizer.step()
    personal = result.personal(0)
    torch.testing.assert_close(personal["encoder.4.weight"], (W + 12 / 3 * B @ A).detach())
    torch.testing.assert_close(personal["classifier.weight"], head.weight.detach())
    assert torch.equal(personal["encoder.4.bias"], b)


@pytest.mark.parametrize("name", all_methods())
def test_every_method_trains_adapters(name: str) -> None:
    start = Attention()
    result = ft.run(name, data=three_clients(), model=start, lora=2, on_failure="stop", **SMALL)
    assert result.rounds[-1].loss is not None
    personal = result.personal(0)
    frozen = [n for n in personal if n.endswith("bias") and not n.startswith("classifier")] + ["norm.weight"]
    for tensor in frozen:
        assert torch.equal(personal[tensor], start.state_dict()[tensor])
    changed = {n for n in personal if not torch.equal(personal[n], start.state_dict()[n])}
    assert {"query.weight", "up.weight"} <= changed
    if name in ("fedavg", "ditto"):
        assert result.rounds[-1].bytes_up == 3 * 4 * (3 * 32 + 2 * 48 + 90)


def test_adapters_are_the_same_on_every_engine_and_after_resuming(tmp_path: Path) -> None:
    settings = {**SMALL, "data": three_clients(), "model": Attention, "lora": 2, "rounds": 3}
    one = ft.run("ditto", **settings)
    two = ft.run("ditto", **{**settings, "engine": "processes", "workers": 2})
    assert numbers(one.rounds) == numbers(two.rounds)
    assert_same(final(one), final(two))
    ft.run("ditto", out=tmp_path / "run", **{**settings, "rounds": 2})
    resumed = ft.resume(tmp_path / "run", data=three_clients(), model=Attention, rounds=3)
    assert numbers(one.rounds) == numbers(resumed.rounds)


def test_other_seeds_draw_adapters_anew_and_leave_the_base() -> None:
    network = adapted(Attention())
    before, other = network.vector.clone(), network.initialised(9)
    frozen = [tensor.clone() for tensor in network.frozen_tensors()]
    A, B = network.layout.layers["query"], slice(24, 48)
    assert not torch.equal(other[A][:24], before[A][:24])
    assert torch.equal(other[A][B], torch.zeros(24))
    assert not torch.equal(other[network.layout.head], before[network.layout.head])
    for one, now in zip(frozen, network.frozen_tensors(), strict=True):
        assert torch.equal(one, now)
    seeds = [assemble(Attention(), 1, X[:2], lora=3, seed=s).network().vector[A][:24] for s in (0, 0, 1)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


# --- models in use ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ft.RunResult, Path]:
    settings = {**SMALL, "lora": "4,alpha=8", "lr": 0.5, "rounds": 3}
    result = ft.run("fedavg", data=three_clients(), model=Attention, **settings)
    to = tmp_path_factory.mktemp("models")
    ft.export(result, to=to)
    return result, to / "client-0.safetensors"


def outputs_of(result: ft.RunResult, x: Tensor) -> Tensor:
    network = result.simulation.terms.network
    network.reset(result.personal_vector(0))
    network.module.eval()
    with torch.no_grad():
        return network(x)


def test_a_model_file_is_the_plain_network(trained: tuple[ft.RunResult, Path]) -> None:
    result, file = trained
    with_adapters = outputs_of(result, X)
    module = Attention().eval()
    module.load_state_dict(load_file(file))  # all that plain PyTorch needs
    torch.testing.assert_close(module(X).detach(), with_adapters, rtol=1e-5, atol=1e-5)
    found = ft.predict(file, X, model=Attention)
    torch.testing.assert_close(found.outputs, with_adapters, rtol=1e-5, atol=1e-5)
    initial = result.simulation.terms.network.state_dict(result.simulation.terms.initial)
    assert not torch.allclose(load_file(file)["query.weight"], initial["query.weight"], atol=1e-3)


def test_without_adapters_the_module_computes_the_same(trained: tuple[ft.RunResult, Path]) -> None:
    result, _ = trained
    wanted, network = outputs_of(result, X), result.simulation.terms.network
    module = plain(network.module)
    assert {type(layer) for layer in module.modules()} == {Attention, nn.Linear, nn.LayerNorm}
    torch.testing.assert_close(module(X).detach(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(network(X), wanted)  # which is left as it was


def test_a_chain_of_layers_is_exported_as_one(tmp_path: Path) -> None:
    result = ft.run("fedavg", clients=3, model="mlp:12", lora=2, **SMALL)
    (file,) = ft.export(result, client=0, to=tmp_path)
    about = ft.load_model(file)
    assert [type(layer) for layer in about] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(ft.predict(file, x).outputs, outputs_of(result, x), rtol=1e-5, atol=1e-5)


def test_new_clients_adapt_the_adapters(trained: tuple[ft.RunResult, Path], tmp_path: Path) -> None:
    result, _ = trained
    new = ft.adapt(result, data=[three_clients()[1]], epochs=1, to=tmp_path)
    base = result.simulation.terms.network.state_dict(result.simulation.terms.initial)
    assert new.models[0].keys() == base.keys()
    assert torch.equal(new.models[0]["up.bias"], base["up.bias"])
    assert not torch.equal(new.models[0]["up.weight"], result.personal(0)["up.weight"])
    assert ft.predict(tmp_path / "adapted-0.safetensors", X, model=Attention).outputs.shape == (6, 10)


def test_onnx_has_the_plain_network(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    result = ft.run("fedavg", clients=3, model="mlp:12", lora=2, **SMALL)
    ft.export(result, client=0, to=tmp_path, onnx=True)
    session = runtime.InferenceSession(tmp_path / "client-0.onnx")
    x = torch.rand(4, 1, 8, 8)
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), outputs_of(result, x), rtol=1e-5, atol=1e-5)


# --- what cannot be adapted ---


class Packed(nn.Module):
    """PyTorch's own encoder: in evaluation it computes with its weights, and not with its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.encoder(x.view(-1, 8, 8)).mean(1))
        return out


def test_adapters_count_in_evaluation_too() -> None:
    network = adapted(Packed())
    assert list(network.layout.layers) == ["encoder.linear1", "encoder.linear2", "classifier"]
    network.vector.copy_(torch.randn(network.layout.size, generator=torch.Generator().manual_seed(0)))
    network.module.train()
    wanted = network(X).detach()
    network.module.eval()
    with torch.no_grad():
        torch.testing.assert_close(network(X), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(plain(network.module)(X), wanted, rtol=1e-4, atol=1e-4)


def test_packed_projections_are_told() -> None:
    said = "These projections get no adapters, as the network uses their weights without them: encoder.self_attn."
    assert assemble(Packed(), 1, X[:2], lora=3).doubts == (said,)
    with pytest.warns(UserWarning, match="These projections get no adapters") as told:
        result = ft.run("fedavg", data=three_clients(), model=Packed, lora=3, **SMALL)
    assert len(told) == 1
    assert result.setup is not None
    assert result.setup.lines()[1] == said


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.one(x)))
        return out


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (Shared, {"lora": 3}, "The layers one and two share a weight, so one cannot get an adapter"),
        (Attention, {"lora": "3,layers=qery"}, "no layer 'qery' for adapters; it has classifier, query"),
        (Attention, {"lora": "3,layers=classifier"}, "There is no nn.Linear to adapt outside the head"),
        (Attention, {"lora": 3, "frozen": "body"}, "LoRA freezes the body already"),
        (Attention, {"lora": "rank 8"}, "'lora' is 'rank 8', but it must be a rank, as 8, or 8,alpha=16,layers"),
        (Attention, {"lora": "8,beta=2"}, "it must be a rank"),
        (Attention, {"lora": "8,alpha=nan"}, "it must be a rank"),
        (Attention, {"lora": 0}, "it must be a rank"),
    ],
)
def test_what_cannot_be_adapted_is_refused(module: type[nn.Module], settings: Any, said: str) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        assemble(module(), 1, X[:2], **settings)


def test_settings_of_adapters() -> None:
    assert LoRA.parse(8) == LoRA.parse("8") == LoRA(8, 8.0)
    assert LoRA.parse("8, alpha=16") == LoRA(8, 16.0)
    assert LoRA.parse("8,alpha=0.5,layers=encoder,decoder.0") == LoRA(8, 0.5, ("encoder", "decoder.0"))

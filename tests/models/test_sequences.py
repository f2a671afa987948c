"""The catalogue's networks for sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor.model_files.format import read_model
from fedtailor.models import build_model
from fedtailor.models.sequences import AttentionBlock, Attentive, Recurrent
from fedtailor.training.network import Network

TOKENS = 11
LENGTH = 9
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "engine": "in-process", "on_failure": "stop"}
both = pytest.mark.parametrize("name", ["gru:8", "transformer:8"])


def built(name: str, length: int = LENGTH) -> nn.Module:
    """A network for tokens in double precision. Its embedding of padding is far from 0, as nothing keeps it there."""
    module = build_model(name, (length,), 3, 0, tokens=TOKENS).double().eval()
    body: Any = module[0]  # type: ignore[index]
    with torch.no_grad():
        body.embedding.weight[0] = 5.0
    return module


def sequences(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, TOKENS, (length,), generator=generator) for length in lengths]


def padded(sequence: Tensor, length: int = LENGTH, before: int = 0) -> Tensor:
    return functional.pad(sequence, (before, length - before - len(sequence)))[None]


@both
def test_padding_changes_nothing_wherever_it_is(name: str) -> None:
    """Each sequence alone, without padding, gives what it gives in a batch, padded behind, before or in between."""
    module, several = built(name), sequences([1, 4, 7, 9])
    alone = torch.cat([module(sequence[None]) for sequence in several])
    behind = torch.cat([padded(sequence) for sequence in several])
    before = torch.cat([padded(sequence, before=LENGTH - len(sequence)) for sequence in several])
    for batch in (behind, before):
        assert torch.allclose(module(batch), alone, atol=1e-12, rtol=0)
    torch.manual_seed(0)
    for row, wanted in zip(behind, alone, strict=True):
        places = torch.randperm(LENGTH)[: int((row != 0).sum())].sort().values
        between = torch.zeros(LENGTH, dtype=torch.int64)
        between[places] = row[row != 0]
        assert torch.allclose(module(between[None])[0], wanted, atol=1e-12, rtol=0)


@both
def test_the_order_of_tokens_counts_and_that_of_samples_does_not(name: str) -> None:
    module, batch = built(name), torch.cat([padded(sequence) for sequence in sequences([6, 7, 8, 9])])
    assert torch.allclose(module(batch.flip(0)), module(batch).flip(0), atol=1e-12)
    assert (module(batch.flip(1)) - module(batch)).abs().max() > 1e-3


@both
def test_a_sequence_of_padding_alone_is_finite_and_has_a_gradient(name: str) -> None:
    module = built(name).float()
    output = module(torch.zeros(2, LENGTH, dtype=torch.int64))
    output.sum().backward()
    assert output.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_the_gru_is_its_equations() -> None:
    """Cho et al. 2014, as PyTorch writes them: r, z and n step by step over the tokens that are there."""
    body = built("gru:8")[0]  # type: ignore[index]
    assert isinstance(body, Recurrent)
    assert body.embedding is not None
    (sequence,) = sequences([6])
    h = torch.zeros(8, dtype=torch.float64)
    for x in body.embedding.weight[sequence]:
        given = body.gru.weight_ih_l0 @ x + body.gru.bias_ih_l0
        before = body.gru.weight_hh_l0 @ h + body.gru.bias_hh_l0
        r, z = torch.sigmoid(given[:8] + before[:8]), torch.sigmoid(given[8:16] + before[8:16])
        h = (1 - z) * torch.tanh(given[16:] + r * before[16:]) + z * h
    assert torch.allclose(body(padded(sequence))[0], h, atol=1e-12)


def test_a_block_is_that_of_pytorch() -> None:
    """`nn.TransformerEncoderLayer` with the same weights, pre-norm and a mask for padding."""
    torch.manual_seed(0)
    block = AttentionBlock(8).double()
    layer = nn.TransformerEncoderLayer(
        8, 4, 32, dropout=0.0, activation=functional.gelu, batch_first=True, norm_first=True
    ).double()
    dense: Any = block.dense
    with torch.no_grad():
        parts = (block.query, block.key, block.value)
        layer.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    for theirs, ours in (
        (layer.self_attn.out_proj, block.output),
        (layer.norm1, block.norm),
        (layer.norm2, dense[0]),
        (layer.linear1, dense[1]),
        (layer.linear2, dense[3]),
    ):
        theirs.load_state_dict(ours.state_dict())
    x, there = torch.randn(3, 5, 8, dtype=torch.float64), torch.arange(5) < torch.tensor([[5], [3], [1]])
    wanted = layer(x, src_key_padding_mask=~there)
    assert torch.allclose(block(x, there)[there], wanted[there], atol=1e-12)


def test_windows_are_read_along_time() -> None:
    x = torch.randn(2, 3, 20)
    for name in ("gru", "cnn1d", "transformer"):
        module = build_model(name, (3, 20), 4, 0)
        assert module(x).shape == (2, 4)
        assert not torch.allclose(module(x), module(x.flip(2)), atol=1e-4)
    body = build_model("gru", (3, 20), 4, 0)[0]  # type: ignore[index]
    assert torch.allclose(body(x), body.gru(x.transpose(1, 2))[1][0], atol=1e-6)


def test_all_layers_can_be_initialised_anew() -> None:
    """As `initial_for` does it: no parameter keeps its first value."""
    for name in ("gru", "transformer"):
        network = Network(build_model(name, (LENGTH,), 3, 0, tokens=TOKENS))
        for key, place in network.layout.layers.items():
            if not isinstance(network.module.get_submodule(key), nn.LayerNorm):  # these begin at 1 and 0
                assert not torch.equal(network.initialised(5)[place], network.vector[place]), key
    assert isinstance(network.module[0], Attentive)  # type: ignore[index]


@pytest.mark.parametrize("name", ["gru:8", "cnn1d:8", "transformer:8"])
def test_networks_are_cut_before_their_head(name: str) -> None:
    network = Network(build_model(name, (3, 20), 4, 0))
    x = torch.randn(5, 3, 20)
    features, head = network.features(x), network.head_module()
    assert features is not None
    assert head is not None
    assert features.shape == (5, 8)
    assert torch.equal(head(features), network(x))
    assert network.layout.head.stop - network.layout.head.start == 8 * 4 + 4


@pytest.mark.parametrize(
    ("name", "shape", "tokens", "said"),
    [
        ("gru", (3, 8, 8), None, "The model gru is for sequences, windows .* but the samples have the shape 3×8×8:"),
        ("transformer", (8,), None, r"whole numbers from 0, but the samples have the shape 8 and are not such tokens"),
        (
            "cnn1d",
            (8,),
            5,
            r"The model cnn1d is for sequences, windows \(channels, length\) of values, but .* shape 8:",
        ),
        ("gru", (8,), 2_000_000, "The tokens go up to 1999999, more than a vocabulary has"),
        ("gru:8,8", (8,), 5, "'gru:8,8' is not understood"),
        ("transformer:6", (8,), 5, "'transformer:6' is not understood: .* a multiple of 4"),
        ("gru:0", (8,), 5, "'gru:0' is not understood"),
        ("cnn:3", (3, 32, 32), None, "'cnn:3' is not understood"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, shape: tuple[int, ...], tokens: int | None, said: str) -> None:
    with pytest.raises(ft.FedtailorError, match=said):
        build_model(name, shape, 3, 0, tokens=tokens)


def windows(n: int = 20) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3, 12)).astype(np.float32), np.arange(n) % 2) for _ in range(2)]


def texts(n: int = 20) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(0, TOKENS, (n, LENGTH)), np.arange(n) % 2) for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "data"),
    [("gru:8", windows), ("gru:8", texts), ("cnn1d:8", windows), ("transformer:8", windows), ("transformer:8", texts)],
)
def test_model_files_predict_what_was_measured(name: str, data: Any, tmp_path: Path) -> None:
    """The file alone is enough: the network is one of the catalogue, for so many tokens."""
    result = ft.run("fedper", data=data(), model=name, **SMALL)
    (file,) = ft.export(result, client=1, to=tmp_path)
    x, y = result.data.test(1)
    found = ft.predict(file, x)
    accuracy = (found.outputs.argmax(1) == y).double().mean().item()
    assert accuracy == pytest.approx(result.per_client[1].accuracy)
    whole = Network(ft.load_model(file))
    assert torch.equal(whole(x), found.outputs)  # type: ignore[arg-type]


def test_the_lines_of_a_model_file_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = ft.run("fedper", data=texts(), model="gru:8", **SMALL)
    (file,) = ft.export(result, client=0, to=tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(read_model(file)[0].load), names)
    x, _ = result.data.test(0)
    with torch.no_grad():
        assert torch.equal(names["model"](x), ft.predict(file, x).outputs)


def test_tokens_become_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = ft.run("fedper", data=texts(), model="transformer:8", **SMALL)
    (file,) = ft.export(result, client=0, to=tmp_path, onnx=True)
    session = runtime.InferenceSession(file.with_suffix(".onnx").read_bytes())
    x, _ = result.data.test(0)
    for samples in (x[:1], x):
        (found,) = session.run(None, {"x": samples.numpy()})  # type: ignore[union-attr]
        assert torch.allclose(torch.from_numpy(found), ft.predict(file, samples).outputs, atol=1e-5)

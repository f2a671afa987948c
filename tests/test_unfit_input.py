"""Input in Python that cannot be what was meant: refused before any work, or taken as it was meant."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "engine": "in-process"}
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3


def clients(y: Any = Y) -> list[Any]:
    return [(X[:30], y[:30]), (X[30:], y[30:])]


def test_cross_entropy_of_numbers_is_refused() -> None:
    """It would take them for shares of classes, and fall without end."""
    for targets in (np.random.default_rng(1).normal(size=(60, 1)), Y.astype(float)):
        with pytest.raises(
            ft.FedtailorError, match="cross-entropy is for classes, but these targets are floating-point"
        ):
            ft.run("fedavg", data=clients(targets), **SMALL)
    shares = np.random.default_rng(1).dirichlet([1, 1, 1], 60)
    own = ft.run("fedavg", data=clients(shares), loss=nn.functional.cross_entropy, **SMALL)  # whoever says so, means it
    assert own.rounds[-1].loss is not None
    assert ft.run("fedavg", data=clients(shares), loss="mse", **SMALL).rounds[-1].loss is not None


def test_labels_that_leave_out_most_classes_are_refused() -> None:
    for most in (2_024, 10**6, 10**15):
        codes = np.where(Y == 2, most, Y)
        with pytest.raises(ft.FedtailorError, match=f"go up to {most}, but only 3 different ones occur.*number the"):
            ft.run("fedavg", data=clients(codes), **SMALL)
    ft.run("fedavg", data=clients(np.where(Y == 2, 900, Y)), **SMALL)


def test_new_data_may_leave_out_classes(tmp_path: Path) -> None:
    many = [(np.zeros((1200, 4), np.float32), np.arange(1200))] * 2
    result = ft.run("fedavg", data=many, test=0, validation=0, evaluate_every=0, **SMALL)
    new = ft.adapt(result, data=[(X[:10], np.full(10, 1150))], epochs=1)
    assert len(new.models) == 1


def test_tables_may_stand_for_arrays() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=list("abcd")).assign(label=Y)
    features = table[list("abcd")]
    with pytest.raises(ft.FedtailorError, match=r"Client 1 of 'list' is one table: give a pair \(x, y\)"):
        ft.run("fedavg", data=[(features, table["label"]), table], **SMALL)
    pairs = [(features[:30], table["label"][:30]), (features[30:], table["label"][30:])]
    same = [ft.run("fedavg", data=data, **SMALL).rounds[-1].loss for data in (pairs, clients())]
    assert same[0] == same[1]


@pytest.mark.parametrize("data", [X, torch.zeros(3, 2), {1, 2}, object(), (n for n in range(3))])
def test_data_that_are_no_list(data: Any) -> None:
    with pytest.raises(ft.FedtailorError, match=f"The data are a {type(data).__name__}, not a list of clients"):
        ft.run("fedavg", data=data, **SMALL)


def test_features_too_large_for_the_type() -> None:
    large = [(np.full((30, 4), 1e200), Y[:30])]
    with pytest.raises(ft.FedtailorError, match="too large for float32: scale them, or compute in float64"):
        ft.run("fedavg", data=large, **SMALL)


def test_lazy_layers_get_their_sizes_from_the_data() -> None:
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    result = ft.run("fedavg", data=clients(), model=lazy, **SMALL)
    assert result.simulation.terms.network.n_parameters == 4 * 8 + 8 + 8 * 3 + 3
    assert isinstance(lazy[0], nn.LazyLinear)  # the user's own is as it was
    again = ft.run("fedavg", data=clients(), model=lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(3)), **SMALL)
    assert again.rounds[-1].loss is not None
    with pytest.raises(ft.FedtailorError, match="lazy layers do not fit samples of the shape 4"):
        ft.run("fedavg", data=clients(), model=nn.Sequential(nn.LazyConv2d(3, 3)), **SMALL)
    with pytest.raises(ft.FedtailorError, match=r"cannot be copied .*: give a function that makes it"):
        ft.run("fedavg", data=clients(), model=nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), **SMALL)


def test_predict_refuses_what_it_cannot_mean(tmp_path: Path) -> None:
    (file,) = ft.export(ft.run("fedavg", data=clients(), **SMALL), client=0, to=tmp_path)
    for bad in (np.nan, np.inf, -np.inf):
        samples = X.copy()
        samples[7, 2] = samples[9, 0] = bad
        with pytest.raises(ft.FedtailorError, match="2 of 60 samples hold NaN or Inf, the first is sample 7"):
            ft.predict(file, samples)
    for other, said in [
        (np.full((2, 4), "1"), "of type <U1: give numbers"),
        (np.zeros((2, 4), complex), "of type complex128: give numbers"),
        (np.zeros((0, 4)), "no samples"),
        ([], "no samples"),
        (3.0, "no samples"),
        (None, "of type object: give numbers"),
        ([[1, 2, 3, 4], [1]], "cannot be made an array of numbers"),
        (torch.zeros(2, 4).to_sparse(), "cannot be made an array of numbers"),
        (np.full((2, 4), 1e300), "too large for float32"),
    ]:
        with pytest.raises(ft.FedtailorError, match=said):
            ft.predict(file, other)
    assert ft.predict(file, torch.from_numpy(X).bfloat16()).outputs.shape == (60, 3)


def test_predict_takes_a_table(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (file,) = ft.export(ft.run("fedavg", data=clients(), **SMALL), client=0, to=tmp_path)
    table = pandas.DataFrame(X, columns=list("abcd"))
    assert torch.equal(ft.predict(file, table).outputs, ft.predict(file, X).outputs)
    with pytest.raises(ft.FedtailorError, match="give numbers"):
        ft.predict(file, table.assign(d="text"))

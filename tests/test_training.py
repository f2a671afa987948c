"""Settings of local training: the loss that is minimised, defaults, what is refused, precision, longer runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.nn import functional

import fedtailor as ft
from fedtailor._common.toml import parse_toml, write_toml
from fedtailor.client.sites import Site
from fedtailor.client.terms import balanced
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import make_experiment
from fedtailor.methods import CATALOGUE, find_method
from fedtailor.studies.comparison import make_comparison
from fedtailor.training.chain import chain_of
from fedtailor.training.isolation import isolated
from tests.helpers import digits, final, make_simulation, numbers

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 4, "model": "mlp:8", "rounds": 2, "epochs": 1, "max_train": 30,
    "engine": "in-process", "seed": 2,
}  # fmt: skip


def prepared(objects: Objects | None = None, **settings: Any) -> Prepared:
    with isolated():
        return prepare(make_experiment({**SMALL, **settings}), objects or Objects())


# --- the loss ---


def plainly(outputs: Tensor, targets: Tensor, weights: list[float], smoothing: float) -> float:
    """The mean over the samples of Σ_c w_c q_c (−log p_c), q the smoothed target, one number at a time."""
    total = 0.0
    for scores, label in zip(outputs.tolist(), targets.tolist(), strict=True):
        normaliser = sum(np.exp(score) for score in scores)
        for number, score in enumerate(scores):
            target = (1 - smoothing) * (number == label) + smoothing / len(scores)
            total -= weights[number] * target * np.log(np.exp(score) / normaliser)
    return total / len(targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", ["none", "balanced", [0.5, 0, 1, 2, 3, 1, 1, 1, 0.25, 4]], ids=str)
def test_the_training_loss_is_the_formula(smoothing: float, weights: Any) -> None:
    made = prepared(label_smoothing=smoothing, class_weights=weights, dtype="float64", new_clients=1, max_train=None)
    labels = torch.cat([made.data.train(client)[1] for client in range(4) if client not in made.data.new]).numpy()
    numbers = [1.0] * 10 if weights == "none" else weights
    if weights == "balanced":  # by the training samples of all training clients together
        assert made.data.new
        numbers = compute_class_weight("balanced", classes=np.arange(10), y=labels).tolist()
    outputs = torch.randn(7, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 8, 9, 9, 4])
    found = float(made.terms.training_loss(outputs, targets))
    assert found == pytest.approx(plainly(outputs, targets, numbers, smoothing), rel=1e-12)
    assert made.terms.loss is functional.cross_entropy
    if weights == "none":
        expected = functional.cross_entropy(outputs, targets, label_smoothing=smoothing)
        assert found == pytest.approx(float(expected), rel=1e-12)


def test_balanced_classes_have_the_same_weight_altogether() -> None:
    weights = balanced(torch.tensor([1, 0, 3, 6]))
    assert weights.tolist() == pytest.approx([10 / 3, 0, 10 / 9, 10 / 18])
    assert (weights * torch.tensor([1, 0, 3, 6])).tolist() == pytest.approx([10 / 3, 0, 10 / 3, 10 / 3])


def test_a_step_descends_the_training_loss_and_the_plain_loss_is_reported() -> None:
    """On the written-out chain of layers, against autograd; with a client's whole objective, too."""
    weights = [0.5, 3, 1, 2, 3, 1, 1, 1, 0.25, 4]
    settings = {"label_smoothing": 0.3, "class_weights": weights, "dtype": "float64", "lr": 0.7, "clients": 1}
    result = ft.run("local", **{**SMALL, **settings, "rounds": 1, "steps": 1, "batch": "full", "partition": "iid"})
    run = result.simulation
    x, y = result.data.train(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)).double()
    module.load_state_dict(run.terms.network.state_dict(run.terms.initial))
    kind = nn.CrossEntropyLoss(torch.tensor(weights, dtype=torch.float64), reduction="sum", label_smoothing=0.3)
    objective = kind(module(x), y) / len(y)
    objective.backward()
    client = run.sites.site(0).client(1, {})
    loss, gradient = client.loss_and_gradient(run.terms.initial)
    assert float(loss) == pytest.approx(objective.item(), rel=1e-12)
    assert float(client.loss(run.terms.initial)) == pytest.approx(objective.item(), rel=1e-12)
    torch.testing.assert_close(client.gradient(run.terms.initial, next(iter(client.batches()))), gradient)
    torch.optim.SGD(module.parameters(), lr=0.7).step()
    for name, tensor in result.personal(0).items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=1e-12)
    held_out, labels = result.data.test(0)
    assert result.rounds[-1].loss == pytest.approx(functional.cross_entropy(module(held_out), labels).item(), rel=1e-9)


def test_the_mean_over_pieces_is_the_mean_over_all() -> None:
    """A client with more samples than fit one pass, and a batch of one class, keep their weights."""
    weights = [float(number) for number in range(1, 11)]
    data = digits([300, 40])
    made = prepared(Objects(data=data), clients=None, class_weights=weights, dtype="float64", max_train=None, test=0.0,
                    validation=0.0, evaluation={"every": 0})  # fmt: skip
    x, y = made.data.train(0)
    assert len(x) > 2 * 128
    with isolated():
        client = Site(0, made.data.client(0), made.terms).client(1, {})
        loss, _ = client.loss_and_gradient(made.terms.initial)
        made.terms.network.vector.copy_(made.terms.initial)
        terms = functional.cross_entropy(made.terms.network(x), y, reduction="none") * torch.tensor(weights)[y]
    assert float(loss) == pytest.approx(terms.mean().item(), rel=1e-9)
    outputs = torch.zeros(3, 10, dtype=torch.float64)
    one_class = float(made.terms.training_loss(outputs, torch.tensor([4, 4, 4])))
    assert one_class == pytest.approx(5 * np.log(10), rel=1e-12)


def test_labels_of_their_own_are_smoothed_over_each_clients_classes() -> None:
    own = {**SMALL, "labels": "own", "partition": "classes:3", "label_smoothing": 0.2}
    run = make_simulation("fedper", **own)
    client = run.sites.site(1).client(1, {})
    classes = run.data.own_classes[1]
    assert classes < 10
    outputs, y = torch.randn(5, 10, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
    expected = functional.cross_entropy(outputs[:, :classes], y, label_smoothing=0.2)
    torch.testing.assert_close(client.loss_function(outputs, y), expected)


# --- defaults, and what a file holds ---


def test_adam_has_a_learning_rate_of_its_own_by_default() -> None:
    assert make_experiment({}).lr == 0.1
    assert make_experiment({"optimizer": "sgd"}).lr == 0.1
    for optimizer in ("adam", "adamw"):
        assert make_experiment({"optimizer": optimizer}).lr == 0.001
        assert make_experiment({"optimizer": optimizer, "lr": 0.1}).lr == 0.1
    asked = make_comparison({"methods": ["fedavg"], "seeds": [0], "grid": {"optimizer": ["sgd", "adam"]}})
    assert sorted((run.optimizer, run.lr) for run in asked.runs().values()) == [("adam", 0.001), ("sgd", 0.1)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_settings_come_back_from_a_file_as_they_were(optimizer: str) -> None:
    settings = {"optimizer": optimizer, "schedule": "warmup:5, cosine:0.1", "step_schedule": "1.0 / sqrt(t)",
                "clip": 2.0, "label_smoothing": 0.1, "class_weights": [0.2, 1], "autocast": True}  # fmt: skip
    made = make_experiment(settings)
    assert made.class_weights == "0.2,1.0"
    assert make_experiment(parse_toml(write_toml(made.model_dump()))) == made


# --- what is refused ---


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "adam", "momentum": 0.9}, "Momentum is a setting of sgd, and adam has moments of its own"),
    ({"autocast": True, "dtype": "float64"}, "no autocast from float64"),
    ({"matmul_precision": "high", "dtype": "float64"}, "matmul_precision is for float32, not for float64"),
    ({"class_weights": "0.5,0.5"}, "2 class weights for 10 classes"),
    ({"class_weights": "balanced", "labels": "own", "partition": "classes:3"}, "classes that all clients share"),
    ({"class_weights": "-1,2"}, "'class_weights' is '-1,2', but it must be none, balanced, or one number"),
    ({"class_weights": "0,0"}, "'class_weights' is '0,0'"),
    ({"label_smoothing": 1.0}, "'label_smoothing' is 1.0, but it must be below 1"),
    ({"clip": 0.0}, "'clip' is 0.0, but it must be above 0"),
    ({"schedule": "linear"}, "'schedule' is 'linear', but it must be constant, step:EVERY,FACTOR, cosine"),
    ({"optimizer": "rmsprop"}, "'optimizer' is 'rmsprop', but it must be sgd, adam or adamw"),
    ({"method": "scaffold", "optimizer": "adam"}, "SCAFFOLD cannot train with optimizer adam: it computes gradients"),
    ({"method": "scaffold", "clip": 1.0}, "SCAFFOLD cannot train with clip 1.0: it computes gradients"),
    ({"method": "pgfed-ce", "optimizer": "adamw"}, "PGFedCE cannot train with optimizer adamw"),
    ({"method": "pflego", "schedule": "cosine"}, "PFLEGO cannot train with schedule cosine: head_lr and joint_lr"),
    ({"method": "fedrod", "label_smoothing": 0.1}, "FedRoD cannot train with label_smoothing 0.1"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_in_one_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ft.FedtailorError) as refused:
        prepared(**settings)
    assert said in str(refused.value)
    assert str(refused.value).endswith(".")


def test_smoothing_and_weights_are_for_cross_entropy() -> None:
    x = torch.rand(30, 3)
    for more in ({"label_smoothing": 0.1}, {"class_weights": "balanced"}):
        name = next(iter(more))
        with pytest.raises(ft.FedtailorError, match=f"The setting {name} is for classes under the loss cross-entropy"):
            prepared(Objects(data=[(x, x[:, :1])]), loss="mse", clients=None, max_train=None, **more)
        with pytest.raises(ft.FedtailorError, match=f"The setting {name} is for classes"):
            prepared(Objects(loss=nn.CrossEntropyLoss()), **more)


def test_what_needs_the_path_of_sgd_is_said_by_the_method() -> None:
    refusing = {name for name in CATALOGUE if "optimizer" in find_method(name).refuses}
    assert refusing == {"scaffold", "pgfed-ce", "pflego", "fednova"}
    assert "optimizer" not in find_method("scaffold", {"full_gradient": True}).refuses  # option I needs no path


# --- longer runs ---


def test_a_cosine_run_is_resumed_but_not_made_longer(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 4, "optimizer": "adam", "schedule": "cosine", "keep_momentum": True}
    whole = ft.run("ditto", out=tmp_path / "whole", **settings)

    def stop(record: Any) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run("ditto", out=tmp_path / "halves", on_round=stop, **settings)
    resumed = ft.resume(tmp_path / "halves")
    assert numbers(resumed.rounds) == numbers(whole.rounds)
    with pytest.raises(ft.FedtailorError, match="has the schedule 'cosine' over 4 rounds: it cannot get more"):
        ft.resume(tmp_path / "whole", rounds=6)
    ft.run("fedavg", out=tmp_path / "steps", **{**settings, "schedule": "step:2,0.1", "step_schedule": "cosine"})
    longer = ft.resume(tmp_path / "steps", rounds=6)
    at_once = {**settings, "schedule": "step:2,0.1", "step_schedule": "cosine", "rounds": 6}
    assert numbers(longer.rounds) == numbers(ft.run("fedavg", **at_once).rounds)


def test_fine_tuning_has_the_experiments_own_rate() -> None:
    """The last round's factor is 0.0 here: with it, nothing would move."""
    tuned = {"evaluation": {"fine_tune": 2}}
    result = ft.run("fedavg", **SMALL, schedule="step:1,1e-30", **tuned)
    plain = ft.run("fedavg", **SMALL, schedule="step:1,1e-30")
    assert result.rounds[-1].loss != plain.rounds[-1].loss
    assert plain.rounds[0].loss == plain.rounds[1].loss  # round 2 stood still


# --- bfloat16 ---


class Watching(nn.Module):
    """A network that writes down the type that it computes in."""

    seen: set[torch.dtype]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.seen = set()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x.flatten(1)))
        self.seen.add(hidden.dtype)
        result: Tensor = self.head(hidden)
        return result


@pytest.mark.parametrize("method", ["fedavg", "per-fedavg", "moon", "fedrep", "pgfed", "fedrod"])
def test_autocast_computes_passes_in_bfloat16_and_keeps_single_precision(method: str) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 4, "epochs": 2, "lr": 0.05}
    more: dict[str, Any] = {"first_order": False} if method == "per-fedavg" else {}
    model = Watching()
    result = ft.run(method, **{**settings, "model": model}, autocast=True, **more)
    assert {tensor.dtype for tensor in final(result).values() if tensor.is_floating_point()} == {torch.float32}
    module = result.simulation.terms.network.module
    assert isinstance(module, Watching)
    assert module.seen == {torch.bfloat16}
    plain = ft.run(method, **{**settings, "model": Watching()}, **more)
    one, other = result.rounds[-1].loss, plain.rounds[-1].loss
    assert one is not None
    assert one != other
    assert one == pytest.approx(other, rel=0.05)


def test_autocast_is_the_same_on_every_engine_and_uses_no_chain() -> None:
    for autocast in (False, True):
        made = prepared(autocast=autocast)
        assert (chain_of(made.terms.network, made.terms.network.module, made.data.x) is None) == autocast
    runs = [
        ft.run("fedavg", **{**SMALL, "engine": engine}, autocast=True, workers=2)
        for engine in ("in-process", "processes")
    ]
    assert numbers(runs[0].rounds) == numbers(runs[1].rounds)
    assert numbers(runs[0].rounds) != numbers(ft.run("fedavg", **SMALL).rounds)


class Precision(ft.Method):
    """FedAvg that keeps the precision of products while it trains."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        kinds = {"highest": 0.0, "high": 1.0, "medium": 2.0}
        client.state["seen"] = torch.tensor(kinds[torch.get_float32_matmul_precision()])
        assert torch.backends.cudnn.allow_tf32 == (torch.get_float32_matmul_precision() != "highest")
        return {"theta": client.descend(message["theta"])}


@pytest.mark.parametrize("engine", ["in-process", "processes"])
@pytest.mark.parametrize("stack", [1, 2])
def test_products_have_the_precision_that_is_asked_for_while_clients_compute(engine: str, stack: int) -> None:
    for number, precision in enumerate(("highest", "high", "medium")):
        settings = {**SMALL, "engine": engine, "stack": stack, "workers": 2}
        result = ft.run(Precision(), matmul_precision=precision, **settings)
        assert {float(result.client_state(client)["seen"]) for client in range(2)} == {number}
        assert torch.get_float32_matmul_precision() == "highest"

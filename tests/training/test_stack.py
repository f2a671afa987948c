"""Several clients train as one computation: each gets what it gets alone, up to rounding."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor.cli.device_check import Operators
from fedtailor.client.group import run_together
from fedtailor.messages import fetched
from fedtailor.training import stack as stack_module
from fedtailor.training.augmentation import Augmentation
from fedtailor.training.descent import Batch, batch_gradient, descend, mean_gradient
from fedtailor.training.inputs import Lazy
from fedtailor.training.network import Network
from fedtailor.training.optimizer import OptimizerSettings
from fedtailor.training.predictions import outputs
from fedtailor.training.stack import Stack, is_dense, why_not
from fedtailor.training.stacked_batches import batches_of
from tests.training.parts import LAYERS, small

SIZES = [33, 30, 21, 12, 4, 2]  # unequal clients, of which one has fewer samples than a batch
X = torch.rand(sum(SIZES), 12, 12, 1, generator=torch.Generator().manual_seed(0)).double().permute(0, 3, 1, 2)
Y = torch.randint(4, (len(X),), generator=torch.Generator().manual_seed(1))
XS, YS = X.split(SIZES), Y.split(SIZES)
Work = Callable[[Network, int], Tensor]  # of a client, with its network


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def normalised() -> nn.Module:
    """Without biases before BatchNorm: their gradient is 0 but for rounding, of which Adam would make steps."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(75, 4)).double()


NETWORKS = {"mlp": dense, "cnn": small, "batch-norm": normalised}


def starts(network: Network) -> list[Tensor]:
    """Another model for each client."""
    stream = torch.Generator().manual_seed(0)
    found = [network.vector + 0.1 * torch.randn(len(network.vector), generator=stream).double() for _ in SIZES]
    for theta in found:
        for place in network.layout.buffers:
            theta[place] = theta[place].abs()
    return found


def by_either(network: Network, work: Work) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """What comes of each client's work alone, and together; and how many calls were computed at once each time."""
    first, sizes = network.vector.clone(), list[int]()
    alone, stack = [], Stack(network, len(SIZES))
    for client in range(len(SIZES)):
        network.reset(first)
        alone.append(torch.cat([work(network, client), network.vector, torch.tensor([network.differentiated])]))
    together = stack._together

    def counted(run: list[Any]) -> list[Any]:
        sizes.append(len(run))
        return together(run)

    stack._together = counted  # type: ignore[method-assign]
    found = run_together(stack, [partial(work, own, client) for client, own in enumerate(stack.networks)])
    seen = [torch.tensor([own.differentiated]) for own in stack.networks]
    return alone, [torch.cat(parts) for parts in zip(found, stack.vectors, seen, strict=True)], sizes


def assert_equal(alone: list[Tensor], together: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), rtol=1e-10, atol=1e-10)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
    "adam": {"kind": "adam", "lr": 0.01},
    "adamw": {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "clip": {"clip": 0.3},
    "rates that differ between clients": {"step_schedule": "cosine:0.1"},
    "such rates and momentum": {"step_schedule": "cosine:0.1", "momentum": 0.5},
    "full": {"batch": None},
    "columns": {"batch": 16},
    "whole batches": {"drop_last": True},
    "steps": {"steps": 7},
}
FURTHER = ["nothing", "correction", "function", "part", "head", "scale", "each_step", "loss", "augment"]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_a_descent_is_that_of_a_client_alone(name: str, how: str) -> None:
    for further in FURTHER if how == "momentum and decay" else FURTHER[:3]:
        check_descent(Network(NETWORKS[name]()), {"lr": 0.1, "epochs": 3, "batch": 10, **OPTIMIZERS[how]}, further)


@pytest.mark.parametrize("further", FURTHER)
def test_plain_sgd_is_that_of_a_client_alone_whatever_is_added(further: str) -> None:
    check_descent(Network(dense()), {"lr": 0.1, "epochs": 3, "batch": 10}, further)


def check_descent(network: Network, settings: dict[str, Any], further: str) -> None:
    optimizer, layout = OptimizerSettings(join_last=network.has_batch_norm, **settings), network.layout
    thetas, part = starts(network), {"part": layout.body, "head": layout.head}.get(further)

    def work(own: Network, client: int) -> Tensor:
        seen, stream = list[Tensor](), torch.Generator().manual_seed(client)
        of_client = torch.rand_like(
            thetas[client][part or slice(None)], generator=torch.Generator().manual_seed(client)
        )
        more: dict[str, Any] = {
            "correction": {"correction": 0.01 * of_client},
            "function": {"correction": lambda vector: 0.1 * (vector - of_client)},
            "scale": {"scale": of_client.abs()},
            "each_step": {"each_step": lambda vector: seen.append(vector.clone())},
            "augment": {
                "augment": partial(Augmentation(crop=2, flip=True), stream=torch.Generator().manual_seed(client))
            },
        }.get(further, {})
        loss = smoothed if further == "loss" else functional.cross_entropy
        found = descend(
            own, thetas[client], XS[client], YS[client], loss, optimizer, stream, part=part, moments={}, **more
        )
        return torch.cat([found, *seen[-1:], torch.tensor([len(seen)])])

    alone, together, sizes = by_either(network, work)
    assert_equal(alone, together)
    assert sizes == [len(SIZES)]


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_of_a_chain_is_computed_for_all(layer: str) -> None:
    torch.manual_seed(0)
    inputs = LAYERS[layer]()(X[:1].float()).numel()
    module = nn.Sequential(LAYERS[layer](), nn.ReLU(), nn.Flatten(), nn.Linear(inputs, 4)).double()
    check_descent(Network(module), {"lr": 0.1, "epochs": 1, "batch": 10}, "nothing")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("loss", [functional.cross_entropy, smoothed])
def test_gradients_are_those_of_a_client_alone(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Of batches of different sizes, and of all samples: more than fit one pass."""
    network, many = Network(NETWORKS[name]()), X.repeat(3, 1, 1, 1)
    thetas = starts(network)

    def work(own: Network, client: int) -> Tensor:
        x, y = (XS[client], YS[client]) if client else (many, Y.repeat(3))
        one = batch_gradient(thetas[client], Batch(own, loss, x[:7], y[:7]))
        mean, gradient = mean_gradient(own, thetas[client], x, y, loss)
        return torch.cat([one, mean[None], gradient])

    alone, together, sizes = by_either(network, work)
    assert_equal(alone, together)
    assert sizes == [len(SIZES)] * 2


def test_a_step_is_that_of_autograd() -> None:
    """An obvious way: one step of SGD on all samples, by autograd on a copy of the module."""
    network, stream = Network(small(batch_norm=True)), torch.Generator()
    thetas, optimizer = starts(network), OptimizerSettings(lr=0.1, batch=None)
    stack = Stack(network, 3)

    def work(client: int) -> Tensor:
        own = stack.networks[client]
        return descend(own, thetas[client], XS[client], YS[client], functional.cross_entropy, optimizer, stream)

    for client, found in enumerate(run_together(stack, [partial(work, client) for client in range(3)])):
        module = small(batch_norm=True)
        module.load_state_dict(network.state_dict(thetas[client]))
        module.train()
        functional.cross_entropy(module(XS[client]), YS[client]).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        for name, tensor in network.state_dict(found).items():
            torch.testing.assert_close(tensor, module.state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("further", ["nothing", "correction", "function", "writing"])
def test_a_step_takes_as_many_operators_for_six_clients_as_for_three(name: str, further: str) -> None:
    network = Network(NETWORKS[name]())

    def counted(clients: int, steps: int) -> int:
        stack, optimizer = Stack(network, clients), OptimizerSettings(batch=None, steps=steps)

        def work(own: Network, client: int) -> Tensor:
            of_client, total = network.vector + client, torch.zeros(()).double()
            more: dict[str, Any] = {
                "correction": {"correction": of_client},
                "function": {"correction": lambda vector: 0.1 * (vector - of_client)},
                "writing": {"each_step": lambda vector: total.add_(vector.sum())},
            }.get(further, {})
            x, y, stream = X[:8], Y[:8], torch.Generator()
            return descend(own, network.vector.clone(), x, y, functional.cross_entropy, optimizer, stream, **more)

        works = [partial(work, own, client) for client, own in enumerate(stack.networks)]
        with Operators() as mode:
            run_together(stack, works)
        return mode.count

    three, six = (counted(clients, 30) - counted(clients, 20) for clients in (3, 6))
    assert three == six > 0


def test_no_sample_counts_twice_and_none_is_lost() -> None:
    optimizer = OptimizerSettings(epochs=2, batch=10)
    numbers = torch.arange(len(X)).double()
    calls = [parts(x, number, optimizer) for number, x in enumerate(numbers.split(SIZES))]
    seen: list[list[float]] = [[] for _ in SIZES]
    for step in batches_of(calls):
        for client, size in enumerate(step.sizes):
            seen[client] += step.x[client, :size].tolist()
    assert [sorted(of_client) for of_client in seen] == [sorted(2 * x.tolist()) for x in numbers.split(SIZES)]


def parts(x: Tensor, number: int, settings: OptimizerSettings) -> Any:
    """A call as `batches_of` sees it."""
    stream = torch.Generator().manual_seed(number)
    steps = settings.epochs * -(-len(x) // (settings.batch or len(x)))
    return SimpleNamespace(
        theta=x, x=x, y=x, settings=settings, stream=stream, n_steps=steps, objective=None, augment=None
    )


def test_calls_that_do_not_fit_are_the_clients_own() -> None:
    """Other branches of a method's code, an objective of its own, samples that are read, and a row between."""
    network, optimizer = Network(dense()), OptimizerSettings(lr=0.1, batch=10)
    thetas = starts(network)

    def work(own: Network, client: int) -> Tensor:
        x, y, stream = XS[client], YS[client], torch.Generator().manual_seed(client)
        if client == 1:  # a branch that nobody else takes
            return mean_gradient(own, thetas[client], x, y, functional.cross_entropy)[1]
        if client == 2:
            return descend(own, thetas[client], x, y, smoothed, optimizer, stream, objective=lambda b: 2 * b.loss)
        lazy = Lazy(lambda numbers: X[numbers], torch.arange(SIZES[0]), X[:0])
        return descend(own, thetas[client], x if client else lazy, y, functional.cross_entropy, optimizer, stream)

    alone, together, sizes = by_either(network, work)
    assert_equal(alone, together)
    assert sizes == [3]  # the last three; the others compute alone


def test_hooks_are_called() -> None:
    network, seen = Network(dense()), list[int]()
    thetas = starts(network)

    def work(own: Network, client: int) -> Tensor:
        hook = own.module.register_forward_hook(lambda *_: seen.append(client))
        try:
            return mean_gradient(own, thetas[client], XS[client], YS[client], functional.cross_entropy)[1]
        finally:
            hook.remove()

    alone, together, sizes = by_either(network, work)
    assert_equal(alone, together)
    assert (sorted(seen), sizes) == (sorted([*range(len(SIZES))] * 2), [])


def test_a_clients_own_function_fails_for_it_alone() -> None:
    network, optimizer = Network(dense()), OptimizerSettings(lr=0.1, batch=10)
    thetas = starts(network)

    def fails(_: Tensor) -> Tensor:
        raise OSError("no disk left")

    def work(own: Network, client: int) -> Tensor:
        x, y, stream = XS[client], YS[client], torch.Generator().manual_seed(client)
        how: dict[str, Any] = {1: {"correction": fails}, 2: {"each_step": fails}}.get(client, {})
        try:
            return descend(own, thetas[client], x, y, functional.cross_entropy, optimizer, stream, **how)
        except OSError:
            own.vector.zero_()
            own.differentiated = 0
            return torch.zeros_like(thetas[client])

    alone, together, sizes = by_either(network, work)
    assert_equal(alone, together)
    assert sizes == [len(SIZES)]


def test_what_the_optimiser_remembers_is_each_clients_own() -> None:
    network = Network(dense())
    thetas = starts(network)
    for settings in ({"momentum": 0.9}, {"kind": "adam", "lr": 0.01}):
        optimizer = OptimizerSettings(batch=10, **settings)  # type: ignore[arg-type]

        def work(own: Network, client: int, optimizer: OptimizerSettings = optimizer) -> Tensor:
            moments = {name: torch.full_like(thetas[client], float(client)) for name in optimizer.moments}
            stream = torch.Generator().manual_seed(client)
            args = (XS[client], YS[client], functional.cross_entropy, optimizer, stream)
            found = descend(own, thetas[client], *args, moments=moments)
            return torch.cat([found, *moments.values()])

        alone, together, _ = by_either(network, work)
        assert_equal(alone, together)


META = torch.device("meta")  # a device without numbers: to read one on the host, or to copy it there, raises


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_no_number_of_a_descent_is_read_on_the_host(name: str, how: str) -> None:
    """Of a client alone, and of several together."""
    network = Network(NETWORKS[name]()).on(META)
    optimizer = OptimizerSettings(**{"batch": 10, "join_last": network.has_batch_norm, **OPTIMIZERS[how]})
    stack = Stack(network, len(SIZES))

    def work(own: Network, client: int) -> Tensor:
        theta, x, y = network.vector.clone(), XS[client].to(META), YS[client].to(META)
        found = descend(own, theta, x, y, functional.cross_entropy, optimizer, torch.Generator().manual_seed(client))
        batch = Batch(own, functional.cross_entropy, x, y)
        return found + batch_gradient(theta, batch) + mean_gradient(own, theta, x, y, functional.cross_entropy)[1]

    works = [partial(work, own, client) for client, own in enumerate(stack.networks)]
    for found in [*run_together(stack, works), work(network, 0)]:
        assert found.device == META
        with pytest.raises(RuntimeError, match="meta"):
            found.sum().item()


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_a_client_alone_and_fetched_with_others(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more samples than fit one pass, and of none; by BatchNorm's buffers, whatever was computed before."""
    network, many, copies = Network(NETWORKS[name]()), X.repeat(3, 1, 1, 1), list[int]()
    thetas = starts(network)

    def work(own: Network, client: int) -> Tensor:
        x = X[:0] if client == 3 else XS[client] if client else many
        batch_gradient(thetas[client], Batch(own, functional.cross_entropy, XS[client], YS[client]))
        found, size = own.fetched([outputs(own, thetas[client], x), torch.tensor(float(len(x)))])
        assert size == len(x) == len(found)
        return found.flatten()

    def counted(tensors: Sequence[Tensor]) -> list[Tensor]:
        copies.append(len(tensors))
        return fetched(tensors)

    monkeypatch.setattr(stack_module, "fetched", counted)
    alone, together, sizes = by_either(network, work)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)
    assert sizes == [6, 3, 2]  # the gradients; outputs on either side of the client without samples
    assert copies == [2, 10]  # in one transfer, but for the client that had no outputs to wait for


def test_networks_that_cannot_be_stacked_say_why() -> None:
    def why(module: nn.Module, x: Tensor = X[:2]) -> str:
        return why_not(Network(module.double()), x, Y[:2], functional.cross_entropy)

    for make in NETWORKS.values():
        assert why(make()) == ""
    assert "random" in why(nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Dropout(0.5)))
    assert "PyTorch cannot vectorise it" in why(Last(nn.GRU(12, 4, batch_first=True)), X[:2, 0])
    assert "gradients differ" in why(Counting())


class Last(nn.Module):
    """The last outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.layer(x)[0][:, -1]
        return last


class Counting(nn.Module):
    """A network that does another thing each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(144, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.layer(x.flatten(1)) * self.calls
        return outputs


def test_dense_networks_are_known() -> None:
    assert is_dense(Network(dense()), 4)
    assert not is_dense(Network(small()), 4)
    assert not is_dense(Network(nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh())), 4)

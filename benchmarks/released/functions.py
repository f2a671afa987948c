"""Single functions of released code, called as they are: what they return, beside what their papers ask for."""

import copy
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.released.surroundings import (
    CLASSES,
    FEATURES,
    NAME,
    TASK,
    Net,
    arguments,
    initial_net,
    opened,
    prepared,
    seed_everything,
    write_split,
)
from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.training.optimizer import ServerOptimizer, server_change, server_moments

SEEDS = (0, 1, 2)
Lines = Iterator[str]
Samples = tuple[Tensor, Tensor]


class Base:
    """What stands for FL-bench's own client and server: nothing happens in it."""

    def set_parameters(self, package: object) -> None:
        pass


@contextmanager
def fl_bench(source: Path, module: str, changes: Sequence[tuple[str, str]] = (), **names: Any) -> Iterator[Any]:
    """Import one module of FL-bench, with stand-ins for the others of its modules."""
    modules: dict[str, Any] = {
        "src__client__fedavg": {"FedAvgClient": Base},
        "src__server__fedavg": {"FedAvgServer": Base},
        "src__utils__metrics": {"Metrics": None},
        "src__utils__models": {"DecoupledModel": nn.Module, "MODELS": None},
        "src__utils__constants": {"NUM_CLASSES": {"digits": CLASSES}},
        "src__utils__tools": {"vectorize": lambda tensors: torch.cat([tensor.flatten() for tensor in tensors])},
        "faiss": {"IndexFlatL2": Neighbours},
        "statsmodels__stats__correlation_tools": {"cov_nearest": nearest},
        "torchmin": {"minimize": minimised},
    }
    with opened(source, "src", {f"{module}.py": changes} if changes else {}, **modules):
        yield importlib.import_module("src." + module.replace("/", "."))


class Neighbours:
    """Exact search, as faiss.IndexFlatL2: squared distances and indices."""

    def __init__(self, dimension: int) -> None:
        self.kept = np.zeros((0, dimension))

    def add(self, rows: Any) -> None:
        self.kept = np.concatenate([self.kept, rows])

    def search(self, rows: Any, k: int) -> tuple[Any, Any]:
        squares = ((rows[:, None] - self.kept[None]) ** 2).sum(-1)
        indices = squares.argsort(axis=1, kind="stable")[:, :k]
        return np.take_along_axis(squares, indices, axis=1), indices


def nearest(covariance: Any, method: str) -> Any:
    """The nearest covariance to one that is positive definite: itself."""
    assert np.linalg.eigvalsh(covariance).min() > 0
    return covariance


def minimised(loss: Any, x0: Tensor, **_: object) -> Any:
    """L-BFGS by PyTorch, in place of torchmin."""
    x = x0.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(x)
        value.backward()
        return value

    optimizer.step(closure)
    return SimpleNamespace(x=x.detach())


@cache
def fedavg(seed: int) -> tuple[Net, list[Samples], list[Samples]]:
    """Train the task's network by our FedAvg. Return it, and the clients' training and test samples."""
    experiment = make_experiment({**TASK, "method": "fedavg", "seed": seed, "engine": "in-process"})
    run = Simulation(prepare(experiment, Objects()))
    run.start()
    for number in range(1, experiment.rounds + 1):
        run.round(number)
    net, data = Net(), prepared(seed).data
    ours = run.terms.network.state_dict(run.server.state["theta"]).values()
    net.load_state_dict(dict(zip(net.state_dict(), ours, strict=True)))
    sides = ([_samples(side(i)) for i in range(data.n_clients)] for side in (data.train, data.test))
    return net, *sides  # type: ignore[return-value]


def _samples(pair: tuple[Any, Tensor]) -> Samples:
    return pair[0], pair[1]


@torch.no_grad()
def features(net: Net, x: Tensor) -> Tensor:
    return functional.relu(net.fc1(x.flatten(1)))


def percent(hits: Sequence[Tensor]) -> str:
    return f"{100 * torch.cat(list(hits)).double().mean():.1f} %"


# --- FL-bench ---


def cfl(source: Path) -> Lines:
    """Clusters of eight clients in four groups of directions, over three rounds that split."""
    repair = (
        "client_clusters_new += [cluster_1, cluster_2]",
        "client_clusters_new += [np.asarray(indices)[cluster_1], np.asarray(indices)[cluster_2]]",
    )
    ways = [[1.0, 0.3, 0], [1, -0.3, 0], [-1, 0, 0.3], [-1, 0, -0.3]]  # two groups, of two groups each
    for label, changes in (("as released", ()), ("repaired: indices[cluster]", (repair,))):
        with fl_bench(source, "server/cfl", changes) as module:
            server = object.__new__(module.CFLServer)
            moved = {i: {"model_params_diff": {"w": -2 * torch.tensor(ways[i // 2])}} for i in range(8)}
            vars(server).update(
                trainer=SimpleNamespace(train=partial(dict, moved)), selected_clients=range(8), train_clients=range(8),
                clients_model_params_diff=[None] * 8, client_clusters=[list(range(8))], current_epoch=20,
                args=SimpleNamespace(cfl=server.get_hyperparams([])), public_model_param_names=["w"],
                clients_personal_model_params={i: {"w": torch.zeros(3)} for i in range(8)},
            )  # fmt: skip
            server.args.cfl.eps_1 = 5.0  # every cluster may split; the rule itself is not what is looked at
            for number in (1, 2):
                server.train_one_round()
                clusters = [[int(i) for i in cluster] for cluster in server.client_clusters]
                yield f"{label}, split {number}: {sorted(map(sorted, clusters))}"


def knn_per(source: Path) -> Lines:
    """The prediction of kNN-Per with one network, mixed as FL-bench does and as the paper does."""
    scores: dict[str, list[Tensor]] = {"the network alone": [], "kNN alone": [], "FL-bench": [], "the paper's mix": []}
    changed, samples = 0, 0
    of_all = [(net, *pair) for net, train, test in map(fedavg, SEEDS) for pair in zip(train, test, strict=True)]
    with fl_bench(source, "client/knnper") as module, torch.no_grad():
        args = SimpleNamespace(knnper=SimpleNamespace(capacity=500, weight=0.5, scale=1.0, k=5))
        for net, (x, y), (x_test, y_test) in of_all:
            client = object.__new__(module.kNNPerClient)
            client.args, client.device = args, "cpu"
            client.dataset = SimpleNamespace(classes=range(CLASSES))
            client.datastore = module.DataStore(args, FEATURES)
            client.datastore.build([features(net, x)], [y])
            knn, logits = client.get_knn_logits(features(net, x_test)), net(x_test)
            mixes = {
                "the network alone": logits,
                "kNN alone": knn,
                "FL-bench": 0.5 * knn + 0.5 * logits,
                "the paper's mix": 0.5 * knn + 0.5 * logits.softmax(1),
            }
            for name, mix in mixes.items():
                scores[name].append(mix.argmax(1) == y_test)
            changed += int((mixes["FL-bench"].argmax(1) != logits.argmax(1)).sum())
            samples += len(y_test)
        store = module.DataStore(SimpleNamespace(knnper=SimpleNamespace(capacity=50)), FEATURES)
        store.build([torch.zeros(10, FEATURES)] * 40, [torch.zeros(10)] * 40)
        kept = len(store.targets)
    yield "accuracy: " + ", ".join(f"{name} {percent(hits)}" for name, hits in scores.items())
    yield f"predictions of the network that the mix changes in FL-bench: {changed} of {samples}"
    yield f"samples kept of 400 in 40 batches, with a capacity of 50: {kept}"


def fedem(source: Path) -> Lines:
    """A mixture of three networks, each trained on a third of the clients, mixed as logits and as probabilities."""
    data, nets = prepared(0).data, []
    for k in range(3):
        own = [_samples(data.train(i)) for i in range(k, data.n_clients, 3)]
        net = trained(Net(), torch.cat([x for x, _ in own]), torch.cat([y for _, y in own]))
        net.base, net.classifier = net.fc1, net.fc
        nets.append(net)
    tests = [_samples(data.test(i)) for i in range(data.n_clients)]
    x, y = torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests])
    with fl_bench(source, "client/fedem") as module, torch.no_grad():
        for pi in ([1 / 3, 1 / 3, 1 / 3], [0.6, 0.3, 0.1]):
            model = module.EnsembleModel(nets, torch.tensor(pi))
            by_logits = model(x).argmax(1)
            each = torch.stack(model(x, aggregated=False), dim=-1).softmax(1)
            by_probabilities = (each * torch.tensor(pi)).sum(-1).argmax(1)
            accuracy = f"FL-bench {percent([by_logits == y])}, the paper's {percent([by_probabilities == y])}"
            differ = percent([by_logits != by_probabilities])
            yield f"π = {[round(p, 2) for p in pi]}: predictions that differ {differ}; accuracy: {accuracy}"


def trained(net: Net, x: Tensor, y: Tensor) -> Net:
    """Train a network for 20 epochs, on batches of ten."""
    seed_everything(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=TASK["lr"])
    for _ in range(20):
        for batch in torch.randperm(len(y)).split(10):
            optimizer.zero_grad()
            functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    return net


def pfedfda(source: Path) -> Lines:
    """pFedFDA's head before a test: which samples it is made from, and its covariance."""
    from_train = ("self.compute_features(self.testloader)", "self.compute_features(self.trainloader)")
    identity = "torch.eye(self.features_length, device=self.device)"
    small = (
        (f"+ self.args.pfedfda.eps\n                + {identity}", f"+ self.args.pfedfda.eps * {identity}"),
        (f"+ 1e-4\n                    + {identity}", f"+ 1e-4 * {identity}"),
    )
    versions = {
        "as released": (),
        "repaired: statistics of training samples": (from_train,),
        "repaired: and ε·I in place of I": (from_train, *small),
    }
    federations = [(*fedavg(seed), *global_statistics(seed)) for seed in SEEDS]
    for label, changes in versions.items():
        hits, variance = [], []
        with fl_bench(source, "client/pfedfda", changes) as module:
            for net, train, test, means, covariance in federations:
                for own, held_out in zip(train, test, strict=True):
                    client = _fda_client(module, net, own, held_out)
                    client.set_parameters(_fda_package(means, covariance))
                    with torch.no_grad():
                        hits.append(client.model.classifier(features(net, held_out[0])).argmax(1) == held_out[1])
                    variance.append(client.local_covariances.diagonal().mean())
        yield f"{label}: accuracy {percent(hits)}, mean variance of a feature {torch.stack(variance).mean():.3f}"
    with torch.no_grad():
        plain = [net(x).argmax(1) == y for net, _, test, *_ in federations for x, y in test]
    yield f"the network itself, FedAvg's: accuracy {percent(plain)}"


def global_statistics(seed: int) -> tuple[Tensor, Tensor]:
    """The class means and the covariance of all training samples' features."""
    net, train, _ = fedavg(seed)
    z, y = features(net, torch.cat([x for x, _ in train])), torch.cat([y for _, y in train])
    means = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    return means, torch.cov((z - means[y]).T) + 1e-4 * torch.eye(FEATURES)


def _fda_package(means: Tensor, covariance: Tensor) -> dict[str, Tensor]:
    """What the server sends: the statistics of all, and those that a client had before."""
    both = {"means": means, "covariances": covariance}
    sent = {f"{whose}_{what}": of for whose in ("global", "local", "adaptive") for what, of in both.items()}
    return {**sent, "means_beta": torch.ones(CLASSES), "covariances_beta": torch.tensor(0.5)}


def _fda_client(module: Any, net: Net, train: Samples, test: Samples) -> Any:
    """A client that is about to be tested."""
    client = object.__new__(module.pFedFDAClient)
    prior = train[1].bincount(minlength=CLASSES) / len(train[1]) + 1e-4
    settings = SimpleNamespace(eps=1e-4, single_beta=False, local_beta=False, num_cv_folds=2)
    vars(client).update(
        args=SimpleNamespace(pfedfda=settings, dataset=SimpleNamespace(name="digits")), device="cpu", testing=True,
        features_length=FEATURES, client_id=0, label_distributions=[prior / prior.sum()],
        trainloader=[train], testloader=[test],
        model=SimpleNamespace(
            eval=lambda: None, classifier=copy.deepcopy(net.fc), get_last_features=lambda x, detach: features(net, x)
        ),
    )  # fmt: skip
    return client


def fedopt(source: Path) -> Lines:
    """Five steps of the server's optimiser, in FL-bench and here, from one vector and along the same changes."""
    generator = torch.Generator().manual_seed(0)
    changes = torch.randn(5, 10, generator=generator)
    kinds: tuple[ServerOptimizer, ...] = ("adagrad", "yogi", "adam")
    with fl_bench(source, "server/fedopt") as module:
        defaults = module.FedOptServer.get_hyperparams([])
        for kind in kinds:
            theirs = {"w": torch.zeros(10)}
            ours, moments = torch.zeros(10), server_moments(torch.zeros(10), kind)
            optimizer = module.AdaptiveOptimizer(kind, theirs, beta1=0.9, beta2=0.99, lr=0.1, tau=1e-3)
            for change in changes:
                optimizer.step([{"w": -change}], torch.ones(1))
                step, moments = server_change(change, moments, kind, 0.1)
                ours = ours + step
            apart = float((theirs["w"] - ours).abs().max())
            yield f"{kind}, β₂ = 0.99: largest difference to ours after five steps {apart:.1e}"
        yield f"FL-bench's default of β₂ is {defaults.beta2}; the paper's and ours are 0.99"


def floco(source: Path) -> Lines:
    """The gradient that Floco+ adds for a personal weight p = 3 and a global one g = 1."""
    with fl_bench(source, "client/floco") as module:
        for lam in (1.0, 0.1):
            model = nn.Linear(1, 1, bias=False)
            nn.init.constant_(model.weight, 3.0)
            model.weight.grad = torch.zeros(1, 1)
            module._regularize_pers_model(model, {"weight": torch.ones(1, 1)}, lam)
            assert model.weight.grad is not None
            yield f"λ = {lam}: it adds {model.weight.grad.item():.2f}; λ (p − g) is {lam * 2:.2f}"


# --- PFLlib ---


@contextmanager
def pfllib(source: Path, flags: Sequence[str], changes: Mapping[str, Sequence[tuple[str, str]]]) -> Iterator[Any]:
    """Arguments for a client of PFLlib, with our split and a network of base and head."""
    with opened(source, "system", changes) as place, redirect_stdout(io.StringIO()):
        write_split(prepared(0).data, place.parent / "dataset" / NAME)
        args = arguments(place / "main.py", ["-data", NAME, "-lr", "0.1", "-nc", "20", *flags])
        net = initial_net(0)
        head, net.fc = net.fc, nn.Identity()
        args.model = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit(net, head)
        yield args


def client_of(args: Any, module: str, name: str) -> Any:
    maker = getattr(importlib.import_module(f"flcore.clients.{module}"), name)
    return maker(args, id=0, train_samples=0, test_samples=0, train_slow=False, send_slow=False)


def flat(parameters: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def pfl_da(source: Path) -> Lines:
    """Heads after an epoch with λ = 0, 1 and 100, from one start and on the same batches."""
    repair = {
        "flcore/clients/clientda.py": [
            ("p.data.view(-1) for p in self.model.head", "p.view(-1) for p in self.model.head")
        ]
    }
    for label, changes in (("as released", {}), ("repaired: without .data", repair)):
        heads = []
        for lam in ("0", "1", "100"):
            with pfllib(source, ["-lam", lam], changes) as args:
                client = client_of(args, "clientda", "clientDA")
                for p in client.global_head.parameters():
                    p.data.zero_()  # so that there is a distance to be regularised
                seed_everything(0)
                client.train()
                heads.append(flat(client.model.head.parameters()))
        apart = [f"{float((head - heads[0]).norm()):.4f}" for head in heads[1:]]
        yield f"{label}: distance to the head of λ = 0: {apart[0]} with λ = 1, {apart[1]} with λ = 100"


def fml(source: Path) -> Lines:
    """The local network's step on a batch, with and without what the global network's loss adds to it."""
    repair = {
        "flcore/clients/clientfml.py": [
            ("F.softmax(output_g, dim=1)", "F.softmax(output_g.detach(), dim=1)"),
            ("F.softmax(output, dim=1)", "F.softmax(output.detach(), dim=1)"),
        ]
    }
    for flags in (["-al", "0.5", "-bt", "0.5"], []):
        steps = []
        for changes in ({}, repair):
            with pfllib(source, ["-lbs", "30", *flags], changes) as args:
                client = client_of(args, "clientfml", "clientFML")
                for p in client.global_model.parameters():
                    p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                before = flat(client.model.parameters())
                seed_everything(0)
                client.train()
                steps.append(flat(client.model.parameters()) - before)
        with pfllib(source, flags, {}) as args:
            named = f"α = {args.alpha}, β = {args.beta}"
        share = float((steps[0] - steps[1]).norm() / steps[1].norm())
        yield f"{named}: the local network's step differs by {100 * share:.1f} % from its own loss's"


CHECKS: dict[str, tuple[str, Callable[[Path], Lines]]] = {  # by project
    "cfl": ("FL-bench", cfl),
    "knn-per": ("FL-bench", knn_per),
    "fedem": ("FL-bench", fedem),
    "pfedfda": ("FL-bench", pfedfda),
    "floco": ("FL-bench", floco),
    "fedopt": ("FL-bench", fedopt),
    "pfl-da": ("PFLlib", pfl_da),
    "fml": ("PFLlib", fml),
}

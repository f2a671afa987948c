"""Whole trainings by released code: PFLlib's way (PGFed's release is built on it), and pFedGraph's script."""

import copy
import importlib
import io
import runpy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.released.surroundings import (
    CLASSES,
    FEATURES,
    NAME,
    Changes,
    arguments,
    initial_net,
    opened,
    prepared,
    seed_everything,
    write_split,
)

Task = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """A release with these flags and changes."""

    label: str
    flags: Sequence[str] = ()
    changes: Changes = field(default_factory=dict)
    network: str = ""  # a class of the release's own models, in place of our network
    after: bool = False  # whether the changes put the last evaluation after the round's local training


@dataclass(frozen=True)
class PFLlib:
    """One of PFLlib's algorithms. By default the evaluation of a round comes before its local training."""

    algorithm: str
    server: str  # module:class
    split: bool = False  # whether main.py takes the network apart into base and head
    after: bool = False  # whether the last evaluation follows the round's local training
    scores: str = "rs_test_acc"
    fact: Callable[[Any], str] | None = None  # what is to be said of the server after the training

    def train(self, source: Path, seed: int, variant: Variant, task: Task) -> tuple[float, str]:
        """Train as main.py does. Return the last accuracy in %, by samples, and the fact."""
        rounds = task["rounds"] - (self.after or variant.after)
        flags = [
            *("-data", NAME, "-nc", str(task["clients"]), "-jr", "1.0", "-algo", self.algorithm, "-dev", "cpu"),
            *("-gr", str(rounds), "-eg", str(rounds), "-ls", str(task["epochs"])),
            *("-lr", str(task["lr"]), "-lbs", str(task["batch"])),
        ]
        with opened(source, "system", variant.changes) as place, redirect_stdout(io.StringIO()):
            write_split(prepared(seed).data, place.parent / "dataset" / NAME)
            args = arguments(place / "main.py", [*flags, *variant.flags])
            models = importlib.import_module("flcore.trainmodel.models")
            own = getattr(models, variant.network)(64, FEATURES, CLASSES) if variant.network else None
            args.model = initial_net(seed, own)
            if self.split:
                args.head = copy.deepcopy(args.model.fc)
                args.model.fc = nn.Identity()
                args.model = models.BaseHeadSplit(args.model, args.head)
            module, _, name = self.server.partition(":")
            server = getattr(importlib.import_module(module), name)(args, 0)
            if not hasattr(server, "avg_generalization_metrics"):  # FedAS calls it after its last round
                server.avg_generalization_metrics = lambda: None
            seed_everything(seed)
            server.train()
            return 100 * getattr(server, self.scores)[-1], self.fact(server) if self.fact else ""


@dataclass(frozen=True)
class PGFed:
    """PGFed's release. Evaluated are the clients' last models, after the last round; the mean is over clients."""

    def train(self, source: Path, seed: int, variant: Variant, task: Task) -> tuple[float, str]:
        rounds = task["rounds"]
        flags = [
            *("-data", NAME, "-nc", str(task["clients"]), "-jr", "1.0", "-dev", "cpu"),
            *("-gr", str(rounds), "-eg", str(rounds - 1), "-ls", str(task["epochs"])),
            *("-lr", str(task["lr"]), "-lbs", str(task["batch"])),
        ]
        with opened(source, "system", variant.changes) as place, redirect_stdout(io.StringIO()):
            write_split(prepared(seed).data, place.parent / "dataset" / NAME)
            args = arguments(place / "main.py", [*flags, *variant.flags])
            args.model = initial_net(seed)
            server = importlib.import_module("flcore.servers.serverpgfed").PGFed(args, seed)
            server.train()
            return 100 * server.rs_test_acc[-1], f"momentum of g̃: {server.momentum}"


@dataclass(frozen=True)
class PFedGraph:
    """pFedGraph's script. Its own parser and data loaders have other data in mind, and are replaced; so is .cuda()."""

    def train(self, source: Path, seed: int, variant: Variant, task: Task) -> tuple[float, str]:
        data, scores, vectors = prepared(seed).data, list[float](), list[Tensor]()
        args = SimpleNamespace(  # the defaults of its config.py, where the task says nothing
            dataset="cifar10", n_parties=task["clients"], comm_round=task["rounds"], init_seed=seed, optimizer="sgd",
            lr=task["lr"], reg=task["weight_decay"], sample_fraction=1.0, attack_ratio=0.0, alpha=0.8, lam=0.01,
            difference_measure="all", num_local_iterations=task["steps"],
        )  # fmt: skip
        for flag, value in zip(variant.flags[::2], variant.flags[1::2], strict=True):
            assert hasattr(args, flag.removeprefix("-"))
            setattr(args, flag.removeprefix("-"), float(value))

        def loaders(_: object) -> tuple[Any, ...]:
            clients = range(data.n_clients)
            each = [
                DataLoader(TensorDataset(*map(torch.as_tensor, data.train(i))), task["batch"], True, drop_last=True)
                for i in clients
            ]
            indices = {i: np.arange(len(data.train(i)[1])) for i in clients}
            return each, each, None, indices, None, [data.test(i) for i in clients]

        def accuracy(net: nn.Module, _: None, test: tuple[Tensor, Tensor]) -> tuple[float, float]:
            with torch.no_grad():
                scores.append((net(test[0]).argmax(1) == test[1]).sum().item())
                vectors.append(torch.cat([p.flatten() for p in net.parameters()]))
            return scores[-1] / len(test[1]), scores[-1] / len(test[1])

        modules: dict[str, dict[str, Any]] = {
            "pfedgraph_cosine": {"__path__": ["pfedgraph_cosine"]},
            "pfedgraph_cosine__config": {
                "get_args": lambda: (
                    args,
                    {"classes_size": CLASSES, "client_num": task["clients"], "comm_round": task["rounds"]},
                )
            },
            "test": {"compute_acc": lambda net, loader: 0.0, "compute_local_test_accuracy": accuracy},
            "model": {"simplecnn": lambda classes: initial_net(seed), "textcnn": None},
            "prepare_data": {"get_dataloader": loaders},
            "attack": {"manipulate_gradient": lambda *anything: None},
        }
        with (
            opened(source, "pytorch", variant.changes, **modules),
            patch.object(Tensor, "cuda", lambda self: self),
            patch.object(nn.Module, "cuda", lambda self: self),
            redirect_stdout(io.StringIO()),
        ):
            runpy.run_path("pfedgraph_cosine.py")
        last = range(len(scores) - 2 * task["clients"], len(scores), 2)  # before each client's last work; then after it
        accuracy_in_all = sum(scores[k + 1] for k in last) / sum(len(data.test(i)[1]) for i in range(data.n_clients))
        apart = statistics.mean(
            torch.rad2deg(torch.cosine_similarity(vectors[k], vectors[k + 1], dim=0).acos()).item() for k in last
        )
        return 100 * accuracy_in_all, f"local work ends {apart:.2f}° from the mix on average"

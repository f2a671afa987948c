"""What released code needs around it: a copy of its files in which named changes are made, packages that it imports and
does not need here, our split in its format, and our network under the names that it expects.

Nothing of a clone is changed: a run works on a copy, which is removed again.
"""

import ast
import importlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor import FedtailorError
from fedtailor.data import FederatedData
from fedtailor.engines.preparation import Objects, Prepared, prepare
from fedtailor.experiment import make_experiment

# The task of every training. Batches of ten, as PFLlib has them, and none that is incomplete.
TASK: dict[str, Any] = {
    "data": "digits", "clients": 20, "partition": "dirichlet:0.3", "min_samples": 30, "test": 0.25, "validation": 0.0,
    "model": "mlp:100", "rounds": 10, "epochs": 2, "lr": 0.1, "batch": 10, "drop_last": True,
}  # fmt: skip
CLASSES, FEATURES = 10, 100
NAME = "cifar10"  # of the data set: PGFed's release knows no others
# Packages that the files import and the runs do not need.
UNNEEDED = ("torchvision", "h5py", "ujson", "pkg_resources", "faiss", "omegaconf", "utils.dlg")

Changes = Mapping[str, Sequence[tuple[str, str]]]  # by file: texts, and what stands in their place


@cache
def prepared(seed: int) -> Prepared:
    """Partition the task's samples and make its network, as every run of ours does with this seed."""
    return prepare(make_experiment({**TASK, "method": "fedavg", "seed": seed}), Objects())


def write_split(data: FederatedData, directory: Path) -> None:
    """Write every client's samples as PFLlib reads them: train/CLIENT.npz and test/CLIENT.npz, each a dictionary."""
    for part, samples in (("train", data.train), ("test", data.test)):
        (directory / part).mkdir(parents=True)
        for client in range(data.n_clients):
            x, y = samples(client)
            assert isinstance(x, Tensor)
            pair = np.array({"x": x.numpy(), "y": y.numpy()}, dtype=object)
            np.savez(directory / part / f"{client}.npz", data=pair)


class Net(nn.Module):
    """Our network with the names that releases expect of theirs: its last layer is `fc`."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, features)
        self.fc = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(functional.relu(self.fc1(x.flatten(1))))
        return output


def initial_net(seed: int, net: nn.Module | None = None) -> nn.Module:
    """Make a network that begins where ours does."""
    net = net or Net()
    terms = prepared(seed).terms
    ours = terms.network.state_dict(terms.initial).values()
    net.load_state_dict(dict(zip(net.state_dict(), ours, strict=True)))
    return net


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def opened(source: Path, folder: str, changes: Changes, **modules: dict[str, Any]) -> Iterator[Path]:
    """Copy a folder of a clone, make the changes, and let its modules be imported. The copy is the working directory.

    `modules` take the place of modules by their names, with __ for dots.
    """
    if not (source / folder).is_dir():
        raise FedtailorError(f"There is no {folder} in {source}: give the directory of a clone as --source.")
    known, path, here = set(sys.modules), list(sys.path), Path.cwd()
    missing = _Missing()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / folder
        shutil.copytree(source / folder, place, ignore=shutil.ignore_patterns("__pycache__", ".git"))
        for file, texts in changes.items():
            _change(place / file, texts)
        try:
            os.chdir(place)
            sys.path.insert(0, str(place if folder != "src" else place.parent))
            sys.meta_path.append(missing)
            for name, attributes in modules.items():
                module = ModuleType(name.replace("__", "."))
                vars(module).update(attributes)
                sys.modules[module.__name__] = module
            importlib.invalidate_caches()
            yield place
        finally:
            os.chdir(here)
            sys.path[:] = path
            sys.meta_path.remove(missing)
            made = {name: sys.modules[name] for name in set(sys.modules) - known}
            for name in [name for name, module in made.items() if _is_ours(name, module, directory, modules)]:
                del sys.modules[name]


def _change(file: Path, texts: Sequence[tuple[str, str]]) -> None:
    content = file.read_text("utf-8")
    for before, after in texts:
        if before not in content:
            raise FedtailorError(
                f"{file.name} is of another version than this change was written for: {before.strip()!r} is not in it."
            )
        content = content.replace(before, after)
    file.write_text(content, "utf-8")


def _is_ours(name: str, module: ModuleType, directory: str, given: Mapping[str, object]) -> bool:
    """True for a module of the copy, and for what stands in for another."""
    if isinstance(module, MagicMock) or name.replace(".", "__") in given:
        return True
    places = [getattr(module, "__file__", None) or "", *map(str, getattr(module, "__path__", []))]
    return any(place.startswith(directory) for place in places)


class _Missing(MetaPathFinder, Loader):
    """Finds what nobody else has found of the packages that are not needed: objects that take any call."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        wanted = any(fullname == name or fullname.startswith(f"{name}.") for name in UNNEEDED)
        return ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        pass


def arguments(main: Path, given: Sequence[str]) -> Any:
    """Parse a command line with the parser of a release's main.py, of which nothing else is run."""
    tree = ast.parse(main.read_text("utf-8"))
    wanted = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Expr) and _about_parser(node)]
    names: dict[str, Any] = {}
    body = ast.Module([ast.Import([ast.alias("argparse")]), *wanted], type_ignores=[])
    exec(compile(ast.fix_missing_locations(body), str(main), "exec"), names)
    parsed = names["parser"].parse_args(list(given))
    parsed.device = "cpu"
    return parsed


def _about_parser(node: ast.Assign | ast.Expr) -> bool:
    """True for `parser = …` and `parser.add_argument(…)`."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "parser"
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "parser.add_argument"

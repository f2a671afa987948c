"""Comparisons and tunings of Python objects: recorded, and gone on with after a crash."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedtailor as ft
from fedtailor._common.imports import object_name
from fedtailor.server.records import RoundRecord
from tests.cli.calling import Call, call, done, refusal
from tests.helpers import numbers
from tests.kills.engine import in_a_process, killed_while_writing

__all__ = ["call"]


WIDTH = 8
SEED = 0


class Net(nn.Sequential):
    """A network of one's own, which an import finds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


class Other(Net):
    """Another one."""


class Halved(ft.Method):
    """FedAvg on halved models."""

    title = "Half FedAvg"

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": 0.5 * client.descend(message["theta"])}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def missed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).float().mean()


def clients() -> dict[str, tuple[Tensor, Tensor]]:
    """Clients whose names are not in the order of their letters."""
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: (torch.randn(30, 6, generator=generator), torch.randint(0, 3, (30,), generator=generator))
        for name in ("north", "east", "west")
    }


def frames() -> dict[str, pandas.DataFrame]:
    generator = torch.Generator().manual_seed(0)
    table = {name: torch.randn(30, generator=generator).tolist() for name in "abcdef"}
    return {name: pandas.DataFrame({**table, "ill": [0, 1, 2] * 10}) for name in ("north", "east")}


METHODS: list[str | type[ft.Method]] = ["local", Halved, "ditto"]
SMALL: dict[str, Any] = {"rounds": 3, "epochs": 1, "engine": "in-process", "participation": 2}
ASKED: dict[str, Any] = {"seeds": [0, 1], "model": Net, "loss": loss, "metrics": {"missed": missed}, **SMALL}


def compared(out: Path | None = None, **changes: Any) -> Any:
    return ft.compare(METHODS, **{"data": clients(), **ASKED, **changes}, out=out)


def files(out: Path) -> dict[str, bytes]:
    """All that a run's numbers are in: checkpoints, and every client's results."""
    kept = [*out.glob("runs/*/checkpoint/**/*.safetensors"), *out.glob("runs/*/clients.jsonl")]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}


def assert_alike(one: Path, other: Path) -> None:
    runs = sorted(path.name for path in (one / "runs").iterdir())
    assert runs == sorted(path.name for path in (other / "runs").iterdir())
    for name in runs:
        assert numbers(ft.load(one / "runs" / name).rounds) == numbers(ft.load(other / "runs" / name).rounds)
    assert files(one) == files(other)


def killed(when: str, round: int, work: Callable[[Any], object]) -> None:
    """Do this work in a process that is killed in this round of this run."""

    def die(title: str, record: RoundRecord) -> None:
        if (title, record.round) == (when, round):
            os.kill(os.getpid(), signal.SIGKILL)

    in_a_process(lambda: work(die), -signal.SIGKILL)


KINDS: dict[str, dict[str, Any]] = {
    "what an import finds": {},
    "a module": {"model": Net()},
    "functions without names": {
        "model": lambda: Net(),
        "loss": lambda outputs, targets: loss(outputs, targets),
        "metrics": {"missed": lambda outputs, targets: missed(outputs, targets)},
    },
    "tables": {"data": frames(), "label_column": "ill"},
    "a function that returns the data": {"data": clients},
    "a function without a name": {"data": lambda: clients()},
    "a data set": {"data": ft.load_data("digits"), "model": "mlp:8", "clients": 4},
    "lazy data": {"data": [ft.lazy(TensorDataset(*pair)) for pair in clients().values()]},
    "data that are partitioned": {"data": ft.federate(ft.load_data("digits"), clients=4), "model": "mlp:8"},
    "a partition": {
        "data": ft.load_data("digits"),
        "model": "mlp:8",
        "partition": lambda labels, clients, rng: labels % 3,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_killed_and_called_again_it_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    changes = {**KINDS[kind], "seeds": [0]}
    whole = compared(tmp_path / "whole", **changes)
    where = f"{object_name(Halved)}, seed 0"
    killed(where, 2, lambda die: compared(tmp_path / "here", on_round=die, **changes))
    assert not (tmp_path / "here/result.json").exists()
    begun = [path.name for path in (tmp_path / "here/runs").iterdir()]
    assert len(begun) == 2
    seen: list[tuple[str, int]] = []
    again = compared(tmp_path / "here", on_round=lambda title, record: seen.append((title, record.round)), **changes)
    assert seen == [(where, 2), (where, 3), *(("ditto, seed 0", round) for round in (1, 2, 3))]  # one is done again
    assert_alike(tmp_path / "here", tmp_path / "whole")
    values = [line.value for line in compared(**changes).lines]
    assert [line.value for line in again.lines] == [line.value for line in whole.lines] == values
    assert again.lines[1].results[0].predict(0).accuracy is not None  # with the objects that were given


@pytest.mark.parametrize("name", ["own-data", "comparison.toml", "runs.json"])
def test_killed_before_its_question_is_written_it_begins_anew(name: str, tmp_path: Path) -> None:
    whole = compared(tmp_path / "whole", seeds=[0])
    killed_while_writing(name, lambda: compared(tmp_path / "here", seeds=[0]))
    assert list((tmp_path / "here").glob(f"{name}*.tmp"))
    assert [line.value for line in compared(tmp_path / "here", seeds=[0]).lines] == [line.value for line in whole.lines]
    assert_alike(tmp_path / "here", tmp_path / "whole")


def test_a_file_of_data_does_not_make_a_directory_a_comparisons(tmp_path: Path) -> None:
    (tmp_path / "cmp").mkdir()
    (tmp_path / "cmp/own-data.npz").touch()
    with pytest.raises(ft.FedtailorError, match="cmp exists already and is not a comparison: choose another --out"):
        compared(tmp_path / "cmp")


def test_its_runs_go_on_by_themselves_where_the_data_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compared(Path("cmp"), seeds=[0])
    (file,) = Path("cmp").glob("own-data-*.npz")
    (run,) = Path("cmp/runs").glob("ditto-*")
    assert ft.load(run).experiment.data == file.name
    longer = ft.resume(run, rounds=4, model=Net, loss=loss, metrics={"missed": missed})
    direct = ft.run("ditto", data=clients(), **{**SMALL, "rounds": 4}, model=Net, loss=loss, metrics={"missed": missed})
    assert numbers(longer.rounds) == numbers(direct.rounds)
    Path("cmp").rename("moved")
    moved = Path("moved/runs") / run.name
    with pytest.raises(ft.FedtailorError, match=r"There is no file own-data-\w+\.npz, neither here nor in cmp"):
        ft.resume(moved, rounds=5, trust=True)
    assert len(ft.resume(moved, rounds=5, data_dir="moved", trust=True).rounds) == 5
    with pytest.raises(ft.FedtailorError, match=r"The run's data have a name .own-data-\w+\.npz.: leave data= out"):
        ft.resume(moved, rounds=6, data=clients(), trust=True)


def test_it_goes_on_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs have recorded where the data lay: in `cmp`, seen from there."""
    monkeypatch.chdir(tmp_path)
    killed("ditto, seed 0", 2, lambda die: compared(Path("cmp"), seeds=[0], on_round=die))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    table = compared(Path("../cmp"), seeds=[0])
    for line in table.lines:  # finished before, gone on with now
        assert line.results[0].predict("east").accuracy is not None


def test_nothing_is_written_before_all_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ft.FedtailorError, match=r"The model, the data .6. and the loss do not fit together"):
        compared(tmp_path / "cmp", model=lambda: nn.Linear(5, 3))
    assert not (tmp_path / "cmp").exists()


# --- what was changed ---

NAMES = r"where data is own-data-\w+\.npz and not own-data-\w+\.npz"
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "a sample": ({"data": {**clients(), "east": (torch.zeros(30, 6), torch.arange(30) % 3)}}, NAMES),
    "the name of a client": ({"data": dict(zip("abc", clients().values(), strict=True))}, NAMES),
    "the class of the model": ({"model": Other}, r"where model is \S+:Net and not \S+:Other"),
    "the loss": ({"loss": nn.functional.cross_entropy}, r"where loss is \S+:loss and not \S+:cross_entropy"),
    "a metric": ({"metrics": {"missed": loss}}, r"where evaluation.metrics.missed is \S+:missed and not \S+:loss"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_was_changed_is_named(change: str, tmp_path: Path) -> None:
    compared(tmp_path / "cmp", seeds=[0])
    before = files(tmp_path / "cmp")
    changes, said = CHANGED[change]
    with pytest.raises(ft.FedtailorError, match=f"is another comparison, {said}: choose another --out"):
        compared(tmp_path / "cmp", **{"seeds": [0, 1], **changes})
    assert files(tmp_path / "cmp") == before


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("model", [Net, Net(), lambda: Net()], ids=["a class", "a module", "a lambda"])
def test_another_network_of_the_same_name_is_refused(
    finished: bool, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are finished would stay as they are, beside others of another network."""
    if finished:
        compared(tmp_path / "cmp", seeds=[0], model=model)
    else:
        killed("local, seed 0", 2, lambda die: compared(tmp_path / "cmp", seeds=[0], model=model, on_round=die))
    before = files(tmp_path / "cmp")
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 9)
    for seeds in ([0], [0, 1]):
        with pytest.raises(ft.FedtailorError, match=r"The network is not the one of the run in .*local-seed0"):
            compared(tmp_path / "cmp", seeds=seeds, model=Net() if isinstance(model, nn.Module) else model)
    assert files(tmp_path / "cmp") == before


def test_a_function_that_returns_other_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (clients, f"{__name__}:clients"):
        monkeypatch.setattr(sys.modules[__name__], "SEED", 0)
        compared(tmp_path / "cmp", data=data, seeds=[0])
        monkeypatch.setattr(sys.modules[__name__], "SEED", 1)
        with pytest.raises(ft.FedtailorError, match=r"The data are not those of the run in .*local-seed0"):
            compared(tmp_path / "cmp", data=data, seeds=[0, 1])


# --- the command line ---


def test_the_command_goes_on_with_what_an_import_finds(call: Call) -> None:
    compared(Path("whole"))
    killed(f"{object_name(Halved)}, seed 1", 2, lambda die: compared(Path("here"), on_round=die))
    assert not Path("here/comparison.toml").read_text().startswith("#")
    text = done(call("compare", "here/comparison.toml", "--out", "here"))
    assert "3 clients of your own data, 3 rounds, seeds 0, 1" in text
    assert_alike(Path("here"), Path("whole"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": lambda: Net()}, "model 'object:<lambda>'"),
        ({"model": Net()}, "model 'object:Net'"),
        ({"loss": nn.CrossEntropyLoss()}, "loss 'object:CrossEntropyLoss'"),
        ({"metrics": {"missed": lambda outputs, targets: missed(outputs, targets)}}, "metric 'object:<lambda>'"),
        ({"data": [ft.lazy(TensorDataset(*pair)) for pair in clients().values()]}, "data 'object:list'"),
        ({"partition": lambda y, n, rng: y % 3}, "partition 'object:<lambda>'"),
    ],
    ids=["lambda", "module", "loss", "metric", "lazy data", "partition"],
)  # fmt: skip
def test_what_only_python_has_is_said_in_the_record_and_to_the_command(
    changes: dict[str, Any], named: str, call: Call
) -> None:
    killed("ditto, seed 0", 2, lambda die: compared(Path("cmp"), seeds=[0], on_round=die, **changes))
    kind, name = named.replace("'", "").split(" ")
    kind = "metric missed" if kind == "metric" else kind
    first = Path("cmp/comparison.toml").read_text().splitlines()[0]
    assert first == f"# Only the Python program of this can go on, by the same call: no import finds the {kind} {name}."
    assert refusal(call, "compare", "cmp/comparison.toml", "--out", "cmp") == (
        f"No import finds the {named}, which was an object in a Python program: go on there, by the same call."
    )
    (run,) = Path("cmp/runs").glob("ditto-*")
    assert "as a Python object" in refusal(call, "resume", run)
    assert done(call("show", "cmp")).endswith("Continue with: the same call in Python, as it names objects\n")
    assert compared(Path("cmp"), seeds=[0], **changes).failed == {}


def test_a_class_of_a_script_goes_on_in_the_script_alone(call: Call) -> None:
    """The script is killed by itself in the middle of the second run, and started again."""
    script = f"""
import os, signal, sys
import torch
import fedtailor as ft


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(6, 3))


class Mine(ft.Method):
    def train(self, client, message):
        return {{"theta": client.descend(message["theta"])}}


def die(title, record):
    if (title, record.round) == ("__main__:Mine, seed 0", 2) and sys.argv[1:] == ["die"]:
        os.kill(os.getpid(), signal.SIGKILL)


sys.path.append({str(Path.cwd())!r})
torch.manual_seed(0)
data = [(torch.randn(30, 6), torch.randint(0, 3, (30,))) for _ in range(3)]
asked = {{"data": data, "model": Net, "seeds": [0], "rounds": 3, "engine": "in-process", "out": "cmp"}}
table = ft.compare(["local", Mine], **asked, on_round=die)
print([line.value for line in table.lines], [line.label for line in table.lines])
print(table.lines[1].results[0].predict(1).accuracy is not None)
"""
    Path("study.py").write_text(script)
    dead = subprocess.run([sys.executable, "study.py", "die"], capture_output=True, text=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    said = refusal(call, "compare", "cmp/comparison.toml", "--out", "cmp")
    assert said.startswith("No import finds the method '__main__:Mine', which was an object in a Python program")
    first = Path("cmp/comparison.toml").read_text().splitlines()[0]
    assert "no import finds the model __main__:Net, the method __main__:Mine." in first
    Path("whole").mkdir()
    again, whole = (
        subprocess.run([sys.executable, Path("study.py").resolve()], cwd=place, capture_output=True, text=True)
        for place in (".", "whole")
    )
    assert again.stdout == whole.stdout != ""
    assert "'Mine'" in again.stdout
    assert_alike(Path("cmp"), Path("whole/cmp"))

"""The benchmarks stay alive: they run at a tiny size. What they measure is nobody's business here."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import costs, floor, memory
from benchmarks.measuring import Goal, Seconds


@pytest.mark.long
def test_the_whole_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the costs, which have their own test below."""
    monkeypatch.setattr("sys.argv", ["benchmarks", *set(bench.PARTS) - {"costs"}, "--tiny", "--repeat", "1"])
    bench.main()
    printed = capsys.readouterr().out
    verdicts = [line for line in printed.splitlines() if line.endswith(("  met", "  MISSED"))]
    assert len(verdicts) >= 14
    stacked = ("operators a step", "a round by the processor")  # are goals without a profile
    missed = [line for line in verdicts if line.endswith("MISSED") and not line.strip().startswith(stacked)]
    assert printed.count("Where the time goes:") == len(missed)
    monkeypatch.setattr("sys.argv", ["benchmarks", "flor"])
    with pytest.raises(SystemExit):
        bench.main()
    assert (
        "no part flor; there are floor, peers, costs, scale, million, memory, stack, start-up"
        in capsys.readouterr().err
    )


def test_goals() -> None:
    assert Goal("", 1.2, 1.3).met
    assert not Goal("", 1.4, 1.3).met
    assert Goal("", 4.2, 4, at_least=True).row() == ["", "≥ 4 ×", "4.20 ×", "met"]
    assert Goal("", 3.9, 4, at_least=True).row() == ["", "≥ 4 ×", "3.90 ×", "MISSED"]


@pytest.mark.parametrize("model", ["mlp", "lenet", "cnn"])
def test_the_plain_loop_does_the_same_work(model: str) -> None:
    """One full batch for each client: its order counts for nothing."""
    work = floor.Work("", model, floor.FASHION, batch=1000, samples=200, goal=0)
    run = floor.by_fedtailor(work, workers=1)
    network = run.terms.network
    loop = floor.PlainLoop(work, *floor.samples_of(run.data))
    loop.theta = network.state_dict(run.terms.initial)
    evaluated = loop.round()
    run.round(1)
    for name, tensor in network.state_dict(run.server.state["theta"]).items():
        torch.testing.assert_close(loop.theta[name], tensor)
    hits = sum(accuracy * len(y) for (_, accuracy), (_, y) in zip(evaluated, loop.held_out, strict=True) if len(y))
    ours = 0.0
    for client, results in run.loop.clients[0].results.items():
        for split, samples in (("test", run.data.test), ("validation", run.data.validation)):
            ours += (results[split].accuracy or 0.0) * len(samples(client)[1])
    assert hits == pytest.approx(ours)


def test_operations_are_counted() -> None:
    work = floor.Work("", "mlp", floor.FASHION, batch=10, samples=0, goal=0)
    first, second = 784 * 200, 200 * 10
    assert floor.operations(work, trained=0, evaluated=3) == 3 * 2 * (first + second)
    assert floor.operations(work, trained=3, evaluated=0) == 3 * 2 * (2 * first + 3 * second)


def test_costs(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    goals = costs.run(repeat=1, tiny=True)
    assert torch.get_num_threads() == threads
    assert len(goals) == 4
    assert all(goal.measured > 0 and goal.why is not None and "tottime" in goal.why() for goal in goals)
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in costs.all_methods())


@pytest.mark.parametrize(
    ("method", "settings", "forward", "backward", "head"),
    [
        ("fedavg", {}, 1, 1, 1),
        ("ditto", {}, 2, 2, 2),
        ("ifca", {"clusters": 3}, 4, 1, 4),
        ("pgfed-ce", {}, 2, 1, 2),
        ("pflego", {"inner_steps": 7}, 2, 1, 7),
        ("per-fedavg", {}, 2, 2, 2),
        ("per-fedavg", {"first_order": False}, 3, 4, 3),
    ],
)
def test_samples_are_counted(method: str, settings: dict[str, object], forward: int, backward: int, head: int) -> None:
    run = costs.started(
        method, "mlp:3", costs.images(2, 40), batch=2, parameters=settings
    )  # passes of few are filled up
    costs.next_round(run)
    assert costs.samples_seen(run) == (80 * forward, 80 * backward, 80 * head)


@pytest.mark.parametrize("method", ["fedacs", "fedamp", "pgfed", "fedfomo"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_server_without_clients(method: str, on_disk: bool, tmp_path: Path) -> None:
    server = costs.AtTheServer(method, clients=5, participants=2, parameters=7, directory=tmp_path if on_disk else None)
    assert all(part.wall < Seconds().wall for part in server.best(repeat=2))
    assert len(list(tmp_path.iterdir())) == (5 if on_disk and method in costs.KEPT else 0)  # a model of every client
    assert all(tensor.isfinite().all() for tensor in server.server.state.values())
    assert server.server.round == 3


def test_memory_of_uploads_that_are_held() -> None:
    """FedACS's server sees every client's own model; FedAvg's sees their mean alone."""
    case = memory.Case(participants=40, clients=40, model="mlp:100", rounds=1)
    few, mean, each = (memory.measured(replace(case, **of)) for of in ({"participants": 10}, {}, {"method": "fedacs"}))
    assert mean.upload == each.upload == pytest.approx(4 * (3073 * 100 + 101 * 10) / 2**20)
    assert each.growth >= 40 * each.upload
    assert mean.growth <= few.growth + 5 * mean.upload  # where 30 more took part

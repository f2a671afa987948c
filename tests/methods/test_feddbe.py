"""FedDBE against its slow reference, its limit cases, its errors, and what its memory is worth."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.methods.feddbe import FedDBE
from tests.helpers import digits
from tests.methods.parts import SMALL, normed, personal, server, state
from tests.methods.problems import EXACT, MOMENTUM, close, on_a_network, watched, who
from tests.reference.feddbe import SlowFedDBE

BODY, SIZE = 6 * 64 + 6, 6 * 64 + 6 + 6 * 10 + 10


def head(theta: Tensor, z: Tensor) -> Tensor:
    return z @ theta[BODY : BODY + 60].view(10, 6).T + theta[BODY + 60 : SIZE]


@pytest.mark.parametrize(("kappa", "mu"), [(20.0, 0.3), (5.0, 1.0), (0.0, 0.1)])
def test_follows_its_formulas(kappa: float, mu: float) -> None:
    method, log = watched(FedDBE, kappa=kappa, mu=mu)
    result, problem = on_a_network(method, rounds=6)
    problem.initial = problem.initial[:SIZE]  # without the memory
    samples = [result.data.client(client).train for client in range(6)]

    def features(client: int, theta: Tensor) -> Tensor:
        return (samples[client][0] @ theta[: BODY - 6].view(6, 64).T + theta[BODY - 6 : BODY]).relu()

    slow = SlowFedDBE(problem, features, head, [y for _, y in samples], kappa, mu, 0.2)
    theta = slow.run(who(result))
    assert len(slow.memory) > 3
    assert slow.consensus is not None
    close(server(result), torch.cat([theta, torch.zeros(6).double()]))
    close(server(result, "consensus"), slow.consensus)
    for at, mean in slow.means.items():
        close(log.up[at]["mean"], mean)
    for client in range(6):
        memory, z = slow.memory.get(client), features(client, theta)
        assert ("memory" in state(result, client)) == (memory is not None)
        if memory is not None:
            assert memory.abs().max() > 0.01
            close(state(result, client)["memory"], memory)
        shifted = z if memory is None else z + memory
        close(head(personal(result, client), z), head(theta, shifted))


@pytest.mark.parametrize("more", [{}, MOMENTUM, {"model": normed()}])
def test_the_first_round_is_fedavgs(more: dict[str, Any]) -> None:
    for rounds, same in ((1, True), (2, False)):
        mine, average = (ft.run(method, **{**SMALL, **more, "rounds": rounds}) for method in ("feddbe", "fedavg"))
        assert torch.equal(server(mine)[: len(server(average))], server(average)) == same
        if same:
            for client in range(5):
                assert torch.equal(personal(mine, client), server(mine))


def test_the_memory_never_leaves() -> None:
    method, log = watched(FedDBE)
    result = ft.run(method, **SMALL)
    place = result.simulation.server.layout.extra["memory"]
    assert any(state(result, client)["memory"].abs().max() > 0.01 for client in range(5) if state(result, client))
    for message in (*log.up.values(), *log.down.values()):
        assert message["theta"][place].shape == (16,)
        assert not message["theta"][place].any()


def test_means_come_nearer_to_the_common_one() -> None:
    away = []
    for kappa in (0.0, 50.0):
        method, log = watched(FedDBE, kappa=kappa, mu=1.0)
        result = ft.run(method, **{**SMALL, "rounds": 8, "participation": "all", "batch": "full"})
        away.append(sum(float((log.up[8, i]["mean"] - server(result, "consensus")).square().sum()) for i in range(5)))
    assert away[0] > 2 * away[1]  # measured: 4.7


def test_the_common_mean_is_that_of_the_first_round_with_replies() -> None:
    method, log = watched(FedDBE)
    result = ft.run(method, **{**SMALL, "participation": "independent:0.15", "rounds": 4, "seed": 9})
    begun = next(number for number, called in enumerate(who(result), 1) if called)
    assert begun > 1
    n = result.data.n_samples[who(result)[begun - 1]].float()
    means = torch.stack([log.up[begun, client]["mean"] for client in who(result)[begun - 1]])
    torch.testing.assert_close(server(result, "consensus"), (n[:, None] * means).sum(0) / n.sum())
    later = [number for number, called in enumerate(who(result), 1) if called][1:]
    assert later
    assert all(torch.equal(log.down[number, who(result)[number - 1][0]]["consensus"], server(result, "consensus"))
               for number in later)  # fmt: skip


def test_a_round_costs_the_model_and_two_rows_of_features() -> None:
    size = 64 * 16 + 16 + 16 * 10 + 10 + 16
    for number, record in enumerate(ft.run("feddbe", **{**SMALL, "participation": 3}).rounds, 1):
        assert record.bytes_up == 3 * 4 * (size + 16)
        assert record.bytes_down == 3 * 4 * (size + (0 if number == 1 else 16))


def test_other_targets_than_classes_will_do() -> None:
    data = [(x, (x.flatten(1)[:, 20:22] > 0.2).float()) for x, _ in digits([20, 30])]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2))
    for loss in ("mse", "bce"):
        how: dict[str, Any] = {"data": data, "model": model, "loss": loss, "rounds": 3, "engine": "in-process"}
        result = ft.run("feddbe", **how, on_failure="stop")
        assert state(result, 0)["memory"].abs().max() > 0


def test_a_network_that_is_one_linear_layer_shifts_its_inputs() -> None:
    result = ft.run("feddbe", data=digits([60, 60]), model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), **EXACT,
                    rounds=3)  # fmt: skip
    x, memory = result.data.client(0).train[0].flatten(1), state(result, 0)["memory"]
    W, b = server(result)[:640].view(10, 64), server(result)[640:650]
    close(x @ personal(result, 0)[:640].view(10, 64).T + personal(result, 0)[640:650], (x + memory) @ W.T + b)


@pytest.mark.parametrize(
    "settings", [{"head": 0}, {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))}]
)
def test_a_head_that_is_not_one_linear_layer_is_refused_before_the_first_round(settings: dict[str, Any]) -> None:
    with pytest.raises(ft.FedtailorError, match="FedDBE needs a head that is one linear layer with a bias"):
        ft.run("feddbe", **{**SMALL, **settings})


def test_memories_help_where_classes_are_few() -> None:
    settings: dict[str, Any] = {"data": "digits", "clients": 10, "partition": "classes:2", "model": "mlp:32"}
    settings |= {"max_train": 60, "rounds": 6, "epochs": 2, "engine": "in-process"}
    own, average = ft.run("feddbe", **settings).accuracy, ft.run("fedavg", **settings).accuracy
    assert own is not None
    assert average is not None
    assert own > average + 0.2

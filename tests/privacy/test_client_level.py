"""Privacy at client level: sensitivity, the noise, limit cases, engines, the budget, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Message
from fedtailor.methods import all_methods, find_method
from fedtailor.privacy.noise import Noise
from fedtailor.server.aggregation.private import CLIP, PrivateAggregator
from fedtailor.server.budget import check_private_means
from tests.helpers import digits, make_simulation, numbers
from tests.privacy.closed_forms import gaussian_epsilon

DIGITS: dict[str, Any] = {"data": "digits", "model": "mlp:16", "rounds": 3, "epochs": 1, "max_train": 40, "seed": 3}
DIGITS |= {"clients": 6}
PRIVATE = [name for name in all_methods() if not check_private_means(find_method(name, {}))]


def aggregated(
    method: str, uploads: Mapping[int, Message], privacy: str, noise: Noise | None = None
) -> tuple[dict[str, Tensor], Message, Any]:
    """The means of a round with these uploads, what the first client was sent, and the server."""
    simulation = make_simulation(method, **DIGITS)
    loop = simulation.loop
    loop.call(1)
    messages = loop._messages()
    total = PrivateAggregator(loop.method, loop.server, messages, Privacy.parse(privacy), noise or Noise(None))
    for client in messages:
        total.put(client, uploads.get(client))
    found = total.total()
    return {name: found[name] for name in loop.method.means}, messages[0], loop.server


def real_uploads(method: str) -> dict[int, Message]:
    """The uploads of all clients in round 1."""
    simulation = make_simulation(method, **DIGITS)
    simulation.loop.call(1)
    from fedtailor.messages import Train

    requests = [Train(1, client, message) for client, message in simulation.loop._messages().items()]
    return {reply.clients[0]: reply.upload for reply in simulation.transport.ask(requests)}


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "pflego", "fedper"])
def test_one_client_moves_the_mean_by_the_clip_at_most(method: str) -> None:
    """Measured on honest and adversarial uploads, with and without the client: at most C/M."""
    honest, silent = real_uploads(method), "client, clip=0.3, noise=1e-30"
    _, _, server = aggregated(method, honest, silent)
    for name, of in {"honest": 1.0, "huge": 1e9, "opposite": -1e6, "endless": 1e38}.items():
        hostile = {**honest, 2: {n: tensor * of for n, tensor in honest[2].items()}}
        with_it, *_ = aggregated(method, hostile, silent)
        without = {client: upload for client, upload in honest.items() if client != 2}
        moved = float((flat(with_it) - flat(aggregated(method, without, silent)[0])).norm())
        assert moved <= 0.3 / server.per_round * (1 + 1e-4), name
        assert name == "honest" or moved > 0.29 / server.per_round or name == "endless"


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "pflego"])
def test_the_private_mean_is_the_formula(method: str) -> None:
    """θ_sent + Σ clip(θ_i − θ_sent) / M, in double precision and with all uploads of a client as one vector."""
    uploads, clip = real_uploads(method), 0.2
    means, message, server = aggregated(method, uploads, f"client, clip={clip}, noise=1e-30")
    sent = {name: message[name].double() if name in message else 0.0 for name in means}
    expected = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in means.items()}
    lengths = []
    for upload in uploads.values():
        change = {name: upload[name].double() - sent[name] for name in means}
        lengths.append(sum(float((tensor**2).sum()) for tensor in change.values()) ** 0.5)
        for name, tensor in change.items():
            expected[name] += tensor * min(1.0, clip / lengths[-1])
    assert max(lengths) > clip  # something was clipped
    for name, mean in means.items():
        formula = sent[name] + expected[name] / len(uploads)
        assert torch.allclose(mean.double(), formula, atol=1e-6)
    assert server.per_round == len(uploads)


def test_the_noise_of_the_mean_has_the_wanted_deviation() -> None:
    """Nobody replied: what is left is noise, with σC/M in every entry, and none of it twice."""
    means, message, server = aggregated("fedavg", {}, "client, clip=0.5, noise=3.0")
    noise = (means["theta"] - message["theta"]).double().numpy()
    assert noise.std() == pytest.approx(3.0 * 0.5 / server.per_round, rel=0.05)
    assert abs(noise.mean()) < 5 * noise.std() / len(noise) ** 0.5
    again, *_ = aggregated("fedavg", {}, "client, clip=0.5, noise=3.0")
    assert not torch.equal(means["theta"], again["theta"])  # the system's generator


def test_the_shares_of_clients_add_up_to_the_noise() -> None:
    plain = ft.run("fedavg", **{**DIGITS, "rounds": 1}, privacy="client, clip=0.4, noise=1e-9, by=clients")
    noisy = ft.run("fedavg", **{**DIGITS, "rounds": 1}, privacy="client, clip=0.4, noise=2.0, by=clients")
    noise = (noisy.server_state["theta"] - plain.server_state["theta"]).double().numpy()
    assert noise.std() == pytest.approx(2.0 * 0.4 / 6, rel=0.05)  # six shares of σ²C²/6, divided by six clients


def test_clients_clip_and_noise_before_anything_leaves() -> None:
    simulation = make_simulation("fedavg", **DIGITS, privacy="client, clip=0.01, noise=1e-9, by=clients")
    simulation.loop.call(1)
    from fedtailor.messages import Train

    for client, message in simulation.loop._messages().items():
        (reply,) = simulation.transport.ask([Train(1, client, message)])
        assert float((reply.upload["theta"] - message["theta"]).norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_adaptive_clip_finds_the_median_norm() -> None:
    """Norms from 1 to 9: the clip goes from 0.1 to about 5, and stays there."""
    simulation = make_simulation("fedavg", **{**DIGITS, "clients": 9})
    loop, privacy = simulation.loop, Privacy.parse("client, clip=quantile:0.5, noise=0.01")
    loop.call(1)
    messages = loop._messages()
    direction = torch.nn.functional.normalize(torch.ones_like(loop.server.initial), dim=0)
    clips = []
    for number in range(150):
        total = PrivateAggregator(
            loop.method, loop.server, messages, privacy, Noise(torch.Generator().manual_seed(number))
        )
        for client, message in messages.items():
            total.put(client, {"theta": message["theta"] + (client + 1) * direction})
        total.total()
        clips.append(float(loop.server.state[CLIP]))
    assert clips[0] > 0.1
    assert 4.0 < np.mean(clips[-50:]) < 6.0


def test_adaptive_clipping_costs_no_more_than_the_noise_that_was_asked_for() -> None:
    """1/z² = 1/z_Δ² + 1/(2σ_b)²: the sum and the count together are as private as noise z."""
    simulation = make_simulation("fedavg", **DIGITS)
    loop = simulation.loop
    loop.call(1)
    total = PrivateAggregator(
        loop.method, loop.server, loop._messages(), Privacy.parse("client, clip=quantile:0.5, noise=0.8"), Noise(None)
    )
    assert total._deviation**-2 + (2 * total._count_noise) ** -2 == pytest.approx(0.8**-2)
    assert total._deviation > 0.8


@pytest.mark.parametrize("method", PRIVATE)
def test_without_noise_and_clip_it_is_the_method_with_equal_weights(method: str) -> None:
    """Clients with as many samples each, a clip that nothing reaches and next to no noise: the plain run."""
    data = digits([30] * 5, seed=1)
    common: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "mlp:8", "engine": "in-process", "dtype": "float64"}
    plain = ft.run(method, data=data, **common)
    private = ft.run(method, data=data, **common, privacy="client, clip=1e6, noise=1e-18")
    for client in range(5):
        assert torch.allclose(plain.personal_vector(client), private.personal_vector(client), atol=1e-9)


@pytest.mark.parametrize("privacy", ["client, clip=0.5, noise=0.5", "client, clip=quantile:0.5, noise=0.5",
                                     "client, clip=0.5, noise=0.5, by=clients"])  # fmt: skip
def test_same_bits_on_all_engines_and_after_resuming(privacy: str, tmp_path: Path) -> None:
    settings = {**DIGITS, "privacy": privacy, "participation": "0.5"}
    runs = [ft.run("apfl", **settings, engine=engine) for engine in ("in-process", "processes", "sites-in-memory")]
    ft.run("apfl", **{**settings, "rounds": 1}, engine="in-process", out=tmp_path / "run")
    runs.append(ft.resume(tmp_path / "run", rounds=3))
    for other in runs[1:]:
        assert {n: t.tolist() for n, t in other.server_state.items()} == {
            n: t.tolist() for n, t in runs[0].server_state.items()
        }
        assert [r["epsilon"] for r in numbers(other.rounds)] == [r["epsilon"] for r in numbers(runs[0].rounds)]
    assert runs[0].server_state["alpha"].unique().tolist() == [0.5]  # what is for the record alone never came


def test_a_round_without_participants_is_noise_too() -> None:
    """Otherwise an unchanged model would tell that nobody took part."""
    settings = {**DIGITS, "rounds": 4, "participation": "independent:0.01", "seed": 1}
    result = ft.run("fedavg", **settings, privacy="client, clip=0.5, noise=1.0")
    assert not any(record.participants for record in result.rounds)
    assert not torch.equal(result.server_state["theta"], result.simulation.terms.initial)


def test_epsilon_of_each_round_is_recorded_and_grows() -> None:
    result = ft.run("fedavg", **DIGITS, privacy="client, noise=5.0")
    spent = [record.epsilon for record in result.rounds]
    assert all(epsilon is not None for epsilon in spent)
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(gaussian_epsilon(5.0, 3, 1e-5), rel=2e-3)
    assert ft.run("local", **DIGITS, privacy="client, noise=5.0").rounds[-1].epsilon == 0.0  # nothing leaves
    assert ft.run("fedavg", **DIGITS).rounds[-1].epsilon is None


def test_clients_that_fail_leave_less_noise_behind() -> None:
    """Where clients share the noise, a round with fewer replies costs more."""
    from fedtailor.experiment.participation import Participation
    from fedtailor.server.budget import Budget, _Next

    def cost(by: str, failed: list[int]) -> float:
        budget = Budget(Privacy.parse(f"client, noise=2.0, by={by}"), Participation.parse("all"), 6)
        return budget.after([_Next(list(range(6)), failed)]).epsilon

    assert cost("clients", [1, 2, 3]) > cost("clients", []) == cost("server", []) == cost("server", [1, 2, 3])


def test_a_run_stops_before_it_exceeds_its_budget(tmp_path: Path) -> None:
    settings = {**DIGITS, "rounds": 10, "privacy": "client, noise=3.0"}
    full = ft.run("fedavg", **settings)
    limit = (full.rounds[3].epsilon + full.rounds[4].epsilon) / 2
    result = ft.run("fedavg", **settings, epsilon=limit, out=tmp_path / "run")
    assert len(result.rounds) == 4
    assert result.finished
    assert "stopped after round 4: one more would cost ε" in str(result.stopped)
    assert ft.load(tmp_path / "run").stopped == result.stopped
    assert len(ft.resume(tmp_path / "run", rounds=12).rounds) == 4
    assert [r.accuracy for r in result.rounds] == [r.accuracy for r in full.rounds[:4]]


def test_noise_is_found_for_the_rounds_of_the_experiment() -> None:
    result = ft.run("fedavg", **DIGITS, privacy="client", epsilon=8)
    assert 7.9 < result.rounds[-1].epsilon <= 8
    assert len(result.rounds) == 3
    assert result.simulation.terms.privacy.noise > 0.5


def test_an_infinite_budget_is_the_run_without_privacy() -> None:
    plain, infinite = ft.run("fedavg", **DIGITS), ft.run("fedavg", **DIGITS, privacy="client", epsilon="inf")
    assert torch.equal(plain.server_state["theta"], infinite.server_state["theta"])
    assert infinite.rounds[-1].epsilon is None


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("pgfed", {"privacy": "client, noise=1"}, "PGFed needs every client's own alpha, and noise hides a client"),
        ("ifca", {"privacy": "client, noise=1"}, "IFCA's clients upload the weights of their mean, member"),
        ("fedavg", {"privacy": "client"}, "Privacy needs noise"),
        ("fedavg", {"epsilon": 8}, "needs noise"),
        ("fedavg", {"privacy": "client, noise=1", "aggregation": "median"}, "is made for a mean"),
        ("fedavg", {"privacy": "client, noise=1, by=clients", "participation": "independent:0.5"}, "share the noise"),
        ("fedavg", {"privacy": "client, noise=0.5", "epsilon": 1}, "No round fits the budget"),
        ("fedavg", {"privacy": "client, noise=1", "model": "resnet"}, "use GroupNorm or LayerNorm"),
        ("fedavg", {"privacy": "clients, noise=1"}, "its level is 'clients', but must be client or sample"),
        ("fedavg", {"privacy": "client, noise=-1"}, "its noise is '-1', but must be above 0"),
        ("fedavg", {"privacy": "client, clip=quantile:2, noise=1"}, "a number above 0, or quantile:0.5"),
        ("fedavg", {"privacy": "client, nose=1"}, "it has no part 'nose'"),
        ("fedavg", {"privacy": "client, noise=1, by=clients, clip=quantile:0.5"}, "can the clip follow a quantile"),
        ("fedavg", {"privacy": "", "epsilon": 1}, "like client, clip=1.0"),
        ("fedavg", {"epsilon": "nan"}, "a number above 0, or inf"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_in_one_sentence(method: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedtailorError, match=" ") as caught:
        ft.run(method, **{**DIGITS, **settings})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_rounds_would_need_another_noise(tmp_path: Path) -> None:
    ft.run("fedavg", **DIGITS, privacy="client", epsilon=8, out=tmp_path / "run")
    with pytest.raises(FedtailorError, match="noise that was found for 3 rounds"):
        ft.resume(tmp_path / "run", rounds=5)


@pytest.mark.parametrize("method", ["pflego", "scaffold", "feddyn"])
def test_the_share_of_a_private_round_does_not_tell_who_replied(method: str) -> None:
    """These methods multiply by the share of those who replied: it is the expected one, whoever did."""
    simulation = make_simulation(method, **DIGITS, participation="0.5")
    loop, uploads = simulation.loop, real_uploads(method)
    loop.call(1)
    messages, noiseless = loop._messages(), Privacy.parse("client, clip=0.3, noise=1e-30")
    shares = set()
    for failed in (set(), {min(messages)}, set(messages)):
        total = PrivateAggregator(loop.method, loop.server, messages, noiseless, Noise(None))
        for client in messages:
            total.put(client, None if client in failed else uploads[client])
        made = total.total()
        shares |= {made.share(loop.server, "samples"), made.share(loop.server, "equal")}
    assert shares == {0.5}

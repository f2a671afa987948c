"""Uneven clients: the virtual clock, rules for the late, asynchronous rounds; against schedules made by hand."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.experiment.late import Late
from fedtailor.experiment.participation import Participation
from fedtailor.experiment.system import Machines, System
from fedtailor.messages import Train
from fedtailor.messages.letters import as_letter, as_request
from fedtailor.method import Total
from fedtailor.server.records import RoundRecord
from tests.helpers import Quadratic, assert_same, files, final, mean_output, numbers, run_quadratic, uneven_clients

SIZE = 4
VECTOR = SIZE * 8  # bytes
# The samples are 1, 2, 3, 1, 2. Down and up take 2 · 32 bytes / bandwidth, a step as many samples / speed.
SCHEDULE = """client,speed,bandwidth
0,1,64
1,1,32
2,3,64
3,0.1,inf
4,0.5,16
"""
SECONDS = [1 + 1, 2 + 2, 1 + 1, 10 + 0, 4 + 4]


@pytest.fixture
def machines(tmp_path: Path) -> str:
    (tmp_path / "machines.csv").write_text(SCHEDULE)
    return str(tmp_path / "machines.csv")


def quadratic(method: str | ft.Method = "fedavg", **settings: Any) -> ft.RunResult:
    data, _, _ = uneven_clients()
    return run_quadratic(method, data, SIZE, **{"rounds": 3, "on_failure": "stop", **settings})


def clocks(result: ft.RunResult) -> list[float | None]:
    return [record.clock for record in result.rounds]


# --- the clock ---


def test_a_round_takes_as_long_as_its_slowest_client(machines: str) -> None:
    result = quadratic(system=machines)
    assert clocks(result) == [10, 20, 30]
    assert numbers([without_clock(record) for record in result.rounds]) == numbers(quadratic().rounds)
    three = quadratic(system=machines, participation=3, rounds=6)
    slowest = [max(SECONDS[client] for client in record.participants) for record in three.rounds]
    assert len(set(slowest)) > 1
    assert clocks(three) == list(np.cumsum(slowest))


def without_clock(record: RoundRecord) -> RoundRecord:
    record.clock = None
    return record


def test_without_a_system_there_is_no_clock() -> None:
    plain = quadratic().rounds[0].plain()
    assert not {"clock", "late", "stale"} & plain.keys()


def test_a_method_that_computes_more_takes_longer() -> None:
    """Ditto trains two models where FedAvg trains one."""
    settings: dict[str, Any] = {"data": "digits", "clients": 3, "model": "mlp:4", "rounds": 2, "max_train": 30}
    one, two = (ft.run(name, system="speeds=10", engine="in-process", **settings) for name in ("fedavg", "ditto"))
    assert clocks(two) == [2 * clock for clock in clocks(one) if clock]


# --- rules for the late ---


def test_whoever_is_after_the_deadline_does_not_count(machines: str) -> None:
    result = quadratic(system=machines, late="deadline=5")
    assert clocks(result) == [5, 10, 15]
    assert [record.late for record in result.rounds] == [[3, 4]] * 3
    assert [record.failed for record in result.rounds] == [[]] * 3
    assert_same(final(result), final(of_clients([0, 1, 2])))
    assert clocks(quadratic(system=machines, late="deadline=50")) == [10, 20, 30]  # nobody is late: nobody waits
    exactly = quadratic(system=machines, late="deadline=8")
    assert [record.late for record in exactly.rounds] == [[3]] * 3
    assert clocks(exactly) == [8, 16, 24]


def of_clients(clients: list[int]) -> ft.RunResult:
    """The run of these clients alone."""
    data, _, _ = uneven_clients()
    return run_quadratic("fedavg", [data[client] for client in clients], SIZE, rounds=3)


def test_nobody_in_time_changes_nothing(machines: str) -> None:
    result = quadratic(system=machines, late="deadline=1")
    assert [record.late for record in result.rounds] == [[0, 1, 2, 3, 4]] * 3
    assert clocks(result) == [1, 2, 3]
    assert not result.server_state["theta"].any()


def test_the_first_replies_count(machines: str) -> None:
    """Clients 0 and 2 need two seconds, 1 needs four: of equals, the first by number."""
    result = quadratic(system=machines, late="first=3")
    assert clocks(result) == [4, 8, 12]
    assert [record.late for record in result.rounds] == [[3, 4]] * 3
    assert_same(final(result), final(of_clients([0, 1, 2])))
    assert [record.late for record in quadratic(system=machines, late="first=1").rounds] == [[1, 2, 3, 4]] * 3
    assert [record.late for record in quadratic(system=machines, late="first=2").rounds] == [[1, 3, 4]] * 3
    both = quadratic(system=machines, late="first=4, deadline=3")
    assert [record.late for record in both.rounds] == [[1, 3, 4]] * 3
    assert clocks(both) == [3, 6, 9]


def test_who_has_no_time_takes_fewer_steps(tmp_path: Path) -> None:
    """Three clients of 30 samples in batches of 10, two epochs: six steps, of which each has time for its own."""
    (tmp_path / "machines.csv").write_text("client,speed\n0,10\n1,6\n2,0.1\n")
    stream = torch.Generator().manual_seed(0)
    data = [(torch.randn(30, 3, generator=stream), torch.randint(2, (30,), generator=stream)) for _ in range(3)]
    settings: dict[str, Any] = {"data": data, "test": 0.0, "validation": 0.0, "evaluation": {"every": 0}}
    settings |= {"rounds": 1, "epochs": 2, "batch": 10, "model": "logistic", "engine": "in-process"}
    system = {"system": str(tmp_path / "machines.csv")}
    late = ft.run("fedavg", late="deadline=6, partial", **system, **settings)
    assert late.rounds[0].late == [2]
    assert late.rounds[0].clock == 6
    assert late.clients[0].bytes_up.keys() == {0, 1}
    of_two = {**settings, "data": data[:2]}
    steps = [ft.run("fedavg", **{**of_two, "steps": count}, late=None) for count in (6, 3)]
    vectors = [result.simulation.loop.server.state["theta"] for result in steps]
    assert not torch.equal(*vectors)
    alone = [
        ft.run("local", **{**settings, "data": data, "steps": count}).client_state(place)["theta"]
        for place, count in enumerate((6, 3))
    ]
    assert torch.allclose(late.server_state["theta"], (alone[0] + alone[1]) / 2, atol=1e-7)
    assert late.rounds[0].differentiated == 60 + 30 + 10  # client 2 began a step for which it had no time


# --- who is there ---


def test_a_client_that_goes_away_is_lost(tmp_path: Path) -> None:
    """Client 0 is there for 3 of every 10 seconds, and needs 2; client 1 for 1 of every 10, and needs 2."""
    (tmp_path / "machines.csv").write_text("client,speed,there\n0,0.5,0-3/10\n1,1,0-1/10\n2,3,\n3,1,\n4,2,0-4\n")
    result = quadratic(system=str(tmp_path / "machines.csv"), rounds=5)
    assert [record.participants for record in result.rounds] == [
        [0, 1, 2, 3, 4],  # at 0: client 0 until 2, 1 goes at 1, the others until 1
        [0, 2, 3, 4],  # at 2: client 0 has one second left, 4 is done at 3
        [2, 3, 4],  # at 3, until 4, when client 4 goes for ever
        [2, 3],
        [2, 3],
    ]
    assert [record.late for record in result.rounds] == [[1], [0], [], [], []]
    assert clocks(result) == [2, 3, 4, 5, 6]


def test_time_passes_until_somebody_is_there(tmp_path: Path) -> None:
    lines = "".join(f"{client},1,5-8\n" for client in range(5))
    (tmp_path / "machines.csv").write_text("client,speed,there\n" + lines)
    result = quadratic(system=str(tmp_path / "machines.csv"), rounds=9)
    assert clocks(result) == [8]
    assert result.rounds[0].stop == "no client is there any more"
    assert result.rounds[0].late == []


def test_presence_repeats() -> None:
    machines = System.parse("speeds=1, availability=0.25:100").machines(200, seed=3)
    there = np.array([machines.absence(float(time)) == 0 for time in range(0, 1000, 5)])
    assert there.mean(0) == pytest.approx(np.full(200, 0.25), abs=0.01)
    assert 0.2 < there.mean(1).min() < there.mean(1).max() < 0.35  # not all at once
    time = machines.absence(37.0)
    for client in np.flatnonzero(time)[:20]:
        assert machines.absence(37.0 + time[client] + 1e-6)[client] == 0
        assert machines.absence(37.0 + time[client] - 1e-6)[client] > 0
    here = int(np.flatnonzero(time == 0)[0])
    assert machines.absence(37.0 + machines.presence(here, 37.0) + 1e-6)[here] > 0
    assert machines.absence(37.0 + machines.presence(here, 37.0) - 1e-6)[here] == 0


def test_who_is_waited_for_is_there_when_the_time_has_come() -> None:
    """Sums of seconds are rounded; the clock would otherwise stand a hair before each coming for ever."""
    data, _, _ = uneven_clients()
    for seed in range(10):
        settings: dict[str, Any] = {"system": "speeds=1, availability=0.31:0.7", "seed": seed, "rounds": 60}
        result = run_quadratic("local", data, SIZE, **settings)
        assert all(record.participants for record in result.rounds)
        times = [record.clock or 0.0 for record in result.rounds]
        assert all(later > earlier for earlier, later in zip(times, times[2:], strict=False))


def test_machines_are_drawn_by_the_seed_and_those_of_the_first_clients_stay() -> None:
    system = System.parse("speeds=lognormal:0.5:200, bandwidth=uniform:10:30, availability=0.5")
    few, many = system.machines(10, seed=1), system.machines(5000, seed=1)
    for name in ("speed", "bandwidth", "start", "length", "period"):
        assert (getattr(few, name) == getattr(many, name)[:10]).all()
    assert np.median(many.speed) == pytest.approx(200, rel=0.05)
    assert np.log(many.speed).std() == pytest.approx(0.5, rel=0.05)
    assert 10 <= many.bandwidth.min() < 11
    assert 29 < many.bandwidth.max() <= 30
    assert (system.machines(10, seed=2).speed != few.speed).all()


def test_stragglers_are_so_many_times_slower() -> None:
    even, uneven = (System.parse(text).machines(50, 0) for text in ("speeds=8", "speeds=8, stragglers=0.1:10"))
    slow = np.flatnonzero(uneven.speed != even.speed)
    assert len(slow) == 5
    assert (uneven.speed[slow] == 0.8).all()


def test_participants_are_drawn_among_those_that_can_be_called() -> None:
    four = Participation.parse(4)
    assert four.draw(10, 3, 2, among=list(range(10))) == four.draw(10, 3, 2)
    some = four.draw(10, 3, 2, among=[1, 3, 5, 7, 9], busy=1)
    assert len(some) == 3
    assert {*some} <= {1, 3, 5, 7, 9}
    assert four.draw(10, 3, 2, among=[2, 8]) == [2, 8]
    assert four.draw(10, 3, 2, among=[2, 8], busy=4) == []
    assert Participation.parse("all").draw(10, 3, 2, among=[2, 8]) == [2, 8]
    chance = Participation.parse("independent:0.5")
    assert chance.draw(10, 3, 2, among=[2, 8]) == [client for client in chance.draw(10, 3, 2) if client in (2, 8)]


# --- asynchronous rounds ---


@pytest.mark.parametrize("staleness", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("buffer", [1, 2, 3, 5])
def test_buffered_rounds_are_those_of_a_slow_version(buffer: int, staleness: float, machines: str) -> None:
    """FedBuff on quadratics, event by event: who is done first, how old its change is, and where the server goes."""
    rounds = 12
    result = quadratic(system=machines, late=f"buffer={buffer}, staleness={staleness}", rounds=rounds)
    data, centres, curvatures = uneven_clients()
    samples = [len(y) for _, y in data]
    theta, now = torch.zeros(SIZE, dtype=torch.float64), 0.0
    at_work: dict[int, tuple[float, int, torch.Tensor]] = {}
    for version, record in enumerate(result.rounds):
        assert record.participants == [client for client in range(5) if client not in at_work]
        for client in record.participants:
            at_work[client] = now + SECONDS[client], version, theta
        done = sorted(at_work, key=lambda client: (at_work[client][0], client))[:buffer]
        now, old = max(at_work[client][0] for client in done), theta
        weights = {client: samples[client] / sum(samples[c] for c in done) for client in done}
        for client in done:
            _, begun, start = at_work.pop(client)
            change = -0.1 * curvatures[client] @ (start - centres[client])
            theta = theta + weights[client] * (1 + version - begun) ** -staleness * change
            assert record.stale.get(client, 0) == version - begun
        assert old is not theta
        assert record.clock == now
    assert torch.allclose(result.server_state["theta"], theta, rtol=1e-12, atol=1e-14)


class InPlace(ft.Method):
    """FedAvg that changes the server's model in place."""

    def train(self, client: ft.Client, message: ft.Message) -> ft.Message:
        return {"theta": client.descend(message["theta"])}

    def receive(self, server: ft.Server, total: Total) -> None:
        server.state["theta"].copy_(total["theta"])

    def start(self, server: ft.Server) -> None:
        server.state["theta"] = server.initial.clone()


def test_what_was_sent_stays_as_it_was(machines: str) -> None:
    settings: dict[str, Any] = {"system": machines, "late": "buffer=2", "rounds": 8}
    assert_same(final(quadratic(InPlace(), **settings)), final(quadratic("fedavg", **settings)))


def test_fairness_in_asynchronous_rounds(machines: str) -> None:
    """Weights by the loss go with old replies too; of all at once, it is the synchronous run."""
    fair: dict[str, Any] = {"system": machines, "fairness": "q:1", "rounds": 6}
    all_at_once = quadratic(late="buffer=5", **fair)
    assert_same(final(all_at_once), final(quadratic(**fair)))
    some = quadratic(late="buffer=2", **fair)
    assert any(record.stale for record in some.rounds)
    assert not some.server_state["theta"].equal(
        quadratic(**{**fair, "fairness": "none"}, late="buffer=2").server_state["theta"]
    )


def test_a_slow_client_goes_on_while_the_server_moves(machines: str) -> None:
    result = quadratic(system=machines, late="buffer=1", rounds=8)
    assert [record.clock for record in result.rounds] == [2, 2, 4, 4, 4, 6, 6, 8]
    assert all(3 not in record.participants for record in result.rounds[1:])


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "pflego"])
def test_real_data_on_all_engines_after_interruptions(name: str, tmp_path: Path) -> None:
    """Few clients at a time, availability, a checkpoint every third round: the same bits, and the same files."""
    settings: dict[str, Any] = {
        "data": "digits", "clients": 7, "model": "mlp:8", "participation": 4, "rounds": 8, "max_train": 40, "seed": 2,
        "checkpoint_every": 3, "keep_momentum": True, "momentum": 0.5,
        "system": "speeds=lognormal:1:100, bandwidth=1e4, stragglers=0.2:10, availability=0.7:20",
        "late": "buffer=2",
    }  # fmt: skip
    whole = ft.run(name, out=tmp_path / "whole", engine="in-process", **settings)
    assert any(record.stale for record in whole.rounds)
    assert any(record.late for record in whole.rounds)
    for number, other in enumerate(({"workers": 2}, {"engine": "sites-in-memory"}, {"states": "disk"}, {"stack": 1})):
        out = tmp_path / str(number)
        with pytest.raises(KeyboardInterrupt):
            ft.run(name, out=out, on_round=partial(interrupt, 2), **{**settings, **other})  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            ft.resume(out, on_round=partial(interrupt, 5))
        resumed = ft.resume(out)
        assert numbers(resumed.rounds) == numbers(whole.rounds)
        assert_same(final(resumed), final(whole))
        assert files(out / "checkpoint/server") == files(tmp_path / "whole/checkpoint/server")


def interrupt(after: int, record: RoundRecord) -> None:
    if record.round == after:
        raise KeyboardInterrupt


def test_a_run_goes_on_with_more_rounds(machines: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"system": machines, "late": "buffer=2"}
    longer = quadratic(rounds=9, **settings)
    data, _, _ = uneven_clients()
    run_quadratic("fedavg", data, SIZE, rounds=4, out=tmp_path / "run", **settings)
    resumed = ft.resume(tmp_path / "run", rounds=9, data=data, model=Quadratic(SIZE), loss=mean_output)
    assert numbers(resumed.rounds) == numbers(longer.rounds)


def test_a_run_keeps_its_machines(machines: str, tmp_path: Path) -> None:
    """A file that changes or goes away changes no run that has begun."""
    data, _, _ = uneven_clients()
    settings: dict[str, Any] = {"system": machines, "late": "first=3"}
    run_quadratic("fedavg", data, SIZE, rounds=2, out=tmp_path / "run", **settings)
    Path(machines).unlink()
    objects: dict[str, Any] = {"data": data, "model": Quadratic(SIZE), "loss": mean_output}
    assert clocks(ft.resume(tmp_path / "run", rounds=4, **objects)) == [4, 8, 12, 16]
    with pytest.raises(ft.FedtailorError, match=r"machines\.csv cannot be read: No such file"):
        run_quadratic("fedavg", data, SIZE, out=tmp_path / "other", **settings)
    assert not (tmp_path / "other").exists()


@pytest.mark.filterwarnings("ignore::fedtailor._common.errors.ClientFailure")
@pytest.mark.parametrize("hostile", ["sign-flip", "wrong-shape", "nan"])
def test_hostile_clients_in_asynchronous_rounds(hostile: str) -> None:
    settings: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:8", "rounds": 6, "max_train": 40}
    settings |= {"system": "speeds=lognormal:1:100", "late": "buffer=2", "attack": f"{hostile}, clients=1,4"}
    one, other = (ft.run("fedavg", engine=engine, workers=2, **settings) for engine in ("in-process", "processes"))
    assert numbers(one.rounds) == numbers(other.rounds)
    failed = {client for record in one.rounds for client in record.failed}
    assert failed == (set() if hostile == "sign-flip" else {1, 4})


# --- settings ---


def test_settings_are_read_and_written_alike() -> None:
    for text in ("speeds=5", "speeds=lognormal:0.5:3, bandwidth=1e6, stragglers=0.1:10, availability=0.5:60"):
        assert str(System.parse(str(System.parse(text)))) == text
    for text, written in (
        ("deadline=30", "deadline=30.0"),
        ("deadline=30, partial", "deadline=30.0, partial=True"),
        ("first=10", "first=10"),
        ("buffer=3, staleness=1", "buffer=3, staleness=1.0"),
    ):
        assert str(Late.parse(text)) == written
        assert Late.parse(written) == Late.parse(text)
    assert Late.parse({"deadline": 30, "partial": True}) == Late.parse("deadline=30, partial")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"late": "first=2"}, "nobody is late by itself: say how fast clients are, by --system"),
        ({"system": "speeds=0"}, "its speeds is '0', but must be 1000, lognormal"),
        ({"system": "speeds=-3"}, "its speeds is '-3'"),
        ({"system": "speeds=normal:1"}, "its speeds is 'normal:1'"),
        ({"system": "bandwidth=3"}, "it does not say 'speeds'"),
        ({"system": "speeds=1, stragglers=10:0.1"}, "its stragglers is '10:0.1', but must be SHARE:TIMES"),
        ({"system": "speeds=1, availability=2"}, "its availability is '2'"),
        ({"system": "speeds=1, speed=1"}, "it has no part 'speed', only speeds, bandwidth"),
        ({"system": "nowhere.csv"}, "nowhere.csv cannot be read: No such file"),
        ({"late": "deadline=0"}, "its deadline is '0', but must be above 0|greater than 0"),
        ({"late": "10"}, "it has no part '10'"),
        ({"late": "partial"}, "one of deadline, first and buffer"),
        ({"late": "buffer=2, first=1"}, "either buffer, or deadline and first"),
        ({"late": "first=2, partial"}, "partial with a deadline"),
        ({"late": "first=2, staleness=1"}, "staleness with buffer alone"),
        ({"late": "first=9", "system": "speeds=1"}, "The first 9 replies never come: 6 clients take part"),
        ({"late": "buffer=9", "system": "speeds=1"}, "A buffer of 9 replies is never full: 6 clients are at work"),
        ({"late": "buffer=2", "system": "speeds=1", "participation": "2-4"}, "the number at work is fixed"),
        ({"late": "buffer=2", "system": "speeds=1", "method": "pgfed"}, "PGFed needs every client's own .* same round"),
        ({"late": "first=2", "system": "speeds=1", "secure": True}, "In secure aggregation all of a round's clients"),
        ({"late": "first=2", "system": "speeds=1", "privacy": "client, clip=1, noise=1"}, "the accounting of privacy"),
        ({"system": "speeds=1, availability=0.5", "privacy": "client, clip=1, noise=1"}, "leave availability out"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    method = settings.pop("method", "fedavg")
    with pytest.raises(ft.FedtailorError, match=words):
        ft.run(method, data="digits", clients=6, rounds=1, **settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client\n0\n", "has no column 'speed'"),
        ("client,speed\n0,fast\n", "line 2: its speed is 'fast', but must be a number above 0"),
        ("client,speed\n0,\n", "line 2: its speed is ''"),
        ("client,speed,bandwidth\n0,1,-3\n", "line 2: its bandwidth is '-3'"),
        ("client,speed\n0,1\n", "has no line for the client 1"),
        ("client,speed,there\n0,1,always\n", "line 2: it is there 'always', but that must be like 0-3600"),
        ("client,speed,there\n0,1,5-3\n", "line 2: it is there '5-3'"),
        ("client,speed,there\n0,1,0-30/20\n", "line 2: it is there '0-30/20'"),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "machines.csv").write_text(text)
    with pytest.raises(ft.FedtailorError, match=words):
        Machines.of(str(tmp_path / "machines.csv"), ["0", "1"], 0)


def test_a_letter_says_how_many_steps() -> None:
    request = Train(3, 1, {}, 2, share=0.25)
    assert as_request(as_letter(request, "run", 0))[0] == request
    letter = as_letter(request, "run", 0)
    for share in (0, 1.5, -1, "all", True, None):
        with pytest.raises(ft.FedtailorError, match="no share of the steps"):
            as_request(type(letter)(letter.kind, {**letter.header, "share": share}))

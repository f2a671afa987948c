"""Who takes part: drawn in advance, from the seed and the round alone."""

import pytest

import fedtailor as ft
from fedtailor.experiment.participation import Participation
from fedtailor.training.streams import numpy_stream


def test_a_fixed_number_or_fraction() -> None:
    for text, count in (("all", 20), ("6", 6), ("0.25", 5), ("0.01", 1), ("1.0", 20), ("25%", 5), ("0.29", 5)):
        drawn = Participation.parse(text).draw(20, seed=0, round=3)
        assert len(set(drawn)) == count, text
        assert drawn == sorted(drawn)
    assert len(Participation.parse(0.29).draw(100, 0, 1)) == 29  # 28.999… in floating point


def test_the_papers_six_of_twenty_five() -> None:
    assert Participation.parse("25%").count(25) == 6


def test_each_client_by_chance_and_possibly_nobody() -> None:
    chance = Participation.parse("independent:0.2")
    draws = [chance.draw(10, seed=0, round=number) for number in range(1, 1001)]
    sizes = [len(draw) for draw in draws]
    assert 0 in sizes
    assert sum(sizes) / 1000 == pytest.approx(2.0, abs=0.15)
    assert len({tuple(draw) for draw in draws}) > 100


def test_the_chance_of_each_is_a_number_of_its_own() -> None:
    """One by one, from the same stream."""
    stream = numpy_stream(3, "participation", 5)
    expected = [client for client in range(1000) if stream.random() < 0.05]
    assert Participation.parse("independent:0.05").draw(1000, 3, 5) == expected


def test_the_draw_depends_on_seed_and_round_alone() -> None:
    some = Participation.parse(3)
    clients = 30
    assert some.draw(clients, 1, 5) == some.draw(clients, 1, 5)
    assert some.draw(clients, 1, 5) != some.draw(clients, 1, 6)
    assert some.draw(clients, 1, 5) != some.draw(clients, 2, 5)


def test_all_methods_see_the_same_participants() -> None:
    runs = [ft.run(method, clients=8, rounds=4, participation=0.3, workers=1) for method in ("local", "fedper")]
    one, other = ([record.participants for record in result.rounds] for result in runs)
    assert one == other


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "none", "independent:0", "independent:2", "0.0", "120%"])
def test_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ft.FedtailorError, match="participation"):
        ft.run("fedavg", participation=text)


def test_more_participants_than_clients_are_refused() -> None:
    with pytest.raises(ft.FedtailorError, match="30 clients cannot take part in a round: there are only 20"):
        ft.run("fedavg", participation=30)


@pytest.mark.parametrize("text", ["all", "6", "0.25", "independent:0.2"])
def test_what_is_written_down_reads_the_same(text: str) -> None:
    assert Participation.parse(str(Participation.parse(text))) == Participation.parse(text)


def test_a_range_draws_the_number_anew() -> None:
    participation = Participation.parse("4-28")
    assert str(participation) == "4-28"
    assert participation.mean(50) == 16
    counts = [len(participation.draw(50, 0, number)) for number in range(400)]
    assert (min(counts), max(counts)) == (4, 28)
    assert sum(counts) / len(counts) == pytest.approx(16, abs=1)
    with pytest.raises(ft.FedtailorError, match="28 clients cannot take part in a round: there are only 20"):
        participation.mean(20)
    with pytest.raises(ValueError, match="a range"):
        Participation.parse("28-4")

"""Nothing of a row's content leaves a site: a canary in every column, in errors and in log lines, is looked for in all
answers and in all files of the server."""

from pathlib import Path

import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.messages import Message, State
from fedtailor.method import Client, Method
from tests.sites.lies import NUMBER, TEXT, forms, with_canary
from tests.sites.parts import Federation, Recorded, heard, tables


def found(channel: Recorded, run: Path) -> list[str]:
    """The places where a canary is: in answers, or in files of the server."""
    places = {f"answer {n} of {site}": answer for n, (site, answer) in enumerate(channel.answers)}
    places |= {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return [place for place, content in places.items() if any(form in content for form in forms())]


@pytest.mark.parametrize("method", ["fedavg", "pgfed", "pflego", "fedacs"])
def test_no_cell_of_a_table_leaves(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, with_canary(), method=method)
    channel = Recorded(federation.sites())
    federation.run(channel)
    assert len(channel.answers) > 10
    assert found(channel, tmp_path / "run") == []


def test_a_canary_would_be_found(tmp_path: Path) -> None:
    federation = Federation(tmp_path, with_canary(), plan={"privacy": {"rare": 1}})
    channel = Recorded(federation.sites())
    federation.run(channel)
    assert found(channel, tmp_path / "run")


class Telling(Method):
    """A method whose error has the content of the samples in its text."""

    name = "telling"

    def train(self, client: Client, message: Message) -> State:
        raise ValueError(f"{TEXT}: {NUMBER}")


def test_no_text_of_an_error_leaves(tmp_path: Path) -> None:
    named = f"{Telling.__module__}:{Telling.__name__}"
    federation = Federation(tmp_path, method=named, site={"allow": [named]}, rounds=3)
    channel = Recorded(federation.sites())
    with heard() as said, pytest.raises(FedtailorError, match="its work failed: the site's own log says why") as caught:
        federation.run(channel)
    assert TEXT not in str(caught.value)
    assert not any(TEXT in text for text in said)
    assert found(channel, tmp_path / "run") == []
    assert TEXT in (tmp_path / "south" / "private" / "site.log").read_text()


@pytest.mark.parametrize("cell", [TEXT, f"{TEXT}\x00", f'"{TEXT}'])
def test_no_cell_that_cannot_be_read_leaves(cell: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, plan={"features": {"f0": "number", "f1": "number"}})
    path = tmp_path / "south" / "patients.csv"
    lines = path.read_text().splitlines()
    lines[5] = ",".join([cell, *lines[5].split(",")[1:]])
    path.write_text("\n".join(lines) + "\n")
    channel = Recorded(federation.sites())
    with pytest.raises(FedtailorError, match="south: its data do not fit the federation") as caught:
        federation.run(channel)
    assert TEXT not in str(caught.value)
    assert found(channel, tmp_path / "run") == []
    assert (tmp_path / "south" / "private" / "site.log").stat().st_size > 0


def test_the_checksum_of_equal_data_differs_from_site_to_site(tmp_path: Path) -> None:
    """It is salted: who guesses a site's rows cannot tell whether the guess is right."""
    one = tables()["south"]
    federation = Federation(tmp_path, {"north": one, "south": one})
    hellos = [site.hello for site in federation.sites().values()]
    assert hellos[0].data != hellos[1].data
    assert hellos[0].facts == hellos[1].facts
    assert [site.hello.data for site in federation.sites().values()] == [hello.data for hello in hellos]
    mode = (tmp_path / "north" / "private").stat().st_mode & 0o777
    assert mode == 0o700

"""Lines for a collector of logs: each is JSON, and none has the text of a fault."""

import json
from pathlib import Path

import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.cli.site_run import Teller
from fedtailor.sites.nvflare.client import FAULT, _said
from fedtailor.sites.site_file import read_site
from tests.sites.parts import Federation, Recorded, heard

SECRET = "Grace Hopper, 50 %"


def test_a_line_has_time_level_and_who(capsys: pytest.CaptureFixture[str]) -> None:
    tell = Teller(True, role="server", federation="heart")
    tell('Round 1 is "done".', round=1, seconds=0.5)
    line = json.loads(capsys.readouterr().out)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info", "role": "server", "federation": "heart", "message": 'Round 1 is "done".', "round": 1,
        "seconds": 0.5,
    }  # fmt: skip
    with pytest.raises(BaseException) as end, tell.refusals():  # noqa: PT011
        raise FedtailorError("No.")
    assert getattr(end.value, "exit_code", None) == 2
    assert json.loads(capsys.readouterr().out)["level"] == "error"


def test_no_text_of_a_fault_is_told_where_lines_are_collected(tmp_path: Path) -> None:
    """Every line that a site writes down, in a run with faults of one line and of many."""
    federation = Federation(tmp_path, method="fedavg", rounds=4)
    sites = federation.sites()

    def change(site: str, kind: str, round: int, answer: bytes) -> bytes:
        if (site, kind) == ("west", "train") and round in (1, 2):
            _, answering = next(iter(sites["west"]._runs.values()))
            handle = answering.sites.handle

            def broken(request: object) -> None:
                answering.sites.handle = handle
                if round == 1:
                    raise FedtailorError(f"A cell has {SECRET}.")
                raise ValueError(f"A cell has\nRound 1 is done.\n{SECRET}")

            answering.sites.handle = broken  # type: ignore[assignment]
        return answer

    with heard():
        federation.run(Recorded(sites, change))
    lines = (read_site(tmp_path / "west" / "site.toml").private / "site.log").read_text().splitlines()
    assert sum(SECRET in line for line in lines) >= 2
    told = [said for line in lines if (said := _said(line, plain=True))]
    assert not [line for line in told if SECRET in line]
    assert told.count(FAULT) == 2
    assert [line for line in told if line.endswith("is done.")] == [
        f"Round {number} is done." for number in range(1, 5)
    ]
    assert told[0].startswith("Joined the run trial-")
    assert told[-1].startswith("Wrote the model of round 4: ")
    assert next(_said(line, plain=False) for line in lines if SECRET in line).endswith(f"A cell has {SECRET}.")

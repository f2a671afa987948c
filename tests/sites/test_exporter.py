"""Numbers for Prometheus: those of the records, on loopback alone, and nothing of a row."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fedtailor._common.errors import FedtailorError
from fedtailor.sites.exporter import Metric, exported, of_run, of_site, written
from fedtailor.sites.site_file import read_site
from fedtailor.sites.tally import FILE, read_tally
from tests.cli.calling import Call, refusal
from tests.sites.parts import Federation, Recorded, heard, tables

LINE = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
CANARY = "8675309.25"
Numbers = dict[tuple[str, ...], float]


def read(text: str) -> Numbers:
    """Read Prometheus's text format: a name and the values of its labels, and the value."""
    found: Numbers = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            labels = re.findall(r'\w+="((?:[^"\\]|\\.)*)"', match["labels"] or "")
            assert f"# TYPE {match['name']} " in text
            found[(match["name"].removeprefix("fedtailor_"), *labels)] = float(match["value"])
    return found


def scrape(port: int, path: str = "/metrics") -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, Recorded]:
    """A private run of 4 rounds: south is silent in the second, and west's data are away in the third."""
    data = tables()
    data["north"].loc[:, "f2"] = float(CANARY)
    data["north"].loc[1:, "f2"] += 1.0
    privacy = {"privacy": "client, noise=2, clip=1, by=clients, delta=1e-3"}
    federation = Federation(tmp_path_factory.mktemp("run"), data, "fedavg", rounds=4, **privacy)
    sites = federation.sites()

    def change(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        if (site, kind, round) == ("south", "train", 2):
            return "it did not answer within 20 s"
        if (site, kind, round) == ("west", "train", 2):  # what is asked next fails there
            _, answering = next(iter(sites["west"]._runs.values()))
            handle = answering.sites.handle

            def broken(request: Any) -> Any:
                answering.sites.handle = handle
                raise FedtailorError(f"A cell has the value {CANARY}.")

            answering.sites.handle = broken
        return answer

    channel = Recorded(sites, change)
    with heard():
        federation.run(channel)
    return federation, channel


def server_numbers(federation: Federation) -> str:
    with exported(0, lambda: of_run(federation.root / "run", federation.plan, {"server": 1.5e9})) as port:
        return scrape(port)


def test_the_server_shows_what_its_records_say(run: tuple[Federation, Recorded]) -> None:
    federation, _ = run
    found = read(server_numbers(federation))
    records = [json.loads(line) for line in (federation.root / "run" / "rounds.jsonl").read_text().splitlines()]
    assert found["server_rounds_total",] == found["server_rounds_planned",] == len(records) == 4
    assert found["server_round_seconds_total",] == pytest.approx(sum(record["seconds"] for record in records))
    for way in ("down", "up"):
        assert found["server_bytes_total", way] == sum(record[f"bytes_{way}"] for record in records) > 0
    assert found["server_epsilon",] == records[-1]["epsilon"] > 0
    assert found["server_faults_total", "south", "silent"] == 1
    assert found["server_faults_total", "west", "work"] == 1
    for number, site in enumerate(federation.data):
        failed = sum(number in record["failed"] for record in records)
        assert found["server_failed_rounds_total", site] == failed == (site == "south")
        assert found["server_site_present", site] == 1
        assert found["server_site_last_contact_timestamp_seconds", site] == pytest.approx(
            (federation.root / "run" / "status.json").stat().st_mtime, abs=60
        )
    assert found["certificate_end_timestamp_seconds", "server"] == 1.5e9


def test_a_site_shows_its_own_work(run: tuple[Federation, Recorded]) -> None:
    federation, channel = run
    for name in federation.data:
        file = read_site(federation.root / name / "site.toml")
        with exported(0, lambda: of_site(file, federation.plan, {})) as port:  # noqa: B023
            found = read(scrape(port))
        letters, answers = (
            [content for site, content in of if site == name] for of in (channel.letters, channel.answers)
        )
        assert found["site_bytes_total", "in"] == sum(map(len, letters))
        assert found["site_bytes_total", "out"] == sum(map(len, answers))
        assert found["site_trainings_total",] == 4
        assert found["site_work_seconds_total",] > 0
        assert found["site_epsilon",] > 0
        assert found.get(("site_faults_total", "work"), 0) == (name == "west")


def test_nothing_of_a_row_is_shown(run: tuple[Federation, Recorded]) -> None:
    federation, _ = run
    assert CANARY in (federation.root / "west" / "private" / "site.log").read_text()
    file = read_site(federation.root / "west" / "site.toml")
    rows = (federation.root / "west" / "patients.csv").read_text().splitlines()[1:]
    cells = {cell for row in rows for cell in row.split(",") if len(cell) > 3 and cell != "well"}
    assert len(cells) > 100
    tally = (federation.root / "west" / "private" / FILE).read_text()
    for text in (server_numbers(federation), written(of_site(file, federation.plan, {})), tally):
        assert "8675309" not in text
        assert not [cell for cell in cells if cell in text]


def test_counts_go_on_after_a_stop(run: tuple[Federation, Recorded], tmp_path: Path) -> None:
    from fedtailor.sites.coordinator import STATUS, Status

    federation, _ = run
    (tmp_path / STATUS).write_bytes((federation.root / "run" / STATUS).read_bytes())
    status = Status(tmp_path, federation.plan.sites)
    status.answered("south", "gone")
    status.phase("round", 5)
    assert json.loads((tmp_path / STATUS).read_text())["faults"]["south"] == {"silent": 2}
    (tmp_path / STATUS).write_text('{"seen": 3}')
    Status(tmp_path, federation.plan.sites).phase("round", 1)
    assert json.loads((tmp_path / STATUS).read_text())["faults"] == {}


def test_a_damaged_tally_begins_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"rounds": "many"}')
    assert read_tally(tmp_path) == read_tally(tmp_path / "nowhere")


def test_only_metrics_are_answered_and_only_on_loopback() -> None:
    with exported(0, lambda: [Metric("a_b", "gauge", "A number.", [({}, 1.5)])]) as port:
        assert scrape(port) == "# HELP a_b A number.\n# TYPE a_b gauge\na_b 1.5\n"
        with pytest.raises(HTTPError, match="404"):
            scrape(port, "/../etc/passwd")
        listening = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{port:04X} 00000000:0000 0A" in listening
        assert f"00000000:{port:04X} 00000000:0000 0A" not in listening
        with pytest.raises(FedtailorError, match="in use"), exported(port, list):
            pass
    with suppress(OSError):
        scrape(port)
        raise AssertionError("it still answers")


def test_a_file_that_cannot_be_read_is_no_metric() -> None:
    def broken() -> list[Metric]:
        raise FedtailorError(f"It has {CANARY}.")

    with exported(0, broken) as port, pytest.raises(HTTPError) as refused:
        scrape(port)
    assert refused.value.code == 503
    assert refused.value.read() == b"Not now: FedtailorError.\n"


def test_labels_are_escaped_and_numbers_as_prometheus_wants_them() -> None:
    text = written([Metric("a", "counter", "x", [({"b": 'say "\\\n"'}, 3), ({"b": "c"}, float("inf"))])])
    assert text.splitlines()[2:] == ['a{b="say \\"\\\\\\n\\""} 3', 'a{b="c"} +Inf']


def test_the_dashboard_shows_metrics_that_there_are(run: tuple[Federation, Recorded]) -> None:
    federation, _ = run
    file = read_site(federation.root / "west" / "site.toml")
    text = server_numbers(federation) + written(of_site(file, federation.plan, {"west": 1.0}))
    shown = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    named = {name for expression in shown for name in re.findall(r"fedtailor_\w+", expression)}
    kept = {name for name in re.findall(r"# TYPE (\w+)", text) if not name.endswith("_info")}
    assert named == kept - {"fedtailor_site_last_contact_timestamp_seconds"}


def test_a_status_without_a_run(call: Call, tmp_path: Path) -> None:
    Federation(tmp_path / "f")
    said = refusal(call, "deploy", "status", "f/federation.toml", "--watch")
    assert said == "There is no run in f/runs/trial yet: start it with `fedtailor deploy run f/federation.toml`."


def test_a_status_says_when_a_site_was_heard_of(run: tuple[Federation, Recorded], call: Call) -> None:
    federation, _ = run
    for words in ((), ("--watch",)):  # not at a terminal: once
        plan, out = federation.root / "federation.toml", federation.root / "run"
        said = call("deploy", "status", plan, "--out", out, *words)
        assert said.code == 0
        assert "Phase: done, round 4 of 4" in said.out
        assert re.search(r"  south: present, \d+(\.\d+)? \w+ ago", said.out)

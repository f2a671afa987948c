"""What a hospital that comes later gets: enough to adapt to the bit, and nothing that the others declared."""

import json
import re
from pathlib import Path

import pytest

from fedtailor.data.agreement import read_agreement
from tests.cli.calling import Call, done, refusal
from tests.helpers import same_tensors
from tests.sites.parts import NAMES, Federation, heard, table


@pytest.mark.parametrize("method", ["ditto", "pgfed", "fedper", "fedamp", "scaffold"])
def test_adapting_to_what_is_handed_over_is_adapting_to_the_run(method: str, tmp_path: Path, call: Call) -> None:
    federation = Federation(tmp_path / "f", method=method)
    with heard():
        federation.run()
    run = federation.root / "run"
    table(9, rows=60).to_csv("new.csv", index=False)
    said = done(call("deploy", "share", run, "--to", "handed"))
    assert said.startswith("The model of round 3 is in handed")
    for source, to in ((run, "whole"), ("handed", "handed-over")):
        done(call("adapt", source, "--data", "new.csv", "--label-column", "label", "--epochs", "2", "--to", to))
    one, other = (json.loads(Path(to, "adapt.json").read_text()) for to in ("whole", "handed-over"))
    assert one["adapted"] == other["adapted"]
    assert one["local"] == other["local"]
    (file,) = Path("whole").glob("*.safetensors")
    assert same_tensors(file, Path("handed-over") / file.name)


def words_of(directory: Path) -> set[str]:
    """All words and numbers in the text files of a directory."""
    files = [path for path in directory.rglob("*.*") if path.suffix in (".json", ".jsonl", ".toml")]
    return {word for path in files for word in re.findall(r"-?[\w.]+", path.read_text())}


@pytest.mark.parametrize("experiment", [{}, {"class_weights": "balanced"}], ids=["plain", "weighted"])
def test_nothing_of_a_site_is_in_it(experiment: dict[str, str], tmp_path: Path, call: Call) -> None:
    federation = Federation(tmp_path / "f", method="pgfed", **experiment)
    federation.run()
    run, handed = federation.root / "run", Path("handed")
    done(call("deploy", "share", run, "--to", handed))
    agreement = read_agreement(run)
    assert agreement is not None
    declared = {str(number) for hello in agreement.declared for number in (hello.train, hello.test)}
    declared |= {repr(fact.mean) for hello in agreement.declared for fact in hello.facts or () if fact.mean}
    declared |= {hello.data for hello in agreement.declared}
    records = [json.loads(line) for line in (run / "clients.jsonl").read_text().splitlines()]
    declared |= {repr(measured["test"]["loss"]) for each in records for measured in each["results"].values()}
    assert len(declared) > 3 * len(NAMES) * 2
    assert len(declared & words_of(run)) > len(declared) / 2  # they would be found
    assert not declared & words_of(handed)
    assert sorted(path.name for path in (handed / "checkpoint").iterdir() if path.is_file()) == [
        *("manifest.json", "server-round-3.safetensors")
    ]
    table(9, rows=60).to_csv("new.csv", index=False)
    done(call("adapt", handed, "--data", "new.csv", "--label-column", "label", "--epochs", "1", "--to", "models"))


def test_refusals(tmp_path: Path, call: Call) -> None:
    done(call("run", "fedavg", "--data", "digits", "--clients", "3", "--rounds", "1", "--out", "simulated", "--quiet"))
    assert "is the run of a simulation" in refusal(call, "deploy", "share", "simulated", "--to", "handed")

"""A federation's run directory in all that shows runs: who was silent, and classes that nobody told."""

import json
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.cli.presence import sites_line
from fedtailor.data.agreement import read_agreement
from fedtailor.reporting.figures import in_order, partitions
from fedtailor.reporting.found_runs import read_runs
from fedtailor.reporting.page import prepare
from fedtailor.server.records import Partition, counted_classes
from fedtailor.studies.client_results import client_table
from fedtailor.studies.summary import summarize
from tests.sites.parts import Federation, Recorded


def silent_in_the_last(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
    return "it is not connected" if site == "south" and round == 3 else answer


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    made = Federation(tmp_path_factory.mktemp("federation"), method="ifca")
    with pytest.warns(ft.ClientFailure, match=r"^IFCA, round 3: client south left out: it is not connected\.$") as said:
        made.run(Recorded(made.sites(), silent_in_the_last))
    assert len(said) == 1  # it is not named again because it was not measured
    return made


def test_a_silent_site_is_missing_and_the_others_are_measured(federation: Federation, tmp_path: Path) -> None:
    result = ft.load(federation.root / "run")
    assert [record.missing for record in result.rounds] == [[], [], [1]]
    assert [record.failed for record in result.rounds] == [[], [], [1]]
    assert result.measured_for == "The metrics are of 2 of 3 clients: client south was not measured in round 3."
    assert result.missing == ["south"]
    assert set(result.per_client) == {0, 2}
    said = sites_line(federation.root / "run")
    assert said.startswith("2 of 3 sites present (")
    assert said.endswith("Silent: south (it has no model file yet: it is not connected).")


def test_nothing_is_reused_of_a_site_that_trained_and_then_was_silent(tmp_path: Path) -> None:
    def change(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return "it is not connected" if (site, kind, round) == ("south", "evaluate", 2) else answer

    federation = Federation(tmp_path, method="ditto")
    back = pytest.warns(ft.ClientNote, match=r"round 3: client south is back\.")
    with back, pytest.warns(ft.ClientFailure, match=r"round 2: client south not measured: it is not connected\."):
        result = federation.run(Recorded(federation.sites(), change))
    assert [record.missing for record in result.rounds] == [[], [1], []]
    assert [record.failed for record in result.rounds] == [[], [], []]


@pytest.mark.parametrize("method", ["ditto", "fedavg"])
def test_a_site_may_tell_no_metrics(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, method=method)
    file = tmp_path / "west" / "site.toml"
    file.write_text(file.read_text() + 'metrics = "none"\n')
    with pytest.warns(ft.ClientNote, match=r"^Client west tells no metrics: averages are of the others\.$") as said:
        result = federation.run()
    assert len(said) == 1
    assert [record.missing for record in result.rounds] == [[2]] * 3
    assert [record.evaluated for record in result.rounds] == [2] * 3
    whole = Federation(tmp_path / "whole", method=method).run()
    assert [of.results[0] for of in result.clients] == [of.results[0] for of in whole.clients]


# --- classes that nobody told ---


def test_numbers_of_samples_are_shown_without_classes(federation: Federation, tmp_path: Path) -> None:
    result = ft.load(federation.root / "run")
    assert result.partition["classes"] == ["ill", "well"]
    assert counted_classes(result.partition) == []
    (figure,) = partitions(summarize([result]))
    (heat,) = figure.panels[0].marks
    assert heat.columns == ["all"]  # type: ignore[union-attr]
    assert "their classes are not known here" in figure.caption
    assert "commonest class" not in figure.caption
    assert in_order(result) == [0, 1, 2]
    rows = client_table(summarize([result])).rows
    declared = read_agreement(federation.root / "run")
    assert declared is not None
    counts = [(hello.name, hello.train, hello.test) for hello in declared.declared]
    assert [(row.name, row.n_train, row.n_test) for row in rows] == counts
    report = prepare(read_runs([federation.root / "run"]))
    clusters = next(figure for figure in report.figures if figure.title == "Who is in which cluster")
    assert "by class" not in clusters.caption
    page = ft.report(federation.root / "run", to=tmp_path / "page.html").read_text()
    assert "(2 classes) at 3 clients" in page


def test_a_simulation_has_its_classes_as_before(federation: Federation) -> None:
    result = ft.run("ifca", data=federation.data, rounds=1, engine="in-process")
    assert counted_classes(result.partition) == ["ill", "well"]
    (figure,) = partitions(summarize([result]))
    assert "of which class each client has; clients are ordered by their commonest class" in figure.caption
    assert "not known" not in figure.caption


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(
    "rows", [[[1], [2]], [[1], [2], [3, 4]], [[1, 2], [3, 4], [5, 6]], [[], [], []], [[1, 2, 3]] * 3]
)
def test_a_partition_whose_rows_do_not_fit_is_refused(
    split: str, rows: list[list[int]], federation: Federation
) -> None:
    recorded = json.loads((federation.root / "run" / "partition.json").read_text())
    Partition.from_json(json.dumps(recorded).encode())
    with pytest.raises(ValueError, match="it does not have every client's samples of each class"):
        Partition.from_json(json.dumps({**recorded, split: rows}).encode())

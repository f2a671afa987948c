"""A comparison: what it asks for, and how it goes on."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor._common.errors import FedtailorError
from fedtailor._common.toml import write_toml
from fedtailor.engines.runs import OnRound
from fedtailor.experiment import read_experiment
from fedtailor.server.loop import Loop
from fedtailor.server.records import RoundRecord
from fedtailor.studies.comparison import FILE, Comparing, make_comparison, planned_runs
from tests.helpers import numbers

SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 1, "model": "mlp:16", "engine": "in-process"}


def nothing(_: object) -> None:
    pass


def work_through(work: Comparing, on_round: OnRound = nothing) -> None:
    todo = work.todo()
    work.begin(todo)
    for title in todo:
        work.run(title, on_round, nothing)


class TestQuestion:
    def test_every_method_with_every_seed_those_of_a_seed_together(self) -> None:
        asked = make_comparison({"methods": ["local", "ditto"], "seeds": [3, 1], **SMALL})
        assert list(asked.runs()) == ["local, seed 3", "ditto, seed 3", "local, seed 1", "ditto, seed 1"]
        run = asked.runs()["ditto, seed 1"]
        assert (run.method, run.seed, run.rounds, run.checkpoint_every) == ("ditto", 1, 2, 1)

    def test_three_seeds_unless_said_otherwise(self) -> None:
        assert make_comparison({"methods": ["local"]}).seeds == (0, 1, 2)

    def test_a_grid_is_every_combination_of_what_concerns_a_method(self) -> None:
        grid = {"lr": [0.1, 0.01], "lam": [0.5, 2], "fine_tune": [0, 3]}
        runs = make_comparison({"methods": ["fedavg", "ditto"], "seeds": [0], "grid": grid}).runs()
        assert len(runs) == 4 + 8
        run = runs["ditto, lam=2, lr=0.01, fine_tune=3, seed 0"]
        assert (run.parameters, run.lr, run.evaluation.fine_tune) == ({"lam": 2}, 0.01, 3)
        assert runs["fedavg, lr=0.01, fine_tune=3, seed 0"].lr == 0.01

    def test_parameters_of_one_method(self) -> None:
        parameters = {"ditto": {"lam": 3}, "pgfed": {"mu": 0.5}}
        runs = make_comparison({"methods": ["ditto", "pgfed"], "seeds": [0], "parameters": parameters}).runs()
        assert runs["ditto, seed 0"].parameters == {"lam": 3}
        assert runs["pgfed, seed 0"].parameters["mu"] == 0.5

    def test_the_file_is_complete_and_asks_the_same(self, tmp_path: Path) -> None:
        grid, parameters = {"lr": [0.5, 0.25], "lam": [1, 2]}, {"pgfedmo": {"mu": 0.5}}
        own = {"methods": ["ditto", "pgfedmo"], "seeds": [2], "target": 0.9, "grid": grid, "parameters": parameters}
        asked = make_comparison({**own, "evaluation": {"choose": "best-validation"}, **SMALL})
        (tmp_path / "comparison.toml").write_text(write_toml(asked.written()))
        assert make_comparison(read_experiment(tmp_path / "comparison.toml")) == asked
        text = tomllib.loads((tmp_path / "comparison.toml").read_text())
        assert text["parameters"]["pgfedmo"]["beta"] == 0.5  # the method's own defaults too
        assert text["evaluation"]["choose"] == "best-validation"
        assert text["momentum"] == 0

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"methods": []}, "methods"),
            ({"methods": "ditto"}, "must be a list of methods' names, not 'ditto'"),
            ({"methods": ["dito"]}, "did you mean 'ditto'"),
            ({"methods": ["local", "local"]}, "'local' is named twice"),
            ({"seeds": [0, 0]}, "0 is named twice"),
            ({"seeds": [-1]}, "whole numbers of at least 0"),
            ({"seeds": [True]}, "whole numbers of at least 0"),
            ({"seed": 3}, r"has seeds \(a list\), not seed"),
            ({"method": "local"}, r"has methods \(a list\), not method"),
            ({"target": 90, "metric": "accuracy"}, "The target accuracy is 90, but"),
            ({"target": "high"}, "The target is 'high', but it must be a number"),
            ({"target": float("inf")}, "The target is inf, but it must be a number"),
            ({"ruonds": 3}, "did you mean 'rounds'"),
            ({"parameters": {"lam": 3}}, r"\[parameters.METHOD\]"),
            ({"parameters": {"dito": {"lam": 3}}}, "did you mean 'ditto'"),
            ({"parameters": {"ditto": {"lma": 3}}}, "did you mean 'lam'"),
            ({"grid": 3}, "grid"),
            ({"grid": {"lr": 0.1}}, r"The grid's lr must be a list of values, not 0.1"),
            ({"grid": {"lr": [0.1, -1]}}, "'lr' is -1"),
            ({"grid": {"lam": [0.1, -1]}}, "'lam' of ditto is -1"),
            ({"grid": {"lmr": [0.1]}}, "no setting or parameter 'lmr'"),
            ({"grid": {"seed": [0, 1]}}, r"seeds = \[...\]"),
            ({"grid": {"workers": [1, 2]}}, "does not change the numbers"),
            ({"grid": {"partition": ["iid"]}}, "cannot vary partition, as the lines of a table need the same clients"),
            ({"grid": {"evaluation": {"model": ["local"]}}}, "only fine_tune may vary"),
        ],
    )
    def test_what_is_wrong_is_named(self, asked: dict[str, Any], said: str) -> None:
        with pytest.raises(FedtailorError, match=said):
            make_comparison({"methods": ["local", "ditto"], **asked})


class TestWork:
    @pytest.mark.parametrize("stop", [1, 2, 3])
    def test_interrupted_at_any_round_it_goes_on_to_the_same_numbers(self, tmp_path: Path, stop: int) -> None:
        asked = make_comparison({"methods": ["local", "ditto"], "seeds": [0], **SMALL, "participation": 0.5})
        whole, stopped = Comparing(asked, tmp_path / "whole"), Comparing(asked, tmp_path / "stopped")
        work_through(whole)
        seen: list[RoundRecord] = []

        def see(record: RoundRecord) -> None:
            seen.append(record)
            if len(seen) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            work_through(stopped, see)
        again = Comparing(asked, tmp_path / "stopped")
        work_through(again, see)
        assert len(seen) == 4  # nothing that was done is done again
        for title in whole.runs:
            one, other = ft.load(whole.path(title)), ft.load(again.path(title))
            assert numbers(one.rounds) == numbers(other.rounds)
            assert one.clients == other.clients

    def test_all_methods_have_the_same_clients_and_participants(self, tmp_path: Path) -> None:
        asked = make_comparison({"methods": ["local", "ditto"], "seeds": [0, 1], **SMALL, "participation": 0.5})
        work = Comparing(asked, tmp_path / "a")
        work_through(work)
        results = {title: ft.load(work.path(title)) for title in work.runs}
        for seed in (0, 1):
            local, ditto = results[f"local, seed {seed}"], results[f"ditto, seed {seed}"]
            assert local.partition["fingerprint"] == ditto.partition["fingerprint"]
            called = [[record.participants for record in result.rounds] for result in (local, ditto)]
            assert called[0] == called[1]
        assert results["local, seed 0"].partition != results["local, seed 1"].partition

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"rounds": 3}, "rounds is 2 and not 3"),
            ({"rounds": 3, "seeds": [0, 1], "methods": ["local", "ditto", "pgfed"]}, "rounds is 2 and not 3"),
            ({"grid": {"lr": [0.5]}}, r"grid.lr is not set and not \[0.5\]"),
            ({"parameters": {"ditto": {"lam": 3}}}, "parameters.ditto.lam is 0.5 and not 3.0"),
            ({"evaluation": {"choose": "best-test"}}, "evaluation.choose is last-5 and not best-test"),
        ],
    )
    def test_another_question_in_the_same_directory_is_refused(
        self, tmp_path: Path, change: dict[str, Any], said: str
    ) -> None:
        asked = {"methods": ["local", "ditto"], "seeds": [0], **SMALL}
        work = Comparing(make_comparison(asked), tmp_path / "a")
        work.begin({})
        with pytest.raises(FedtailorError, match=f"is another comparison, where {said}: choose another --out"):
            Comparing(make_comparison({**asked, **change}), tmp_path / "a")
        Comparing(make_comparison({**asked, "workers": 2, "target": 0.5, "checkpoint_every": 5}), tmp_path / "a")

    @pytest.mark.parametrize("stop", [None, 2])
    def test_a_comparison_is_extended_by_methods_seeds_and_values(self, tmp_path: Path, stop: int | None) -> None:
        """Runs that are there are kept, also if the extension is interrupted and goes on."""
        asked: dict[str, Any] = {"methods": ["local", "ditto"], "seeds": [0], "grid": {"lam": [0.5]}, **SMALL}
        more = {"methods": ["fedavg", "ditto", "local"], "seeds": [1, 0], "grid": {"lam": [2, 0.5], "lr": [0.1, 0.05]}}
        work_through(Comparing(make_comparison(asked), tmp_path / "a"))
        kept = {path: path.read_bytes() for path in (tmp_path / "a/runs").rglob("*") if path.is_file()}
        seen: list[RoundRecord] = []

        def see(record: RoundRecord) -> None:
            seen.append(record)
            if len(seen) == stop:
                raise KeyboardInterrupt

        extended = make_comparison({**asked, **more})
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                work_through(Comparing(extended, tmp_path / "a"), see)
        assert make_comparison(read_experiment(tmp_path / "a" / FILE)) == (extended if stop else make_comparison(asked))
        work = Comparing(extended, tmp_path / "a")
        work_through(work, see)
        runs = 2 * 2 * (1 + 1 + 2)  # seeds, values of lr; fedavg, local, and ditto with two values of lam
        assert len(seen) == 2 * (runs - 2)
        assert make_comparison(read_experiment(tmp_path / "a" / FILE)) == extended
        assert {path: path.read_bytes() for path in kept} == kept
        whole = Comparing(extended, tmp_path / "whole")
        work_through(whole)
        assert [line.accuracy for line in work.finish().lines] == [line.accuracy for line in whole.finish().lines]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"methods": ["ditto", "pgfed"]}, "has local among its methods"),
            ({"seeds": [0, 2]}, "has 1 among its seeds"),
            ({"grid": {"lam": [0.5, 1.0]}}, "has 2 among its values of lam"),
            ({"grid": {}}, "has 0.5 among its values of lam"),
        ],
    )
    def test_nothing_is_taken_away(self, tmp_path: Path, change: dict[str, Any], said: str) -> None:
        asked = {"methods": ["local", "ditto"], "seeds": [0, 1], "grid": {"lam": [0.5, 2]}, **SMALL}
        Comparing(make_comparison(asked), tmp_path / "a").begin({})
        with pytest.raises(FedtailorError, match=f"{said}: a comparison can only get more of them, so name it too"):
            Comparing(make_comparison({**asked, **change}), tmp_path / "a")

    def test_a_directory_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(FedtailorError, match="is not a comparison"):
            Comparing(make_comparison({"methods": ["local"]}), tmp_path)

    def test_a_run_that_fails_does_not_keep_the_others_from_the_table(self, tmp_path: Path) -> None:
        asked = make_comparison({"methods": ["local", "fedavg"], "seeds": [0], "grid": {"lr": [0.1, 1e30]}, **SMALL})
        work = Comparing(asked, tmp_path / "a")
        with pytest.warns(ft.ClientFailure):
            work_through(work)
        assert list(work.failed) == ["local, lr=1e+30, seed 0", "fedavg, lr=1e+30, seed 0"]
        summary = work.finish()
        assert [line.title for line in summary.lines] == ["local", "fedavg"]
        assert work.extra["failed"] == work.failed
        assert {title: work.out / path for title, path in work.extra["runs"].items()} == {
            title: work.path(title) for title in work.runs
        }
        # The table is the caller's.
        assert {path.name for path in work.out.iterdir()} == {"comparison.toml", "runs.json", "runs"}
        planned = {work.path(title): (title, run.rounds) for title, run in work.runs.items()}
        assert planned_runs(work.out) == planned

    def test_a_comparison_at_work_elsewhere_is_left_alone(self, tmp_path: Path) -> None:
        asked = make_comparison({"methods": ["local"], "seeds": [0], **SMALL})
        work = Comparing(asked, tmp_path / "a")
        work.begin(work.todo())

        def another(_: Loop) -> None:
            with pytest.raises(FedtailorError, match="is writing in"):
                Comparing(asked, tmp_path / "a").run("local, seed 0", nothing, nothing)

        assert work.run("local, seed 0", nothing, another) is not None

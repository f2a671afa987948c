"""`fedtailor doctor`: what it finds, what it says of what is broken, and what it never tells."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedtailor
from fedtailor._common.extras import install_command
from fedtailor.cli import device_check, diagnosis
from fedtailor.cli.diagnosis import Problem, Requirement, cgroup_limits, meets
from tests.cli.calling import Answer, Call

QUICK = 0.01  # seconds of benchmark


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages and one extra: importing all would take long."""
    needed = [
        Requirement("torch", ">=2.4"),
        Requirement("numpy", ">=1.26"),
        Requirement("matplotlib", ">=3.8", "figures"),
    ]
    monkeypatch.setattr(diagnosis, "requirements", lambda: needed)


def a_library(place: Path, name: str, version: str, code: str = "") -> None:
    """An installed library, before all others on the path."""
    (place / name).mkdir(parents=True)
    (place / name / "__init__.py").write_text(code)
    about = place / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def doctor(*words: str, cwd: Path, libraries: Path | None = None, **environment: str) -> Answer:
    """The command in a process of its own, with these libraries before all others."""
    path = os.pathsep.join(map(str, [libraries or cwd, Path(fedtailor.__file__).parents[1]]))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "fedtailor", "doctor", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return Answer(ended.returncode, ended.stdout, ended.stderr)


def texts(problems: list[Problem]) -> str:
    return "\n".join(problem.text for problem in problems)


def test_a_whole_machine_that_is_well(tmp_path: Path) -> None:
    """All that a bug report needs, on a page of 80 columns and for programs, of the real installation."""
    answer = doctor(cwd=tmp_path)
    assert answer.code == 0, answer
    assert answer.err == ""
    assert max(map(len, answer.out.splitlines())) <= 80
    for title in ("fedtailor", "Python", "packages", "extras", "system", "processor", "cores", "memory", "disk",
                  "devices", "engines", "data sets", "speed"):  # fmt: skip
        assert f"\n{title} " in f"\n{answer.out}"
    text = " ".join(answer.out.split())
    assert f"fedtailor {fedtailor.__version__}" in text
    assert f"torch {importlib.metadata.version('torch')}" in text
    assert "bundled: digits, synthetic" in text
    assert "training samples a second (MLP 784-200-10" in text


def test_for_programs(call: Call, few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / name).touch()
    answer = call("doctor", "--json")
    assert answer.code == 0, answer
    facts = json.loads(answer.out)
    assert facts["fedtailor"] == fedtailor.__version__
    assert facts["packages"]["torch"]["version"] == importlib.metadata.version("torch")
    assert facts["cores"]["usable"] >= 1
    assert facts["memory"]["total"] > facts["memory"]["available"] > 0
    assert [place["for"] for place in facts["places"]][:2] == ["runs", "temporary files"]
    assert all(place["writable"] and place["free"] > 0 for place in facts["places"][:2])
    assert facts["data"]["bundled"] == ["digits", "synthetic"]
    assert set(facts["data"]["found"]) | set(facts["data"]["missing"]) >= {"mnist", "cifar-10"}
    assert facts["engines"]["in-process"] is None
    assert facts["benchmark"]["samples_per_second"] > 0
    assert not list(tmp_path.glob("runs*")), "it writes nothing"


def test_the_benchmark_trains_by_the_code_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedtailor.server.loop import Loop

    rounds = []
    whole = Loop.round

    def counted(loop: Any, number: int, transport: Any) -> Any:
        rounds.append(number)
        return whole(loop, number, transport)

    monkeypatch.setattr(Loop, "round", counted)
    found = diagnosis.benchmark(QUICK)
    trained = (len(rounds) - 1) * diagnosis.CLIENTS * diagnosis.SAMPLES  # the first round is not counted
    assert found["samples_per_second"] == pytest.approx(trained / found["seconds"], rel=0.2)


class TestPackages:
    def test_all_that_the_project_needs_is_looked_at(self) -> None:
        import tomllib

        project = tomllib.loads((Path(fedtailor.__file__).parents[1] / "pyproject.toml").read_text())["project"]
        found = {(one.name, one.extra) for one in diagnosis.requirements()}
        assert {("torch", ""), ("numpy", "")} <= found
        extras = set(project["optional-dependencies"]) - set(diagnosis.NOT_AT_RUN_TIME)
        assert {extra for _, extra in found} - {""} == extras

    def test_a_checkout_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> list[str]:
            raise importlib.metadata.PackageNotFoundError(name)

        installed = diagnosis.requirements()
        monkeypatch.setattr(importlib.metadata, "requires", missing)
        assert {one.name for one in diagnosis.requirements()} == {one.name for one in installed}

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("torch>=2.4", Requirement("torch", ">=2.4")),
            ("torch (>=2.4)", Requirement("torch", ">=2.4")),
            ('nvflare<2.10,>=2.9; extra == "nvflare"', Requirement("nvflare", "<2.10,>=2.9", "nvflare")),
            ("a[b]>=1 ; extra == 'c'", Requirement("a", ">=1", "c")),
            ("ruff", Requirement("ruff", "")),
        ],
    )
    def test_requirements_are_read(self, line: str, expected: Requirement) -> None:
        assert diagnosis._requirement(line) == expected

    @pytest.mark.parametrize(
        ("version", "versions", "expected"),
        [
            ("2.4.0", ">=2.4", True),
            ("2.13.0+cpu", ">=2.4", True),
            ("2.3.1", ">=2.4", False),
            ("2.10", ">=2.9,<2.10", False),
            ("2.9.7", ">=2.9,<2.10", True),
            ("5.0.0rc1", ">=5.0", True),
            ("1.0", "==1", True),
            ("1.0", "", True),
        ],
    )
    def test_versions_are_compared_by_their_numbers(self, version: str, versions: str, expected: bool) -> None:
        assert meets(version, versions) is expected

    def test_an_extra_that_is_broken_old_or_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error, an exit and the end of the process; none of them ends the doctor."""
        a_library(tmp_path, "brokenlib", "1.0", "raise ImportError('libfoo.so: no such file')")
        a_library(tmp_path, "quitlib", "1.0", "import os; os._exit(7)")
        a_library(tmp_path, "oldlib", "1.0")
        needed = [Requirement(name, ">=1.0", "x") for name in ("brokenlib", "quitlib", "nolib")]
        needed.append(Requirement("oldlib", ">=2.0", "x"))
        monkeypatch.setattr(diagnosis, "requirements", lambda: needed)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        problems: list[Problem] = []
        facts = diagnosis._extras(diagnosis._packages(problems))
        mend = install_command("x")
        assert [problem.text for problem in problems] == [
            "brokenlib 1.0 of the extra x cannot be imported (ImportError: libfoo.so: no such file): install it anew "
            f"with {mend}.",
            "quitlib 1.0 of the extra x cannot be imported (it ends the process with code 7): install it anew with "
            f"{mend}.",
            f"oldlib 1.0 of the extra x is not the version that is needed (>=2.0): {mend}.",
        ]
        assert not any(problem.serious for problem in problems)
        assert facts["x"]["packages"]["nolib"] is None
        assert facts["x"]["install"] == mend

    def test_without_a_pytorch_that_works(self, tmp_path: Path) -> None:
        """It says so, shows the rest, and ends with code 1."""
        a_library(tmp_path / "lib", "torch", "1.13.0", "raise OSError('libtorch_cpu.so: cannot open')")
        answer = doctor(cwd=tmp_path, libraries=tmp_path / "lib")
        assert (answer.code, answer.err) == (1, "")
        text = " ".join(answer.out.split())
        assert "Broken: torch 1.13.0 cannot be imported (OSError: libtorch_cpu.so: cannot open): install it" in text
        assert "memory " in text
        facts = json.loads(doctor("--json", cwd=tmp_path, libraries=tmp_path / "lib").out)
        assert facts["benchmark"] is None
        assert any(problem["serious"] for problem in facts["problems"])

    def test_an_old_pytorch_is_serious(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            diagnosis, "requirements", lambda: [Requirement("torch", ">=99"), Requirement("nolib", ">=1")]
        )
        problems: list[Problem] = []
        diagnosis._packages(problems)
        assert "is not the version that is needed (>=99): pip install 'torch>=99'." in problems[0].text
        assert problems[1:] == [Problem("nolib is missing: install it with pip install 'nolib>=1'.", serious=True)]
        assert problems[0].serious


class TestMachine:
    def test_the_limits_of_a_container(self, tmp_path: Path) -> None:
        assert cgroup_limits(tmp_path, tmp_path / "none") == (None, None)
        (tmp_path / "cpu.max").write_text("max 100000\n")
        (tmp_path / "memory.max").write_text("max\n")
        assert cgroup_limits(tmp_path, tmp_path / "none") == (None, None)
        own = tmp_path / "user" / "one"
        own.mkdir(parents=True)
        (tmp_path / "membership").write_text("0::/user/one\n")
        (own / "memory.max").write_text("500000000\n")
        (tmp_path / "user" / "cpu.max").write_text("150000 100000\n")
        assert cgroup_limits(tmp_path, tmp_path / "membership") == (1.5, 500_000_000)

    def test_the_limits_of_an_old_container(self, tmp_path: Path) -> None:
        for name, text in (("cpu/cpu.cfs_quota_us", "-1"), ("cpu/cpu.cfs_period_us", "100000")):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "memory").mkdir()
        (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712")
        assert cgroup_limits(tmp_path, tmp_path / "none") == (None, None)
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000")
        (tmp_path / "memory/memory.limit_in_bytes").write_text("1000000")
        assert cgroup_limits(tmp_path, tmp_path / "none") == (0.5, 1_000_000)

    def test_a_tight_container_and_too_many_threads_are_problems(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(diagnosis, "_cores", lambda: 8)
        monkeypatch.setattr(diagnosis, "cgroup_limits", lambda: (2.5, 500_000_000))
        monkeypatch.setenv("OMP_NUM_THREADS", "64")
        monkeypatch.setenv("MKL_NUM_THREADS", "8")
        problems: list[Problem] = []
        diagnosis._processors(problems)
        diagnosis._memory(problems)
        assert texts(problems) == (
            "OMP_NUM_THREADS is 64, and there are 8 cores: unset it, or set it to at most 8.\n"
            "This container may use 2.5 of the 8 cores that it sees: give --workers 2, as more workers would wait for "
            "each other.\n"
            "There are 0.5 GB of memory left: end other programs, or use fewer --workers and --states disk."
        )

    def test_where_nothing_can_be_written(
        self, call: Call, few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A file in the way of the run directories stops root, too, whom a mode would not."""
        (tmp_path / "runs").write_text("in the way")
        answer = call("doctor")
        assert answer.code == 1, answer
        text = " ".join(answer.out.split())
        where = f"{diagnosis.anonymous(str(tmp_path))}/runs (runs)"
        assert f"Broken: Nothing can be written to {where}: go to another directory, or give --out." in text
        assert "training samples a second" in text

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_without_write_access(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        assert not diagnosis._place("runs", tmp_path / "runs")["writable"]

    def test_workers_that_do_not_work_are_a_problem_and_the_rest_goes_on(
        self, call: Call, few: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fedtailor.engines.processes import Processes

        def forbidden(*_: Any) -> None:
            raise PermissionError("fork is not allowed")

        monkeypatch.setattr(Processes, "__init__", forbidden)
        answer = call("doctor")
        assert answer.code == 0, answer
        said = "Problem: Worker processes do not work (PermissionError: fork is not allowed): give --engine in-process."
        assert said in " ".join(answer.out.split())


class TestNothingPersonal:
    def test_home_and_user_are_not_told(self, tmp_path: Path) -> None:
        """Runs in a home directory, data below a directory of the user's name elsewhere."""
        home, data = tmp_path / "homes" / "ada.lovelace", tmp_path / "scratch" / "ada.lovelace" / "data"
        (home / "hospital").mkdir(parents=True)
        data.mkdir(parents=True)
        words = {"HOME": str(home), "USER": "ada.lovelace", "LOGNAME": "ada.lovelace", "FEDTAILOR_DATA": str(data)}
        path = str(Path(fedtailor.__file__).parents[1])
        for options in ([], ["--json"]):
            answer = doctor(*options, cwd=home / "hospital", libraries=Path(path), **words)
            assert answer.code == 0, answer
            assert "lovelace" not in answer.out
            text = "".join(answer.out.split())
            assert "~/hospital/runs" in text
            assert "/scratch/USER/data" in text
            assert os.uname().nodename not in answer.out.split()

    def test_words_that_only_look_like_a_user_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("USER", "run")
        monkeypatch.setenv("HOME", "/home/run")
        for name in ("LOGNAME", "USERNAME"):
            monkeypatch.delenv(name, raising=False)
        assert diagnosis.anonymous("/home/run/x/runs run") == "~/x/runs run"
        assert diagnosis.anonymous("/scratch/run/runs") == "/scratch/USER/runs"


def test_the_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PACKAGE", tmp_path / "fedtailor")
    assert diagnosis.commit() is None
    (tmp_path / "fedtailor").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert diagnosis.commit() is None  # no commit yet
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    found = diagnosis.commit()
    assert found is not None
    assert len(found) == 10
    assert head.startswith(found)
    (tmp_path / "fedtailor" / "new.py").touch()
    assert diagnosis.commit() == f"{found}, with changed files"


def test_help_tells_it_from_the_doctor_of_kits(call: Call) -> None:
    assert "fedtailor deploy doctor" in call("doctor", "--help").out
    assert "fedtailor doctor" in " ".join(call("deploy", "doctor", "--help").out.split())


def test_a_device_is_compared_with_the_cpu(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "NETWORKS", ("mlp",))
    monkeypatch.setattr(device_check.check_device, "__defaults__", (0.0,))
    answer = call("doctor", "--device", "cpu", "--json")
    alone, together = json.loads(answer.out)
    assert (answer.code, alone["difference"], alone["stack"], together["stack"]) == (0, 0.0, 1, 10)
    assert 0 < together["difference"] < 1e-6
    assert together["operators_per_step"] < 0.5 * alone["operators_per_step"]
    assert alone["samples_per_second"] > 0
    shown = call("doctor", "--device", "cpu")
    assert "The device cpu agrees with the CPU to 1e-04." in shown.out
    monkeypatch.setattr(device_check, "CLOSE", 1e-12)
    shown = call("doctor", "--device", "cpu")
    assert shown.code == 1
    assert "differs from the CPU by more than 1e-12" in shown.out


def test_a_device_that_is_not_there_is_refused(call: Call) -> None:
    answer = call("doctor", "--device", "cuda:0,1")
    assert answer.code == 2
    assert "The device cuda:0 is not available here (there are: none)." in answer.err

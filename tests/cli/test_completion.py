"""What the shell offers behind Tab, asked for as the shells' own scripts ask."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedtailor.cli import COMMANDS
from fedtailor.cli import completion as completing
from fedtailor.data import catalogue, partitions_catalogue
from fedtailor.experiment.tuned import names
from fedtailor.methods import CATALOGUE as METHODS
from fedtailor.models import CATALOGUE as MODELS
from fedtailor.studies.presets import find_preset, presets
from tests.cli.calling import Call

PROGRAM = "import sys; sys.argv[0] = 'fedtailor'; from fedtailor.cli import main; main()"
# The same, and it ends with an error if PyTorch was imported.
WITHOUT_TORCH = """import sys
sys.argv[0] = 'fedtailor'
from fedtailor.cli import main
try:
    main()
finally:
    assert 'torch' not in sys.modules and 'numpy' not in sys.modules"""


def offered(*words: str, cwd: Path | None = None) -> list[str]:
    """What bash gets for the last of these words; it hands them over cut at `:` and `=`."""
    cut = [part for word in words for part in _parts(word)]
    asked = {"COMP_WORDS": "\n".join(["fedtailor", *cut]), "COMP_CWORD": str(len(cut))}
    environment = {**os.environ, **asked, "_FEDTAILOR_COMPLETE": "complete_bash"}
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.split("\n")[:-1] if ended.stdout.strip() else []


def _parts(word: str) -> list[str]:
    parts = [part for part in re.split("([:=])", word) if part]
    return parts or [""]


def test_commands() -> None:
    found = offered("")
    assert {*COMMANDS, "deploy", "site"} <= set(found)
    assert offered("re") == ["resume", "report", "reproduce"]
    assert offered("deploy", "") == ["plan", "approve", "renew", "revoke", "run", "status", "share", "doctor"]


def test_options_are_those_of_the_command() -> None:
    assert offered("run", "fedavg", "--data") == ["--data", "--data-dir"]
    assert offered("run", "--part") == ["--partition", "--participation"]
    assert offered("site", "check", "site.toml", "--js") == ["--json"]
    assert offered("--vers") == ["--version"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "fedr"), ["fedrecon", "fedrep", "fedrod"]),
        (("compare", "local", "fedav"), ["fedavg", "fedavg-ft", "fedavgm"]),
        (("methods", "lg"), ["lg-fedavg"]),
        (("run", "fedavg", "--data", "fa"), ["fashion-mnist"]),
        (("run", "fedavg", "--data=fa"), ["fashion-mnist"]),
        (("data", "fa"), ["fashion-mnist"]),
        (("run", "fedavg", "--model", "le"), ["lenet"]),
        (("run", "fedavg", "--partition", "dir"), ["dirichlet:", "dirichlet-plain:"]),
        (("run", "fedavg", "--engine", "p"), ["processes"]),
        (("run", "fedavg", "--split", ""), ["merge", "official", "hash"]),
        (("run", "fedavg", "--metric", "ba"), ["balanced_accuracy"]),
        (("run", "fedavg", "--attack", "sign"), ["sign-flip"]),
        (("run", "fedavg", "--settings", "tun"), [f"tuned:{name}" for name in names()]),
        (("run", "fedavg", "--settings", "tuned:dig"), ["digits"]),  # bash keeps what is before the colon
        (("run", "fedavg", "--settings=tuned:dig"), ["digits"]),
        (("run", "fedavg", "--set", "label_s"), ["label_smoothing="]),
        (("run", "fedavg", "--set", "lr=0.5", "--seed", "1", "--opt"), ["--optimizer"]),
        (("reproduce", "pgfed/table2-"), ["pgfed/table2-25", "pgfed/table2-50", "pgfed/table2-100"]),
    ],
)  # fmt: skip
def test_values(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_runs_and_files(tmp_path: Path) -> None:
    for name in ("runs/ditto-1", "runs/fedavg-1", "comparisons/one/runs/a", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "experiment.toml").touch()
    (tmp_path / "comparisons/one/comparison.toml").touch()
    (tmp_path / "fedless.toml").touch()
    assert offered("resume", "ru", cwd=tmp_path) == ["runs/ditto-1", "runs/fedavg-1"]
    assert offered("show", "comp", cwd=tmp_path) == ["comparisons/one/runs/a", "comparisons/one"]
    assert offered("export", "", cwd=tmp_path) == ["comparisons/one/runs/a", "mine", "runs/ditto-1", "runs/fedavg-1"]
    assert offered("run", "fedle", cwd=tmp_path) == ["fedless.toml"]
    assert offered("run", "runs/ditto-1/e", cwd=tmp_path) == ["runs/ditto-1/experiment.toml"]
    assert offered("resume", "nothing", cwd=tmp_path) == []  # then bash offers files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "fedtailor run fedr", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {**os.environ, **asked, "_FEDTAILOR_COMPLETE": f"complete_{shell}"}
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert all(name in found for name in ("fedrecon", "fedrep", "fedrod"))
    assert "fedavg" not in found


def test_names_are_those_of_the_catalogues() -> None:
    assert set(completing.methods("")) == set(METHODS)
    assert list(completing.DATA) == [info.name for info in catalogue()]
    assert list(completing.MODELS) == list(MODELS)
    kinds = [name.partition(":") for name in partitions_catalogue() if "+" not in name]
    assert list(completing.PARTITIONS) == [name + colon for name, colon, _ in kinds]


def test_every_preset_that_is_offered_can_be_reproduced_and_none_is_missing() -> None:
    found = completing.presets("")
    for name in found:
        assert find_preset(name)
    columns = {f"{p.name}-{column}" for p in presets().values() for column in p.columns if not p.one_run}
    assert set(found) == set(presets()) | columns


def test_a_script_for_each_shell_is_shown(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell, mark in (
        ("bash", "complete -o default -F"),
        ("zsh", "#compdef fedtailor"),
        ("fish", "complete --command"),
    ):
        words = [sys.executable, "-c", PROGRAM, "--show-completion", shell]
        shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        assert mark in shown
        assert "_FEDTAILOR_COMPLETE" in shown


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_bash(tmp_path: Path) -> None:
    """The script as it is shown, called by bash's own completion function."""
    program = tmp_path / "fedtailor"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    program.chmod(0o755)
    script = """
        source <(env _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 fedtailor --show-completion bash)
        COMP_WORDS=(fedtailor run --settings tuned : dig); COMP_CWORD=5
        $(complete -p fedtailor | sed 's/.*-F \\([^ ]*\\) .*/\\1/') fedtailor
        echo "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "--norc", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "digits\n"

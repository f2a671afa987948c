"""Bad input: one clear sentence, exit code 2, and nothing written."""

import errno
import re
import sys
from pathlib import Path

import pytest
import torch

from fedtailor.cli import display
from tests.cli.calling import Answer, Call, done, refusal, usage_error
from tests.data.files import write_mnist

SMALL = ("--clients", 3, "--rounds", 1, "--engine", "in-process")


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fedavgg"], "There is no method 'fedavgg': did you mean 'fedavg'?"),
        (["FedAvg"], "There is no method 'FedAvg': did you mean 'fedavg'?"),
        (["fedavg", "dito"], "There is no method 'dito': did you mean 'ditto'?"),
        (["fedavg", "--data", "digit"], "There is no data set 'digit': did you mean 'digits'?"),
        (["fedavg", "--data", "mnits"], "There is no data set 'mnits': did you mean 'mnist'?"),
        (["fedavg", "--model", "mpl"], "There is no model 'mpl': did you mean 'mlp'?"),
        (["fedavg", "--loss", "cros-entropy"], "There is no loss 'cros-entropy': did you mean 'cross-entropy'?"),
        (["fedavg", "--device", "cud"], "There is no device 'cud': did you mean 'cuda'?"),
        (["fedavg", "--partition", "dirichelt:0.3"], "There is no partition 'dirichelt': did you mean 'dirichlet'?"),
        (["ditto", "--set", "lma=1"], "There is no parameter or setting 'lma': did you mean 'lam'?"),
        (["ditto", "--set", "parameters.lma=1"], "There is no parameter of ditto 'lma': did you mean 'lam'?"),
        (
            ["fedavg", "--set", "evaluation.modle=global"],
            "There is no parameter or setting 'evaluation.modle': did you mean 'evaluation.model'?",
        ),
    ],
)
def test_a_name_that_does_not_exist_gets_the_nearest_that_does(call: Call, words: list[str], said: str) -> None:
    assert refusal(call, "run", *words) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ruonds = 3", "There is no setting 'ruonds': did you mean 'rounds'?"),
        (
            "[evaluation]\naverag = 'client'",
            "There is no setting 'evaluation.averag': did you mean 'evaluation.average'?",
        ),
        ("method = 'ditto'\n[parameters]\nlma = 1", "There is no parameter of ditto 'lma': did you mean 'lam'?"),
        ("method = 'dito'", "There is no method 'dito': did you mean 'ditto'?"),
        ("[parameters]\nlam = 1", "The method fedavg has no parameters, so 'lam' cannot be set."),
    ],
)
def test_a_name_in_a_file_that_does_not_exist(call: Call, text: str, said: str) -> None:
    write("mine.toml", text)
    assert refusal(call, "run", "mine.toml") == said


@pytest.mark.parametrize(
    ("words", "parts"),
    [(["--ruonds", "3"], ["--ruonds", "--rounds"]), (["--rounds"], ["--rounds", "requires an argument"])],
)
def test_an_option_that_does_not_exist(call: Call, words: list[str], parts: list[str]) -> None:
    said = usage_error(call, "run", "fedavg", *words)
    assert all(part in said for part in parts)


def test_a_command_that_does_not_exist(call: Call) -> None:
    assert "Did you mean 'show'?" in usage_error(call, "shwo", "runs")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "hidden",
            "Net((1, 8, 8), 10) does not fit (too many positional arguments); Net() does not fit (missing a required "
            "argument: 'hidden').",
        ),
        (
            "shape, classes",
            "Net((1, 8, 8), 10) failed (RuntimeError: no memory); Net() does not fit (missing a required argument: "
            "'shape').",
        ),
        (
            "num_classes, in_channels=3",
            "Net((1, 8, 8), 10) failed (RuntimeError: no memory); Net(num_classes=10, in_channels=1) failed "
            "(RuntimeError: no memory); Net() does not fit (missing a required argument: 'num_classes').",
        ),
        (
            "",
            "Net((1, 8, 8), 10) does not fit (too many positional arguments); Net() failed (RuntimeError: no memory).",
        ),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_built_says_how_it_was_called(call: Call, arguments: str, said: str) -> None:
    lines = ["from torch import nn", "class Net(nn.Module):", f"    def __init__(self, {arguments}):"]
    write("tests_cli_net.py", "\n".join([*lines, "        raise RuntimeError('no memory')", ""]))
    refused = refusal(call, "run", "fedavg", "--model", "tests_cli_net:Net")
    assert refused == f"The model Net cannot be built: {said}"
    text = " ".join(done(call("run", "--help")).split())
    assert "module:Class, called with (input shape, classes), or by names of arguments like in_channels and" in text


def test_run_without_a_method(call: Call) -> None:
    assert "Missing argument" in usage_error(call, "run")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--rounds", "0"], ["rounds", "0", "at least 1"]),
        (["--rounds", "abc"], ["rounds", "'abc'", "a whole number"]),
        (["--lr", "-1"], ["lr", "-1", "above 0"]),
        (["--lr", "nan"], ["lr", "nan", "finite"]),
        (["--batch", "0"], ["batch", "0", "or full"]),
        (["--batch", "ful"], ["batch", "'ful'", "or full"]),
        (["--seed", "-1"], ["seed", "-1", "at least 0"]),
        (["--workers", "0"], ["workers", "0", "at least 1"]),
        (["--engine", "threads"], ["engine", "'threads'", "auto, in-process, processes, ray or sites-in-memory"]),
        (["--participation", "30", "--clients", "20"], ["30", "only 20"]),
        (["--participation", "0"], ["participation", "at least one client"]),
        (["--participation", "1.5"], ["participation", "'1.5'", "between 0 and 1"]),
        (["--partition", "dirichlet:-1"], ["'dirichlet:-1'", "above 0", "'dirichlet:0.3'"]),
        (["--partition", "dirichlet"], ["'dirichlet'", "above 0", "'dirichlet:0.3'"]),
        (["--partition", "classes:1.5"], ["'classes:1.5'", "whole number", "'classes:2'"]),
        (["--partition", "classes:11"], ["11 classes", "10"]),
        (["--partition", "natural"], ["'digits'", "names no clients"]),
        (["--clients", "500"], ["1797 samples", "500 clients"]),
        (["--test", "0.6", "--validation", "0.5"], ["0.6", "0.5", "nothing to train on"]),
        (["--evaluate-clients", "new"], ["no new clients", "--new-clients"]),
        (["--new-clients", "20"], ["20 of 20 clients cannot be new"]),
        (["--split", "official"], ["'digits'", "no official split"]),
        (["--model", "cnn"], ["cnn", "8×8"]),
        (["--model", "mlp:0"], ["'mlp:0'", "mlp:300,100"]),
        (["--head", "-1"], ["head", "-1"]),
        (["--head", "nowhere"], ["'nowhere'", "head"]),
        (["--loss", "mse"], ["do not fit together"]),
        (["--set", "lam"], ["name=value", "'lam'"]),
        (["--set", "=3"], ["name=value", "'=3'"]),
        (["--set", "evaluation=3"], ["evaluation", "3"]),
        (["--fine-tune", "-1"], ["fine_tune", "-1"]),
        (["--device", "cpu:x"], ["cpu:x"]),
    ],
)
def test_a_value_that_cannot_be(call: Call, words: list[str], parts: list[str]) -> None:
    said = refusal(call, "run", "fedavg", *words)
    assert all(part in said for part in parts), said


def test_a_parameter_of_another_method_is_refused_in_few_words(call: Call) -> None:
    said = refusal(call, "run", "fedavg", "--set", "lam=3")
    assert "'lam'" in said
    assert len(said) < 300


def test_a_parameter_that_cannot_be(call: Call) -> None:
    said = refusal(call, "run", "ditto", "--set", "lam=-1")
    assert said == "The parameter 'lam' of ditto is -1, but it must be at least 0."


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there(call: Call) -> None:
    said = refusal(call, "run", "fedavg", "--device", "cuda")
    assert said == "The device cuda is not available here: use cpu, or auto for the best there is."


def test_a_model_that_the_method_does_not_have(call: Call) -> None:
    said = refusal(call, "run", "local", *SMALL, "--evaluate-model", "global")
    assert said == "The method local has no global model: evaluate the personal ones."


@pytest.mark.parametrize("out", [[], ["--out", "both"]])
def test_the_same_method_twice(call: Call, out: list[str]) -> None:
    assert "named twice" in refusal(call, "run", "fedavg", "fedavg", *SMALL, *out)


class TestExperimentFiles:
    def test_none(self, call: Call) -> None:
        assert refusal(call, "run", "nowhere.toml") == "There is no experiment file nowhere.toml."

    def test_a_directory(self, call: Call) -> None:
        Path("some.toml").mkdir()
        assert "some.toml" in refusal(call, "run", "some.toml")

    def test_not_toml(self, call: Call) -> None:
        write("mine.toml", "rounds = = 3\n")
        said = refusal(call, "run", "mine.toml")
        assert said.startswith("The experiment file mine.toml is not valid TOML: ")
        assert "line 1" in said

    @pytest.mark.parametrize("text", ["evaluation = 3", "parameters = 'lam'", "evaluation = ['model']"])
    def test_a_plain_value_in_place_of_a_section(self, call: Call, text: str) -> None:
        write("mine.toml", text)
        assert f"'{text.split()[0]}'" in refusal(call, "run", "mine.toml")

    def test_a_wrong_type(self, call: Call) -> None:
        write("mine.toml", "rounds = [1, 2]")
        assert "'rounds'" in refusal(call, "run", "mine.toml")

    def test_a_bad_second_one_is_found_out_before_the_first_is_run(self, call: Call) -> None:
        write("good.toml", "clients = 3\nrounds = 1\nengine = 'in-process'")
        write("bad.toml", "clients = 3\nrounds = 1\ndata = 'mnits'")
        assert "'mnist'" in refusal(call, "run", "good.toml", "bad.toml")


class TestData:
    @pytest.mark.parametrize("more", [[], ["--min-samples", 1]])
    def test_five_clients_out_of_three_samples(self, call: Call, more: list[object]) -> None:
        write("three.csv", "a,label\n1,x\n2,y\n3,x\n")
        for command in (["run", "fedavg", "--data"], ["data"]):
            said = refusal(call, *command, "three.csv", "--clients", 5, *more)
            assert "3 samples" in said
            assert "5 clients" in said

    def test_a_truncated_gzip(self, call: Call) -> None:
        write_mnist(Path("data/mnist"))
        file = Path("data/mnist/train-images-idx3-ubyte.gz")
        file.write_bytes(file.read_bytes()[:-100])
        said = refusal(call, "run", "fedavg", "--data", "mnist", *SMALL)
        assert str(file) in said
        assert "gzip" in said

    def test_files_that_are_missing_are_named_with_their_source_and_place(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FEDTAILOR_DATA", "over-there")
        said = refusal(call, "run", "fedavg", "--data", "fashion-mnist")
        for part in ("train-images-idx3-ubyte.gz", "github.com/zalandoresearch", "over-there", "--data-dir"):
            assert part in said


class TestRunDirectories:
    def test_one_that_exists(self, call: Call) -> None:
        done(call("run", "fedavg", *SMALL, "--out", "here"))
        said = refusal(call, "run", "fedavg", *SMALL, "--out", "here")
        assert said == "here is a run already: choose another --out, or go on with `fedtailor resume here`."

    def test_one_that_exists_among_several_is_found_out_before_the_first_is_run(self, call: Call) -> None:
        done(call("run", "fedavg", *SMALL, "--out", "both/fedavg"))
        assert "both/fedavg is a run already" in refusal(call, "run", "local", "fedavg", *SMALL, "--out", "both")

    def test_a_file(self, call: Call) -> None:
        write("here", "x")
        assert "here" in refusal(call, "run", "fedavg", *SMALL, "--out", "here")
        assert "here/run" in refusal(call, "run", "fedavg", *SMALL, "--out", "here/run")

    @pytest.mark.parametrize("command", ["resume", "show"])
    def test_a_foreign_one(self, call: Call, command: str) -> None:
        write("thesis/chapter1.tex", "Once upon a time")
        write("half/experiment.toml", "method = 'fedavg'")
        for name in ("thesis", "half"):
            assert refusal(call, command, name).startswith(f"{name} is not a run directory")


class TestOwnCode:
    """Faults in the user's own files are named with the file's own words."""

    @pytest.mark.parametrize(
        ("text", "words", "parts"),
        [
            ("", ["tests_cli_bad:Mine"], ["'Mine'", "tests_cli_bad"]),
            ("Mine = 3", ["tests_cli_bad:Mine"], ["tests_cli_bad:Mine", "fedtailor.Method"]),
            ("import no_such_module", ["tests_cli_bad:Mine"], ["no_such_module"]),
            ("def mine(:", ["tests_cli_bad:Mine"], ["tests_cli_bad", "invalid syntax"]),
            ("1 / 0", ["tests_cli_bad:Mine"], ["tests_cli_bad", "division by zero"]),
            ("", ["no_such_file:Mine"], ["no_such_file"]),
            ("def net(): return 3", ["fedavg", "--model", "tests_cli_bad:net"], ["net", "nn.Module"]),
            ("def net(): raise ValueError('no [/] idea')", ["fedavg", "--model", "tests_cli_bad:net"], ["no [/] idea"]),
            (
                "from torch import nn\ndef net(): return nn.Linear(3, 10)",
                ["fedavg", "--model", "tests_cli_bad:net"],
                ["1×8×8", "do not fit together"],
            ),
        ],
    )
    def test_before_the_first_round(self, call: Call, text: str, words: list[str], parts: list[str]) -> None:
        write("tests_cli_bad.py", text)
        said = refusal(call, "run", *words, *SMALL)
        assert all(part in said for part in parts), said

    @pytest.mark.parametrize("step", ["start", "broadcast", "receive"])
    def test_in_the_server_s_part_of_a_method(self, call: Call, step: str) -> None:
        write(
            "tests_cli_bad.py",
            "from fedtailor.methods.fedavg import FedAvg\n"
            "class Mine(FedAvg):\n"
            f"    def {step}(self, *arguments):\n"
            "        raise KeyError('theta')\n",
        )
        answer = _ended(call, "run", "tests_cli_bad:Mine", *SMALL)
        assert "Mine" in answer.err
        assert "theta" in answer.err

    def test_every_client_fails(self, call: Call) -> None:
        write(
            "tests_cli_bad.py",
            "from fedtailor.methods.fedavg import FedAvg\n"
            "class Mine(FedAvg):\n"
            "    def train(self, client, message):\n"
            "        raise RuntimeError('no battery')\n",
        )
        answer = _ended(call, "run", "tests_cli_bad:Mine", *SMALL, "--on-failure", "stop")
        assert answer.err == (
            "Error: Mine, round 1: clients 0, 1, 2 failed: RuntimeError: no battery (tests_cli_bad.py, line 4).\n"
        )
        assert "Traceback" not in answer.err

    @pytest.mark.parametrize(
        ("step", "fault", "place"),
        [
            ("train", "KeyError('thetta')", "client 0"),
            ("train", "EOFError('over')", "client 0"),
            ("receive", "FileNotFoundError(2, 'not there', 'weights.bin')", "receive"),
        ],
    )
    def test_debugging_shows_where_the_method_went_wrong(self, call: Call, step: str, fault: str, place: str) -> None:
        write(
            "tests_cli_bad.py",
            "from fedtailor.methods.fedavg import FedAvg\n"
            "class Bad(FedAvg):\n"
            f"    def {step}(self, *arguments):\n"
            f"        raise {fault}\n",
        )
        answer = call("run", "tests_cli_bad:Bad", *SMALL[:4], "--workers", 2, "--debug", "--out", "here")
        assert answer.code == 1
        lines = answer.err.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        where = next(number for number, line in enumerate(lines) if "tests_cli_bad.py" in line)
        assert lines[where] == f'  File "{Path("tests_cli_bad.py").resolve()}", line 4, in {step}'
        assert lines[where + 1].strip() == f"raise {fault}"
        assert lines[-2].startswith(fault.partition("(")[0])
        assert lines[-1] == f"In Bad, round 1, {place}."
        assert answer.out == ""
        write("tests_cli_bad.py", "from fedtailor.methods.fedavg import FedAvg as Bad\n")
        sys.modules.pop("tests_cli_bad")
        assert "1 of 1 rounds" in done(call("resume", "here", "--trust"))  # with the fault mended

    def test_what_a_user_can_mend_is_one_sentence_with_debugging_too(self, call: Call) -> None:
        assert "'mnist'" in refusal(call, "run", "fedavg", *SMALL, "--data", "mnits", "--debug")
        write(
            "tests_cli_bad.py",
            "from fedtailor import FedtailorError\n"
            "from fedtailor.methods.fedavg import FedAvg\n"
            "class Bad(FedAvg):\n"
            "    def train(self, client, message):\n"
            "        raise FedtailorError('This needs more clients.')\n",
        )
        answer = _ended(call, "run", "tests_cli_bad:Bad", *SMALL, "--debug")
        assert answer.err == "Error: This needs more clients.\n"


def _ended(call: Call, *words: object) -> Answer:
    """A run that was begun and then had to end: one sentence all the same."""
    answer = call(*words)
    assert answer.code == 2, answer
    assert len(answer.err.splitlines()) == 1, answer.err
    return answer


def test_the_sentence_is_one_line_on_a_narrow_page_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display.err, "width", 40)
    assert len(refusal(call, "run", "fedavg", "--data", "fashion-mnist")) > 40


TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "90000040 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(TORCH),
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 90000040 by",
        ),
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), r"OSError: \[Errno 12\] Cannot allocate memory"),
    ],
)
def test_memory_that_is_not_enough_is_one_sentence(
    call: Call, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("fedtailor.engines.simulation.Simulation.start", fail)
    answer = call("run", "fedavg", *SMALL)
    assert answer.code == 2
    assert re.fullmatch(
        rf"Error: There is not enough memory \({said}[^)]*\): take a smaller .+ had begun\.\n", answer.err
    )


def test_other_errors_keep_their_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of fedtailor's")

    monkeypatch.setattr("fedtailor.engines.simulation.Simulation.start", fail)
    with pytest.raises(RuntimeError, match="a fault of fedtailor's"):
        call("run", "fedavg", *SMALL)

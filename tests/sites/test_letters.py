"""Letters from sites that lie, and from servers that ask for too much: each is refused, and the run goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.messages import Evaluate, Message, Personal, Reply, Train, frame
from fedtailor.messages.letters import FAULTS, Letter, as_letter, as_reply, as_request, read_letter
from tests.sites.lies import LIES, changed
from tests.sites.parts import Federation, Recorded, heard

RUN = "trial-1"
LIAR = "south"  # client 1


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_and_the_run_goes_on(lie: str, tmp_path: Path) -> None:
    change, words = LIES[lie]
    federation = Federation(tmp_path, method="pgfed", rounds=3)

    def lying(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return change(answer) if site == LIAR and kind == "train" and round == 2 else answer

    with heard() as said:
        real = federation.run(Recorded(federation.sites(), lying))
    assert f"PGFed, round 2: client {LIAR} left out: " in said[0]
    assert words in said[0]
    assert said[1:] == [f"PGFed, round 3: client {LIAR} is back."]
    assert [record.failed for record in real.rounds] == [[], [1], []]
    assert all(tensor.isfinite().all() for tensor in real.simulation.server.state.values())
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"Jane Doe" not in written


def test_an_answer_of_an_earlier_round_is_not_taken_again(tmp_path: Path) -> None:
    federation, earlier = Federation(tmp_path, rounds=3), dict[str, bytes]()

    def replaying(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        if kind != "train" or site != LIAR:
            return answer
        return earlier.setdefault(site, answer) if round < 3 else earlier[site]

    with heard() as said:
        real = federation.run(Recorded(federation.sites(), replaying))
    assert "Its round is not the one that was asked for" in said[0]
    assert [record.failed for record in real.rounds] == [[], [1], [1]]


def test_an_evaluation_that_lies_is_missing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedavg", rounds=2)

    def lying(site: str, kind: str, round: int, answer: bytes) -> bytes | str:
        return changed(answer, measured=[]) if site == LIAR and kind.startswith("evaluate") and round == 2 else answer

    with heard() as said:
        real = federation.run(Recorded(federation.sites(), lying))
    assert [record.missing for record in real.rounds] == [[], [1]]
    assert said == [f"Client {LIAR} tells no metrics: averages are of the others."]


# --- what a site refuses ---


def answer_to(federation: Federation, kind: str, tensors: Message | None = None, **header: Any) -> tuple[str, str]:
    """The kind of the fault that a site tells, and what it wrote into its log."""
    site = federation.sites()["north"]
    answer = read_letter(site.answer(Letter(kind, header, tensors or {}).pack()))
    log = site.site.private / "site.log"
    return str(answer.header.get("fault", "")), log.read_text() if log.exists() else ""


def begun(federation: Federation) -> tuple[dict[str, Any], Message]:
    """The letter of the beginning that `north` got."""
    channel = Recorded(federation.sites())
    federation.run(channel)
    letter = next(read_letter(content) for name, content in channel.letters if read_letter(content).kind == "begin")
    return dict(letter.header), letter.tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, dict[str, Any], Message]:
    federation = Federation(tmp_path_factory.mktemp("federation"), method="fedper", rounds=1)
    return federation, *begun(federation)


def test_the_beginning_itself_is_taken(finished: tuple[Federation, dict[str, Any], Message]) -> None:
    federation, header, tensors = finished
    assert answer_to(federation, "begin", tensors, **header)[0] == ""


def other(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The header of a beginning with another setting of the experiment."""
    return lambda header: {"experiment": {**header["experiment"], name: value}}


def uncommon(name: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: {"common": {**header["common"], name: value}}


ASKED_TOO_MUCH: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str, str]] = {
    "a method of the server's": (other("method", "os:system"), "refused", "The method os:system is not of the"),
    "a network of the server's": (other("model", "evil:Net"), "refused", "The model evil:Net is not of the catalogue"),
    "a loss of the server's": (other("loss", "evil:loss"), "refused", "The loss evil:loss is not of the catalogue"),
    "a metric of the server's": (other("evaluation", {"metric": "a:b"}), "refused", "The metric a:b is not of the"),
    "another method": (other("method", "fedavg"), "refused", "asks for method fedavg, but the plan says fedper"),
    "other settings": (other("epochs", 50), "refused", "asks for epochs 50, but the plan says 1"),
    "other parts of the samples": (other("test", 0.9), "refused", "asks for test 0.9, but the plan says 0.2"),
    "another roster": (uncommon("sites", ["north", "south", "mine"]), "refused", "is not the plan's"),
    "another number": (lambda header: {"number": 2}, "refused", "is not the plan's"),
    "a path for a name": (uncommon("run", "../../tmp/x"), "letter", "run"),
    "a setting that there is not": (other("run_this", "x"), "letter", "run_this"),
    "no experiment": (lambda header: {"experiment": None}, "refused", "but the plan says"),
    "nothing in common": (lambda header: {"common": None}, "letter", "The letter of the beginning is wrong"),
}  # fmt: skip


@pytest.mark.parametrize("attempt", ASKED_TOO_MUCH)
def test_a_site_refuses_what_its_plan_does_not_say(
    attempt: str, finished: tuple[Federation, dict[str, Any], Message]
) -> None:
    federation, header, tensors = finished
    change, kind, words = ASKED_TOO_MUCH[attempt]
    fault, log = answer_to(federation, "begin", tensors, **{**header, **change(header)})
    assert fault == kind
    assert words in log.rpartition("+00:00 ")[2]


def test_paths_and_places_of_the_server_mean_nothing_at_a_site(
    finished: tuple[Federation, dict[str, Any], Message], tmp_path: Path
) -> None:
    federation, header, tensors = finished
    there = {"data_dir": str(tmp_path), "device": "cuda:7", "engine": "processes", "workers": 99, "states": "disk"}
    asked = {**header["experiment"], **there, "weights": str(tmp_path / "weights.safetensors")}
    fault, log = answer_to(federation, "begin", tensors, **{**header, "experiment": asked})
    assert fault == "refused" or not fault, log
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("vector", [torch.zeros(3), torch.full((3,), torch.nan), None])
def test_a_vector_that_does_not_fit_is_refused(
    vector: torch.Tensor | None, finished: tuple[Federation, dict[str, Any], Message]
) -> None:
    federation, header, _ = finished
    assert answer_to(federation, "begin", {} if vector is None else {"initial": vector}, **header)[0] == "letter"


def test_a_site_hands_out_no_model(finished: tuple[Federation, dict[str, Any], Message]) -> None:
    federation, header, _ = finished
    work = {"run": header["common"]["run"], "round": 1, "client": 0, "accepted": 1, "durable": 1}
    for asked in ("personal", "adapt", "state", "__class__"):
        assert answer_to(federation, "work", {"theta": torch.zeros(1)}, **{**work, "asked": asked})[0] == "refused"
    for wrong in ({"client": 1}, {"run": "other"}, {"round": "1"}, {"accepted": -1}, {"round": 2**70}):
        fault, _ = answer_to(
            federation, "work", {"theta": torch.zeros(1)}, **{**work, "asked": "train", "measure": 0, **wrong}
        )
        assert fault in ("letter", "state")
    assert answer_to(federation, "shell")[0] == "letter"
    fault, log = answer_to(federation, "work", **{**work, "asked": "evaluate", "round": 2})
    assert fault == "refused"
    assert log.rstrip().endswith("The server asks for more than 1 rounds.")


def test_anything_else_is_answered_too(finished: tuple[Federation, dict[str, Any], Message]) -> None:
    site = finished[0].sites()["north"]
    for letter in (b"", b"\x80\x04\x95", b"x" * 1000, frame({}, kind=3), frame({"x": torch.ones(2)})):
        assert read_letter(site.answer(letter)).header == {"site": "north", "fault": "letter"}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({}, "", "Round 1 is done"),
        ({"round": 2}, "refused", "asks for more than 1 rounds"),
        ({"client": 1}, "letter", "The letter is for client 1 of the run"),
    ],
)
def test_a_site_works_for_its_own_number_in_the_rounds_of_the_plan_alone(
    change: dict[str, int], kind: str, words: str, tmp_path: Path
) -> None:
    federation = Federation(tmp_path, method="fedavg", rounds=1)
    channel = Recorded(federation.sites())
    federation.run(channel)
    letters = (read_letter(content) for name, content in channel.letters if name == "north")
    work = next(letter for letter in letters if letter.header.get("asked") == "train")
    fault, log = answer_to(federation, "work", work.tensors, **{**work.header, **change})
    assert fault == kind
    assert words in log.rpartition("+00:00 ")[2]


def test_metrics_are_rounded_or_withheld_as_the_site_says(tmp_path: Path) -> None:
    rounded = Federation(tmp_path / "rounded", site={"metrics": "rounded"}, rounds=1).run()
    for measured in next(iter(rounded.clients)).results.values():
        assert all(round(value, 2) == value for value in (measured["test"].loss, measured["test"].accuracy) if value)
    with heard():
        withheld = Federation(tmp_path / "none", plan={"privacy": {"metrics": "none"}}, rounds=1).run()
    assert withheld.rounds[0].missing == [0, 1, 2]
    assert withheld.rounds[0].accuracy is None
    assert withheld.finished


def test_a_site_may_allow_other_methods(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedper", rounds=1, site={"allow": ["fedavg"]})
    header, tensors = begun(federation)
    asked = {**header["experiment"], "method": "fedavg", "parameters": {}, "epochs": 2}
    assert answer_to(federation, "begin", tensors, **{**header, "experiment": asked})[0] == ""
    asked["method"] = "ditto"
    assert answer_to(federation, "begin", tensors, **{**header, "experiment": asked})[0] == "refused"


# --- requests and replies as letters ---


def test_a_request_comes_back_as_it_was() -> None:
    for request in (Train(3, 1, {"theta": torch.ones(2)}, 2, True), Evaluate(3, 1, {}, 2)):
        again, durable = as_request(read_letter(as_letter(request, RUN, 1).pack()))
        assert (type(again), again.round, again.client, again.version, durable) == (type(request), 3, 1, 2, 1)
        assert again.message.keys() == request.message.keys()


def test_what_was_read_lies_at_an_aligned_address() -> None:
    letter = Letter("work", {}, {"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(7, dtype=torch.uint8)})
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read_letter(letter.pack()).tensors.values())


def test_only_train_and_evaluate_become_letters() -> None:
    with pytest.raises(StopIteration):
        as_letter(Personal(1, 0, {}), RUN, 0)


def test_a_fault_has_none_of_the_sites_words() -> None:
    request = Train(2, 0, {}, 1)
    content = Letter("answer", {"site": "north", "fault": "state"}).pack()
    assert as_reply(content, request, RUN, "north") == Reply((0,), error=FAULTS["state"])

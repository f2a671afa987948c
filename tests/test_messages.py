"""What crosses between server and site: named tensors, counted and framed."""

import pickle
from dataclasses import fields

import pytest
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.messages import (
    NEVER,
    Adapt,
    Declaration,
    Evaluate,
    EvaluateShared,
    Personal,
    Predict,
    Reply,
    Request,
    Train,
    check_finite,
    check_tensors,
    copied,
    frame,
    message_bytes,
    unframe,
)
from fedtailor.messages.letters import as_letter
from tests.helpers import assert_same

KINDS = {
    "vector": torch.randn(37, generator=torch.Generator().manual_seed(0)),
    "matrix": torch.arange(15, dtype=torch.float64).view(5, 3).T,  # not contiguous
    "scalar": torch.tensor(3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "nothing": torch.empty(0, 4),
}


def test_bytes_are_those_of_the_tensors() -> None:
    assert message_bytes({}) == 0
    assert message_bytes(KINDS) == 37 * 4 + 15 * 8 + 8 + 3 * 2 + 2


def test_a_copy_shares_no_memory_and_no_history() -> None:
    theta = torch.ones(3, requires_grad=True)
    copies = copied({**KINDS, "theta": theta * 2})
    for name, tensor in KINDS.items():
        assert torch.equal(copies[name], tensor)
        assert copies[name].is_contiguous()
        assert tensor.numel() == 0 or copies[name].data_ptr() != tensor.data_ptr()
    assert not copies["theta"].requires_grad


def test_a_frame_brings_back_what_was_put_in_and_refuses_other_headers() -> None:
    content = frame(KINDS, sender="client-3", round=7)
    assert_same(unframe(content, "It"), KINDS)
    assert_same(unframe(content, "It", sender="client-3", round=7), KINDS)
    assert unframe(frame({}, round=1), "It", round=1) == {}
    for expected, says in (
        ({"round": 8}, "its round is 7, not 8"),
        ({"sender": "client-4", "round": 7}, "its sender is client-3, not client-4"),
        ({"version": 2}, "its version is None, not 2"),
    ):
        with pytest.raises(ft.FedtailorError, match=f"^It is not what it should be: {says}"):
            unframe(content, "It", **expected)


def test_equal_tensors_have_equal_frames() -> None:
    """Checkpoints of a run and of the same run resumed are the same bytes."""
    assert frame(KINDS, round=1) == frame({name: tensor.clone() for name, tensor in KINDS.items()}, round=1)


@pytest.mark.parametrize("cut", [0, 4, 8, 60, -1])
def test_a_damaged_frame_is_refused_in_one_sentence(cut: int) -> None:
    with pytest.raises(ft.FedtailorError, match=r"^The file x cannot be read"):
        unframe(frame(KINDS, round=1)[:cut], "The file x", round=1)


def test_a_frame_with_a_flipped_bit_is_refused_wherever_it_is() -> None:
    content = frame({"theta": torch.ones(5)}, round=1)
    for place in range(len(content)):
        with pytest.raises(ft.FedtailorError, match="The file x"):
            unframe(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], "The file x", round=1)


def test_a_file_for_which_there_is_no_memory_is_an_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As safetensors has it: no Exception, so nothing that expects one would see it."""

    def panic(*_: object) -> bytes:
        raise PanicException("PyObject pointer is null")

    monkeypatch.setattr("fedtailor.messages.save", panic)
    with pytest.raises(MemoryError):
        frame({"theta": torch.ones(2)})


def test_anything_but_named_tensors_is_refused() -> None:
    check_tensors("it", KINDS)
    with pytest.raises(TypeError, match="it holds 'rate', a float; messages and states are named tensors"):
        check_tensors("it", {"rate": 0.1})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="it holds 3, a Tensor"):
        check_tensors("it", {3: torch.ones(1)})  # type: ignore[dict-item]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    check_finite({"it": KINDS})
    numbers = torch.ones(1000)
    numbers[617] = bad
    with pytest.raises(ValueError, match="it has NaN or infinite numbers in 'theta'"):
        check_finite({"it": {"fine": torch.ones(2), "theta": numbers}})


def test_large_numbers_whose_sum_is_infinite_are_finite() -> None:
    check_finite({"it": {"theta": torch.full((100,), 3e38)}})


MESSAGE: dict[str, Tensor] = {"theta": torch.ones(2)}


def test_a_request_names_its_clients() -> None:
    for kind in (Train, Evaluate, Personal, Adapt):
        assert kind(1, 4, MESSAGE).clients == (4,)
        assert kind(1, 4, MESSAGE).version == NEVER
    assert EvaluateShared(1, 4, MESSAGE, others=(5, 7)).clients == (4, 5, 7)


def test_nothing_else_crosses() -> None:
    """A new field of a request or a reply is a new thing that leaves a client or the server: add it here knowingly."""
    assert [field.name for field in fields(Request)] == ["round", "client", "message", "version"]
    assert [field.name for field in fields(Train)] == ["round", "client", "message", "version", "measure", "share"]
    assert [field.name for field in fields(EvaluateShared)] == ["round", "client", "message", "version", "others"]
    assert [field.name for field in fields(Predict)] == ["round", "client", "message", "version", "inputs"]
    with pytest.raises(StopIteration):  # there is no such letter
        as_letter(Predict(1, 0, {}), "run", 0)
    for kind in (Evaluate, Personal, Adapt):
        assert fields(kind) == fields(Request)
    reply = ["clients", "upload", "version", "measured", "bytes_up", "differentiated", "seconds", "error", "cause"]
    reply += ["parts"]  # within one place; no letter has them
    assert [field.name for field in fields(Reply)] == reply
    assert [field.name for field in fields(Declaration)] == ["name", "n_samples", "n_classes", "fingerprint"]


def test_requests_and_replies_can_be_sent() -> None:
    for thing in (Train(3, 1, {}, 2, True), EvaluateShared(3, 1, {}, others=(2,)), Reply((1,), version=3, seconds=0.5)):
        assert pickle.loads(pickle.dumps(thing)) == thing

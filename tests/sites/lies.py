"""Lies that a site may tell in its answers, and canaries in the rows of a table: with and without a network."""

import json
import struct
from collections.abc import Callable
from typing import Any

import torch

from fedtailor.messages import Message
from fedtailor.messages.letters import FAULTS, Letter, read_letter
from tests.sites.parts import tables

NUMBER = 98765.4321
TEXT = "CANARY-7731"


def with_canary() -> dict[str, Any]:
    """Tables of which one row, for training, has a canary in every column but the label."""
    data = tables()
    for column in data["south"]:
        if column != "label":
            data["south"].loc[8, column] = NUMBER if column.startswith("f") else TEXT
    return data


def forms() -> list[bytes]:
    """The canaries as a file may have them: as text, and as numbers."""
    return [TEXT.encode(), b"98765.4", struct.pack("<d", NUMBER), struct.pack("<f", NUMBER)]


def changed(answer: bytes, tensors: Callable[[Message], Message] = dict, **header: Any) -> bytes:
    """An answer with other tensors, or another header."""
    letter = read_letter(answer)
    return Letter(letter.kind, {**letter.header, **header}, tensors(letter.tensors)).pack()


def each(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    return lambda tensors: {name: function(tensor) for name, tensor in tensors.items()}


def claiming(answer: bytes) -> bytes:
    """An answer whose header claims 10⁹ numbers that are not there."""
    length = int.from_bytes(answer[:8], "little")
    header = json.loads(answer[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [10**9]
    header[name]["data_offsets"] = [0, 4 * 10**9]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + answer[8 + length :]


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "other names": (lambda a: changed(a, lambda t: {f"{n}!": x for n, x in t.items()}), "upload"),
    "one more tensor": (lambda a: changed(a, lambda t: {**t, "rows": torch.zeros(3)}), "upload"),
    "nothing": (lambda a: changed(a, lambda t: {}), "upload"),
    "another shape": (lambda a: changed(a, each(lambda x: x[..., :-1].clone() if x.dim() else x[None])), "shape"),
    "another type": (lambda a: changed(a, each(lambda x: x.double())), "float64"),
    "whole numbers": (lambda a: changed(a, each(lambda x: x.long())), "int64"),
    "NaN": (lambda a: changed(a, each(lambda x: torch.full_like(x, torch.nan))), "NaN or infinite"),
    "infinity": (lambda a: changed(a, each(lambda x: torch.full_like(x, torch.inf))), "NaN or infinite"),
    "10⁹ claimed numbers": (claiming, "its answer is not used: The answer cannot be read"),
    "a damaged letter": (lambda a: a[:-1] + bytes([a[-1] ^ 1]), "its checksum does not fit"),
    "half a letter": (lambda a: a[: len(a) // 2], "The answer cannot be read"),
    "no letter": (lambda a: b"GET / HTTP/1.1", "The answer cannot be read"),
    "an empty one": (lambda a: b"", "The answer cannot be read"),
    "another site": (lambda a: changed(a, site="north"), "It is not of this site"),
    "another site's number": (lambda a: changed(a, client=0), "Its client is not the one"),
    "a round before": (lambda a: changed(a, round=1), "Its round is not the one"),
    "another run": (lambda a: changed(a, run="other"), "Its run is not the one"),
    "an evaluation": (lambda a: changed(a, asked="evaluate"), "Its asked is not the one"),
    "a state of another round": (lambda a: changed(a, version=9), "Its state is of another round"),
    "a state of no round": (lambda a: changed(a, version="../../x"), "The letter says no version"),
    "metrics of its own making": (lambda a: changed(a, measured=[{"test": {"secret": 1.0}}]), "Its metrics are none"),
    "metrics in words": (lambda a: changed(a, measured=[{"test": {"loss": "low"}}]), "Its metrics are none"),
    "metrics that are a number": (lambda a: changed(a, measured=7), "Its metrics are none"),
    "work of less than nothing": (lambda a: changed(a, differentiated=-1), "The letter says no differentiated"),
    "a fault of its own wording": (lambda a: changed(a, fault="Jane Doe, 1950"), FAULTS["work"]),
}

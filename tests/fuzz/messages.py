"""Fuzzing of what crosses: replies and frames of hostile clients at the server, letters of a hostile server at a site.

The server's loop leaves such clients out, or ends with one sentence; a site answers with the kind of a fault.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.simulation import Simulation
from fedtailor.messages import Message, Reply, Request, Train, frame, unframe
from fedtailor.messages.letters import Letter, read_letter
from fedtailor.messages.transport import Relay
from fedtailor.methods import CATALOGUE
from fedtailor.training.isolation import isolated
from tests.fuzz.data_files import JSON
from tests.fuzz.engine import Luck, Target, mutated
from tests.helpers import make_simulation
from tests.sites.parts import Federation, Recorded

SETTINGS: dict[str, Any] = {"data": "digits", "clients": 5, "max_train": 8, "model": "mlp:4", "epochs": 1, "rounds": 99}
TYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)
KEPT = tempfile.TemporaryDirectory()  # the federation of sites, until the process ends


def strange_tensor(rng: Random, like: Tensor | None) -> Any:
    """Make a tensor that is not the one that was asked for."""
    shape = tuple(rng.choice([(), (0,), (1,), (3,), (2, 3), (1, 1, 1), (100_000,)]))
    if like is None or rng.random() < 0.3:
        return torch.ones(shape, dtype=rng.choice(TYPES))
    changed = like.clone()
    match rng.randrange(8):
        case 0 if changed.is_floating_point() and changed.numel():
            changed.view(-1)[rng.randrange(changed.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
        case 1:
            changed = changed * rng.choice([1000, -1, 0, 1e6])
        case 2:
            changed = torch.full(changed.shape, 3e38)
        case 3:
            changed = changed.to(rng.choice(TYPES))
        case 4:
            changed = changed.reshape(-1)[: max(0, changed.numel() - 1)]
        case 5:
            changed = changed[None]
        case 6:
            return rng.choice([None, 3, "text", [1.0], changed.tolist()])
        case _:
            changed = torch.cat([changed.reshape(-1)] * 2)
    return changed


def strange_upload(rng: Random, upload: Message) -> dict[Any, Any]:
    changed: dict[Any, Any] = dict(upload)
    for _ in range(rng.randint(1, 3)):
        name: Any = rng.choice([*upload, "secret", "", "\x1b[31m", "a" * 1000, 7])
        if rng.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = strange_tensor(rng, upload.get(name))
    return changed


class Hostile(Relay):
    """A transport whose clients are honest half of the time."""

    def __init__(self, sites: Any, luck: Luck) -> None:
        super().__init__(sites)
        self.luck = luck

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        training, rng = any(isinstance(request, Train) for request in requests), self.luck.harm
        for reply in super().ask(requests):
            if not training or not self.luck.chance(0.5):
                yield reply
                continue
            match rng.randrange(6):
                case 0:
                    yield Reply(reply.clients, error=rng.choice(["off", "[bold]", "\x1b]0;x\x07", "x" * 9999]))
                case 1:
                    continue  # it never answers
                case 2:
                    yield from (reply, reply)
                case 3:
                    yield Reply((rng.choice([-1, 99]),), reply.upload)
                case _:
                    reply.upload = strange_upload(rng, reply.upload)
                    yield reply


def replies(luck: Luck, folder: Path) -> None:
    """A few rounds of any method with hostile clients."""
    with isolated():
        method, seed = luck.right.choice(sorted(CATALOGUE)), luck.right.randrange(5)
        simulation: Simulation = make_simulation(method, **SETTINGS, seed=seed)
        transport = Hostile(simulation.sites, luck)
        for number in range(1, 4):
            simulation.loop.round(number, transport)


def frames(luck: Luck, folder: Path) -> None:
    content = frame({"theta": torch.arange(5.0), "n": torch.tensor(3)}, sender="server", round=3)
    unframe(mutated(luck, content), "The frame", sender="server", round=3)


@cache
def _federation() -> tuple[Federation, list[Letter]]:
    """A federation that has run, and the letters that a site of it got."""
    federation = Federation(Path(KEPT.name), method="fedper", rounds=1)
    channel = Recorded(federation.sites())
    federation.run(channel)
    return federation, [read_letter(content) for name, content in channel.letters if name == "north"]


def letters(luck: Luck, folder: Path) -> None:
    """A letter of the server, from hello to the model's end, at a site that has been asked all of them before."""
    federation, known = _federation()
    letter, rng = luck.right.choice(known), luck.harm
    header, tensors = json.loads(json.dumps(letter.header)), dict(letter.tensors)
    while luck.chance(0.6):
        place: Any = header
        while isinstance(place, dict | list) and place:
            key = rng.choice(sorted(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if rng.random() < 0.4 or not isinstance(place[key], dict | list):
                place[key] = rng.choice([value for value in JSON if value != "\ud800"])  # a text that nobody can send
                break
            place = place[key]
    if luck.chance(0.3):
        tensors = {str(name)[:50]: x for name, x in strange_upload(rng, tensors).items() if isinstance(x, Tensor)}
    kind = luck.instead(letter.kind, ("hello", "begin", "work", "end", "state", ""), 0.1)
    content = mutated(luck, Letter(kind, header, tensors).pack(), 0.3)
    answer = read_letter(federation.sites()["north"].answer(content))
    if "fault" in answer.header:
        raise FedtailorError(str(answer.header["fault"]))


TARGETS: dict[str, Target] = {
    "replies to the server": replies,
    "frames": frames,
    "letters to a site": letters,
}

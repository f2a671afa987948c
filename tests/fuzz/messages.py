"""Replies and frames of hostile clients: the server's loop leaves them out, or ends with one sentence."""

import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.engines.simulation import Simulation
from fedtailor.messages import Message, Reply, Request, Train, frame, unframe
from fedtailor.messages.transport import Relay
from fedtailor.methods import CATALOGUE
from fedtailor.training.isolation import isolated
from tests.helpers import make_simulation

SETTINGS: dict[str, Any] = {"data": "digits", "clients": 5, "max_train": 8, "model": "mlp:4", "epochs": 1, "rounds": 99}
TYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def strange_tensor(luck: random.Random, like: Tensor | None) -> Any:
    """Make a tensor that is not the one that was asked for."""
    shape = tuple(luck.choice([(), (0,), (1,), (3,), (2, 3), (1, 1, 1), (100_000,)]))
    if like is None or luck.random() < 0.3:
        return torch.ones(shape, dtype=luck.choice(TYPES))
    changed = like.clone()
    match luck.randrange(8):
        case 0 if changed.is_floating_point() and changed.numel():
            changed.view(-1)[luck.randrange(changed.numel())] = luck.choice([float("nan"), float("inf"), -float("inf")])
        case 1:
            changed = changed * luck.choice([1000, -1, 0, 1e6])
        case 2:
            changed = torch.full(changed.shape, 3e38)
        case 3:
            changed = changed.to(luck.choice(TYPES))
        case 4:
            changed = changed.reshape(-1)[: max(0, changed.numel() - 1)]
        case 5:
            changed = changed[None]
        case 6:
            return luck.choice([None, 3, "text", [1.0], changed.tolist()])
        case _:
            changed = torch.cat([changed.reshape(-1)] * 2)
    return changed


def strange_upload(luck: random.Random, upload: Message) -> dict[Any, Any]:
    changed: dict[Any, Any] = dict(upload)
    for _ in range(luck.randint(1, 3)):
        name: Any = luck.choice([*upload, "secret", "", "\x1b[31m", "a" * 1000, 7])
        if luck.random() < 0.2:
            changed.pop(name, None)
        else:
            changed[name] = strange_tensor(luck, upload.get(name))
    return changed


class Hostile(Relay):
    """A transport whose clients are honest half of the time."""

    def __init__(self, sites: Any, luck: random.Random) -> None:
        super().__init__(sites)
        self.luck = luck

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        training = any(isinstance(request, Train) for request in requests)
        for reply in super().ask(requests):
            if not training or self.luck.random() < 0.5:
                yield reply
                continue
            match self.luck.randrange(6):
                case 0:
                    yield Reply(reply.clients, error=self.luck.choice(["off", "[bold]", "\x1b]0;x\x07", "x" * 9999]))
                case 1:
                    continue  # it never answers
                case 2:
                    yield from (reply, reply)
                case 3:
                    yield Reply((self.luck.choice([-1, 99]),), reply.upload)
                case _:
                    reply.upload = strange_upload(self.luck, reply.upload)
                    yield reply


def _rounds(method: str, luck: random.Random) -> None:
    """A few rounds with hostile clients."""
    with isolated():
        simulation: Simulation = make_simulation(method, **SETTINGS, seed=luck.randrange(5))
        transport = Hostile(simulation.sites, luck)
        for number in range(1, 5):
            simulation.loop.round(number, transport)


def _frame(luck: random.Random) -> None:
    """A frame with some bytes changed, cut off or added."""
    content = bytearray(frame({"theta": torch.arange(5.0), "n": torch.tensor(3)}, sender="server", round=3))
    for _ in range(luck.randint(1, 4)):
        match luck.randrange(4):
            case 0 if content:
                content[luck.randrange(len(content))] = luck.randrange(256)
            case 1:
                del content[luck.randrange(len(content) + 1) :]
            case 2:
                content += luck.randbytes(luck.randrange(40))
            case _:
                content[:8] = luck.choice([b"\xff" * 8, bytes(8), luck.randbytes(8)])
    unframe(bytes(content), "The frame", sender="server", round=3)


def fuzz(seed: int, seconds: float) -> dict[str, Any]:
    """Try for so long; return how often each was tried, and the traceback of everything but a FedtailorError."""
    luck, end = random.Random(seed), time.monotonic() + seconds
    counts: Counter[str] = Counter()
    failures: list[str] = []
    methods = sorted(CATALOGUE)
    while time.monotonic() < end and len(failures) < 10:
        method = luck.choice(methods)
        for kind, work in (("rounds", lambda: _rounds(method, luck)), *([("frames", lambda: _frame(luck))] * 50)):  # noqa: B023
            counts[kind] += 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    work()
            except FedtailorError:
                counts[f"{kind} refused"] += 1
            except Exception:
                failures.append(f"{kind} of {method}:\n{traceback.format_exc()}")
    return {"counts": dict(counts), "failures": failures}

"""What a run on a cluster is compared with, and what it leaves behind."""

import re
import time
from pathlib import Path
from typing import Any

import ray

import fedtailor as ft
from tests.helpers import assert_same, final, numbers

SMALL: dict[str, Any] = {"data": "digits", "clients": 6, "model": "mlp:16", "rounds": 3}


def actors(title: bytes = b"ray::Actor.*") -> set[int]:
    """The processes of our actors: all, or those of this title, which says what one is doing."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if re.fullmatch(title, path.read_bytes().strip(b"\0 ")):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def gone(processes: set[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{number}").exists() for number in processes):
            return True
        time.sleep(0.05)
    return False


def check_same(one: ft.RunResult, other: ft.RunResult) -> None:
    assert numbers(one.rounds) == numbers(other.rounds)
    assert_same(final(one), final(other))


def plain(method: str = "fedavg") -> ft.RunResult:
    return ft.run(method, engine="in-process", **SMALL)


def processes() -> set[int]:
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def store_bytes() -> list[int]:
    """The bytes in each node's object store."""
    from ray._private.internal_api import node_stats

    living: list[Any] = [node for node in ray.nodes() if node["Alive"]]
    stats = [node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False) for node in living]
    return [node.store_stats.object_store_bytes_used for node in stats]

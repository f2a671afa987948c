"""Secure aggregation, killed at its messages: a site or the server loses all its memory before or after any letter.

A site that was killed is made again of its directory, and the letter is repeated, as its worker's parent does; a server
goes on from its checkpoint. What a kill takes with it is a session's secrets: a site then counts as gone in that round.
So a round may have fewer sites, or none; what it may never have is a wrong sum, and nothing may hang. (The kills are of
objects in one process, at the boundaries of messages: what is on the disk is the same as after kill -9.)
"""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedtailor.engines.runs import load
from fedtailor.messages.letters import read_letter
from fedtailor.sites.local_site import LocalSite
from fedtailor.sites.site_file import read_site
from tests.kills.engine import Attempt
from tests.sites.parts import Federation, table
from tests.sites.secure_sums import watched, write_kit

NAMES, ROUNDS = ("north", "south", "west"), 3
METHODS = ("fedavg", "ditto", "scaffold")
STEPS = ("train", "shares", "masked", "agree", "open")
MOMENTS = ("before", "after")  # the letter is answered


class Killed(KeyboardInterrupt):
    """The server is gone."""


class Mortal:
    """A channel on which sites and the server are killed at chosen letters: (who, step, moment) by round."""

    def __init__(self, root: Path, kills: Mapping[int, list[tuple[str, str, str]]]) -> None:
        self.root, self.left, self.made = root, {number: list(of) for number, of in kills.items()}, 0
        self.sites = {name: self.born(name) for name in NAMES}

    def born(self, name: str) -> LocalSite:
        return LocalSite(read_site(self.root / name / "site.toml"))

    def dies(self, round: int, *what: str) -> bool:
        """Find out whether this kill is due; each is done once."""
        with suppress(ValueError):
            self.left.get(round, []).remove(what)  # type: ignore[arg-type]
            self.made += 1
            return True
        return False

    def ask(self, letters: Mapping[str, bytes], deadline: float | None) -> Iterator[tuple[str, bytes | str]]:
        for name, letter in letters.items():
            asked = read_letter(letter)
            step, round = str(asked.header.get("asked")), int(asked.header.get("round", 0))
            if self.dies(round, "server", step, "before"):
                raise Killed
            if self.dies(round, name, step, "before"):
                self.sites[name] = self.born(name)
            answer = self.sites[name].answer(letter)
            if self.dies(round, name, step, "after"):
                self.sites[name] = self.born(name)
                answer = self.sites[name].answer(letter)
            if self.dies(round, "server", step, "after"):
                raise Killed
            yield name, answer


def attempt(rng: random.Random, folder: Path) -> Attempt:
    """Kill three to nine times, at messages of the protocol."""
    method, kills = rng.choice(METHODS), dict[int, list[tuple[str, str, str]]]()
    for _ in range(rng.randint(3, 9)):
        chosen = (rng.choice(("server", *NAMES)), rng.choice(STEPS), rng.choice(MOMENTS))
        kills.setdefault(rng.randint(1, ROUNDS), []).append(chosen)
    data = {name: table(seed, rows=40, numbers=2) for seed, name in enumerate(NAMES)}
    settings: dict[str, Any] = {"rounds": ROUNDS, "model": "mlp:4", "evaluate_every": 0, "secure": True}
    federation = Federation(folder, data, method, **settings)
    for name in NAMES:
        write_kit(folder / name, name)
    channel, fault = Mortal(folder, kills), ""
    what = f"{method}: " + "; ".join(f"round {n}, {' '.join(one)}" for n in sorted(kills) for one in kills[n])
    with watched() as sums, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for _ in range(10):
            try:
                federation.run(channel)
                break
            except Killed:
                continue
            except AssertionError as error:
                fault = str(error)
                break
    rounds = load(folder / "run").rounds if not fault else []
    counted = {number for number, _ in sums.opened} | {number for number, _ in sums.closed}
    if not fault and ([record.round for record in rounds] != [1, 2, 3] or counted != {1, 2, 3}):
        fault = f"{len(rounds)} rounds of {ROUNDS} were recorded, and {sorted(counted)} were opened or given up"
    return Attempt(what, channel.made, fault)

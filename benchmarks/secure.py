"""What secure aggregation costs in a round, by the length of the upload and the number of sites: `python -m
benchmarks.secure`.

Processor seconds and bytes of one site, and processor seconds of the server. All sites go through all steps, with
certificates of their own; one of them masks an upload of the whole length, as all would on machines of their own. The
server adds up as many vectors and takes the masks off: when all are there, and when one is gone after its shares. It is
no part of `make bench`, as it needs the extra `nvflare`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from benchmarks.measuring import table, timed
from fedtailor.client.secure_party import Party
from fedtailor.messages import Agree, Masked, Message, Open, Secure, Shares, State, as_bytes, joined, message_bytes
from fedtailor.privacy.masks import threshold
from fedtailor.server.aggregation.secure import SecureAggregator
from fedtailor.sites.identity import Certified
from tests.sites.secure_sums import write_kit

LENGTHS, SITES = (15_000, 600_000, 11_000_000), (3, 10, 50)
FEW = 16  # numbers of the uploads that are not measured


class Round:
    """One round of some sites, of which the last `gone` are gone after their shares."""

    def __init__(self, length: int, certified: list[Certified], gone: int) -> None:
        self.count, self.length, self.there = len(certified), length, [*range(len(certified) - gone)]
        names = [f"s{number}" for number in range(self.count)]
        self.parties = [Party("run", names, n, certified[n], lambda _: [*range(self.count)]) for n in range(self.count)]
        self.site = self.server = 0.0  # processor seconds
        self.up = self.down = 0  # bytes of the first site

    def ask(self, step: type[Secure], messages: Mapping[int, Message]) -> dict[int, State]:
        """Have sites take a step; count what the first one does."""
        answers: dict[int, State] = {}
        for number, message in messages.items():
            request = step(1, number, message)
            took = timed(lambda n=number, x=request: answers.update({n: self.parties[n].answer(x)}))  # type: ignore[misc]
            if number == 0:
                self.site, self.down = self.site + took.cpu, self.down + message_bytes(message)
                self.up += message_bytes(answers[0])
        return answers

    def play(self) -> "Round":
        """Do all steps."""
        numbers = [*range(self.count)]
        given = {n: self.parties[n].begin(1, torch.zeros(FEW if n else self.length).long()) for n in numbers}
        keys = {n: as_bytes(each["key"]) for n, each in given.items()}
        self.up += message_bytes(given[0])
        shares = self.ask(Shares, dict.fromkeys(numbers, joined(given)))
        mine = {n: {str(m): shares[m][str(n)] for m in numbers if m != n} for n in self.there}
        y = self.ask(Masked, mine)[0]["masked"].numpy().view(np.uint64)
        listed = {"survivors": torch.tensor(self.there)}
        signed = self.ask(Agree, dict.fromkeys(self.there, listed))
        signatures = {str(n): each["signature"] for n, each in signed.items()}
        handed = self.ask(Open, dict.fromkeys(self.there, signatures))
        aggregator = SimpleNamespace(needs=threshold(self.count), _server=SimpleNamespace(round=1, warn=print))
        total = np.zeros(self.length, np.uint64)

        def open_sum() -> None:
            for _ in self.there:
                np.add(total, y, out=total)
            SecureAggregator._unmask(cast(SecureAggregator, aggregator), total, keys, numbers, self.there, handed)

        self.server = timed(open_sum).cpu
        return self


def main() -> None:
    """Print the table. A number as argument leaves out longer uploads."""
    longest, rows = int(sys.argv[1]) if len(sys.argv) > 1 else max(LENGTHS), []
    with TemporaryDirectory() as folder:
        for number in range(max(SITES)):
            write_kit(Path(folder) / f"s{number}", f"s{number}")
        certified = [Certified(Path(folder) / f"s{n}" / "kit", f"s{n}") for n in range(max(SITES))]
        for length in (length for length in LENGTHS if length <= longest):
            for count in SITES:
                all_there, one_gone = (Round(length, certified[:count], gone).play() for gone in (0, 1))
                seconds = (all_there.site, all_there.server, one_gone.server)
                sizes = (f"{all_there.up:,}", f"{4 * length:,}", f"{all_there.down:,}")
                rows.append((f"{length:,}", str(count), *(f"{each:.2f}" for each in seconds), *sizes))
    columns = ["d", "sites", "site, s", "server, s", "one gone, s", "bytes up", "plain", "more bytes down"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()

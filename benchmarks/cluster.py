"""What a request costs on Ray, beside its work: against worker processes of the same machine.

    python -m benchmarks.cluster

The clients do nothing: each gets a vector, which is the same for all, and its own state, and returns an upload and a
state of the same size. There is one worker, so that a request's time is the whole way there and back. The server's
share of it, by the processor, bounds the requests of any number of actors. The transports take turns, and the best of
several rounds counts. Ray listens on all interfaces while this runs.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measuring import Seconds, best_of, table, timed
from fedtailor.engines.ray_session import connected
from fedtailor.engines.transports import make_transport
from fedtailor.messages import Declaration, Reply, Request, State, Train
from fedtailor.messages.transport import Transport
from fedtailor.training.isolation import isolated

SIZES = (15_010, 600_010, 4_500_010)  # parameters of a network


@dataclass
class Doing:
    """Sites that do nothing with a vector of so many numbers."""

    length: int

    def declare(self) -> list[Declaration]:
        return []

    def without_states(self) -> "Doing":
        return self

    def on(self, device: torch.device) -> "Doing":
        return self

    def split(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def size(self, request: Request) -> int:
        return 1

    def begin(self, request: Request) -> State:
        return {"own": torch.ones(self.length)}

    def work(self, request: Request, state: State) -> tuple[Reply, State]:
        return Reply(request.clients, {"theta": request.message["theta"]}), state

    def finish(self, request: Request, reply: Reply, state: State) -> list[Reply]:
        assert reply.upload["theta"].shape == state["own"].shape
        return [reply]

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        return (reply for asked in requests for reply in self.finish(asked, *self.work(asked, self.begin(asked))))

    def close(self) -> None: ...

    def accept(self, clients: Sequence[int], /) -> None: ...

    def save(self) -> None: ...

    def prune(self) -> None: ...

    def restore(self, versions: Mapping[int, int], sweep: bool = True) -> None: ...


def ask(transport: Transport, size: int, count: int) -> None:
    message = {"theta": torch.ones(size)}
    for reply in transport.ask([Train(1, client, message) for client in range(count)]):
        assert not reply.error


def run(repeat: int, requests: int, sizes: Sequence[int] = SIZES) -> None:
    """Measure, and print two tables."""
    rows, started = [], []
    with isolated(), ExitStack() as stack:
        begin = time.perf_counter()
        stack.enter_context(connected(None, 1))
        started.append(["Ray on this machine", f"{time.perf_counter() - begin:.1f}"])
        for size in sizes:
            with ExitStack() as of_size:
                transports: dict[str, Transport] = {}
                for engine, title in (("processes", "a worker process"), ("ray", "an actor")):
                    begin = time.perf_counter()
                    transport = make_transport(engine, Doing(size), 1, on_cpu=True)
                    transports[engine] = of_size.enter_context(closing(transport))
                    if size == sizes[0]:
                        started.append([title, f"{time.perf_counter() - begin:.1f}"])
                work: dict[str, Callable[[], Seconds]] = {
                    name: partial(timed, partial(ask, transport, size, requests))
                    for name, transport in transports.items()
                }
                found = best_of(work, repeat)
            here, there = found["processes"] / requests, found["ray"] / requests
            milliseconds = [f"{1e3 * each:.1f}" for each in (here.wall, there.wall, there.cpu)]
            rows.append([f"{size:,}", *milliseconds, f"{there.wall / here.wall:.1f} ×"])
    print(table(["parameters", "worker process, ms", "actor, ms", "of it the server, ms", ""], rows))
    print(table(["to start", "s"], started))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--repeat", type=int, default=50, help="rounds, of which the best counts")
    parser.add_argument("--requests", type=int, default=10, help="requests in a round")
    arguments = parser.parse_args()
    run(arguments.repeat, arguments.requests)


if __name__ == "__main__":
    main()

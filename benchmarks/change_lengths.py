"""How much do honest clients' changes differ in length? What the guard of the mean must not take for absurd.

    python -m benchmarks.change_lengths --rounds 100 --partition dirichlet:0.1

For each method and upload: the longest change of a round, as a multiple of the round's median, and of the network's
initial vector; the largest of all rounds, and when that was.
"""

import argparse
import statistics
import warnings
from collections.abc import Iterator, Sequence

from fedtailor.engines.preparation import Objects, prepare
from fedtailor.engines.simulation import Simulation
from fedtailor.experiment import make_experiment
from fedtailor.messages import Reply, Request, Train
from fedtailor.messages.transport import Relay, Transport
from fedtailor.method import Method
from fedtailor.methods import all_methods
from fedtailor.server.aggregation.robust import has_length


class Measuring(Relay):
    """A transport that notes how long the changes of the last round's uploads are."""

    def __init__(self, inner: Transport, method: Method) -> None:
        super().__init__(inner)
        self.method, self.lengths = method, dict[str, list[float]]()

    def ask(self, requests: Sequence[Request]) -> Iterator[Reply]:
        training = {request.client: request for request in requests if isinstance(request, Train)}
        for reply in super().ask(requests):
            if request := training.get(reply.clients[0]):
                for name, x in reply.upload.items():
                    if has_length(self.method.uploads, name, x):
                        sent = self.method.sent(request.message, name, x)
                        self.lengths.setdefault(name, []).append(float((x if sent is None else x - sent).norm()))
            yield reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=[name for name in all_methods() if name != "local"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", default=None)
    asked = vars(parser.parse_args())
    warnings.simplefilter("ignore")
    for method in asked.pop("methods"):
        experiment = make_experiment({"method": method, "engine": "in-process", "evaluate_every": 0, **asked})
        simulation = Simulation(prepare(experiment, Objects()))
        simulation.start()
        start = float(simulation.server.initial.norm())
        transport = Measuring(simulation.transport, simulation.loop.method)
        times: dict[str, tuple[float, int]] = {}
        longest: dict[str, tuple[float, int]] = {}
        for number in range(1, experiment.rounds + 1):
            transport.lengths = {}
            simulation.loop.round(number, transport)
            for name, lengths in transport.lengths.items():
                usual = statistics.median(lengths)
                times[name] = max(times.get(name, (0.0, 0)), (max(lengths) / usual if usual else 0.0, number))
                longest[name] = max(longest.get(name, (0.0, 0)), (max(lengths) / start, number))
        for name, (most, when) in times.items():
            print(
                f"{method:12} {name:10} {most:8.2f} medians (round {when}), "
                f"{longest[name][0]:.3f} initial vectors (round {longest[name][1]})",
                flush=True,
            )
        simulation.transport.close()


if __name__ == "__main__":
    main()

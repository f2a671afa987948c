"""The aggregator of a round, as the experiment asks for it: the mean, a robust rule, or a private mean."""

from collections.abc import Mapping

from fedtailor.experiment import Experiment
from fedtailor.messages import Message
from fedtailor.method import Method, Server
from fedtailor.server.aggregation import Aggregator


def make_aggregator(
    experiment: Experiment, method: Method, server: Server, messages: Mapping[int, Message]
) -> Aggregator:
    """Make the aggregator of a round whose participants were sent these messages."""
    return Aggregator(method.uploads, list(messages), server.n_samples, server.layout)

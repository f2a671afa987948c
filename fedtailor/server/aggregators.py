"""The aggregator of a round, as the experiment asks for it: the mean, a robust rule, or a private mean."""

from collections.abc import Mapping

from fedtailor.experiment import Experiment
from fedtailor.messages import Message
from fedtailor.method import Method, Server
from fedtailor.privacy import privacy_of
from fedtailor.server.aggregation import Aggregator


def make_aggregator(
    experiment: Experiment, method: Method, server: Server, messages: Mapping[int, Message]
) -> Aggregator:
    """Make the aggregator of a round whose participants were sent these messages."""
    private = privacy_of(experiment.privacy, experiment.epsilon) is not None
    uploads = {name: how for name, how in method.uploads.items() if not (private and name in method.recorded)}
    return Aggregator(uploads, list(messages), server.n_samples, server.layout)

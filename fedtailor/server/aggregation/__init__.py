"""The aggregator of a round, as the experiment asks for it: the mean, a robust rule, or a private mean."""

from collections.abc import Mapping

from fedtailor.experiment import Experiment
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Message
from fedtailor.method import Method, Server
from fedtailor.privacy.noise import Noise
from fedtailor.server.aggregation.mean import Aggregator
from fedtailor.server.aggregation.private import PrivateAggregator
from fedtailor.server.aggregation.robust import NormBoundAggregator, RobustAggregator
from fedtailor.training.streams import torch_stream


def make_aggregator(
    experiment: Experiment,
    method: Method,
    server: Server,
    messages: Mapping[int, Message],
    privacy: Privacy | None = None,
    secret: bool = False,
) -> Aggregator:
    """Make the aggregator of a round whose participants were sent these messages. With `secret`, the noise of privacy
    comes from the operating system, and in a simulation from a stream of its own."""
    if privacy is not None and privacy.level == "client":
        noise = Noise(None if secret else torch_stream(experiment.seed, "privacy", server.round))
        return PrivateAggregator(method, server, messages, privacy, noise)
    rule, round = Rule.parse(experiment.aggregation), (method.uploads, list(messages), server.n_samples, server.layout)
    if rule.kind == "mean":
        return Aggregator(*round)
    if rule.kind == "norm-bound":
        return NormBoundAggregator(*round, bound=rule.amount, method=method, messages=messages)
    return RobustAggregator(*round, rule=rule)

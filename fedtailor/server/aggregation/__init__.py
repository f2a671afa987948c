"""The aggregator of a round, as the experiment asks for it: the mean, a robust rule, or a private mean."""

from collections.abc import Mapping

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
    rule: Rule,
    method: Method,
    server: Server,
    messages: Mapping[int, Message],
    privacy: Privacy | None = None,
    seed: int | None = None,
) -> Aggregator:
    """Make the aggregator of a round whose participants were sent these messages. The noise of privacy comes from a
    stream of the seed in a simulation; without one, from the operating system."""
    if privacy is not None and privacy.level == "client":
        noise = Noise(None if seed is None else torch_stream(seed, "privacy", server.round))
        return PrivateAggregator(method, server, messages, privacy, noise)
    round = (method.uploads, list(messages), server.n_samples, server.layout)
    if rule.kind == "mean":
        return Aggregator(*round)
    if rule.kind == "norm-bound":
        return NormBoundAggregator(*round, bound=rule.amount, method=method, messages=messages)
    return RobustAggregator(*round, rule=rule)

"""The aggregator of a round, as the experiment asks for it: the mean, a robust rule, or a private mean."""

from collections.abc import Mapping

from fedtailor.experiment import Experiment
from fedtailor.messages import Message
from fedtailor.method import Method, Server
from fedtailor.robust import Rule
from fedtailor.server.aggregation import Aggregator
from fedtailor.server.robust_aggregation import NormBoundAggregator, RobustAggregator


def make_aggregator(
    experiment: Experiment, method: Method, server: Server, messages: Mapping[int, Message]
) -> Aggregator:
    """Make the aggregator of a round whose participants were sent these messages."""
    rule, round = Rule.parse(experiment.aggregation), (method.uploads, list(messages), server.n_samples, server.layout)
    if rule.kind == "mean":
        return Aggregator(*round)
    if rule.kind == "norm-bound":
        return NormBoundAggregator(*round, bound=rule.amount, method=method, messages=messages)
    return RobustAggregator(*round, rule=rule)

"""The metrics of a run: the one that decides, and those of the user's own."""

from collections.abc import Mapping
from dataclasses import fields

from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor._common.imports import import_object
from fedtailor.client.sites import Sites
from fedtailor.client.terms import Terms
from fedtailor.data import FederatedData
from fedtailor.messages import EvaluateShared, Metrics
from fedtailor.server.records import RoundRecord
from fedtailor.training.metrics import Metric, find_metric, own_metric
from fedtailor.training.predictions import OwnMetric, targets_of


def deciding_metric(
    name: str, given: OwnMetric | None, data: FederatedData, scores: Tensor, more: Mapping[str, OwnMetric]
) -> tuple[Metric, OwnMetric | None]:
    """The metric that decides, and its function if it is the user's own and not one of `more`. `scores` are outputs for
    the first samples."""
    if name in more:
        return own_metric(name, more[name], more=True), None
    if given is None and ":" not in name:
        return find_metric(name, targets_of(scores, data.y[: len(scores)], data.targets == "labels")), None
    own = _function(name, given)
    return own_metric(name, own), own


def more_metrics(names: Mapping[str, str], given: Mapping[str, OwnMetric]) -> dict[str, OwnMetric]:
    """The user's metrics beside the one that decides, by name. A record has other fields of some names."""
    taken = {each.name for kind in (RoundRecord, Metrics) for each in fields(kind)} | {"client", "split", "hostile"}
    for name in names:
        if name in taken or f"validation_{name}" in taken:
            raise FedtailorError(
                f"The metric {name!r} would be taken for another entry of the record: name it otherwise."
            )
    return {name: _function(code, given.get(name)) for name, code in names.items()}


def _function(name: str, given: OwnMetric | None) -> OwnMetric:
    own = given or import_object(name, "metric")
    if not callable(own):
        raise FedtailorError(f"The metric {name} is not a function of (outputs, targets).")
    return own


def try_out_metrics(data: FederatedData, terms: Terms) -> None:
    """Refuse a metric of the user's own that fails on the first client's test samples, before any work."""
    if data.elsewhere is not None:
        return
    if tested := [client for client in range(data.n_clients) if len(data.test(client)[1])]:
        reply = Sites.at(data, terms, None).handle(EvaluateShared(0, tested[0], {"theta": terms.initial}))
        if reply.error:
            names = [terms.metric.name] * (terms.own_metric is not None) + list(terms.more_metrics)
            which = f"The metric {names[0]}" if len(names) == 1 else f"One of the metrics {', '.join(names)}"
            raise FedtailorError(f"{which} fails on client {data.names[tested[0]]}: {reply.error}.") from reply.cause

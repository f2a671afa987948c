"""The server's optimiser: a step along the clients' mean change, in place of the mean itself.

It stands between aggregation and the method: what the method receives as the mean of an upload is x + step(mean − x),
where x is the server's tensor that the upload is a change of. So it works for every method that lets a mean take the
place of what was sent, and after any rule, guard or noise. Its moments are a part of the server's state.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment import Experiment
from fedtailor.method import Mean, Method, Server, Total
from fedtailor.training.optimizer import SERVER_LR, ServerOptimizer, server_change, server_moments

PLAIN: tuple[ServerOptimizer, float] = ("sgd", 1.0)  # the mean itself


def chosen_optimizer(experiment: Experiment, method: Method) -> tuple[ServerOptimizer, float]:
    """Return the server's optimiser and its learning rate, η."""
    kind = experiment.server_optimizer
    kind = method.default_server_optimizer if kind == "sgd" else kind
    return kind, SERVER_LR[kind] if experiment.server_lr is None else experiment.server_lr


def optimised(total: Total, experiment: Experiment, method: Method, server: Server) -> Total:
    """Put the optimiser's steps in the place of the means, and its moments into the server's state. Means that are no
    changes of what the server broadcasts, such as a mean loss, stay as they are; so do BatchNorm's buffers, which no
    step may move, and tensors to which no client gave any weight."""
    kind, lr = chosen_optimizer(experiment, method)
    broadcast, moved = method.broadcast(server), dict[str, Tensor]()
    for name in method.means:
        mean = total[name]
        x = _fitting(method, broadcast, name, mean)
        if x is None:
            continue
        used = _used(total, method, server, name)
        before = server_moments(x, kind)
        for moment in before:
            kept = server.state.get(f"{name}/{moment}")
            found = None if kept is None else _fitting(method, {name: kept}, name, mean)
            before[moment] = before[moment] if found is None else found
        step, after = server_change(mean - x, before, kind, lr)
        server.state |= {f"{name}/{m}": torch.where(used, after[m], before[m]) for m in after}
        moved[name] = torch.where(used, x + step, mean)
        for place in server.layout.buffers_of(mean.shape[-1]):
            moved[name][..., place] = mean[..., place]
    return total.with_means(moved)


def _fitting(method: Method, tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor | None:
    """Return the tensor of this name, or the part of it that an upload like this is a change of."""
    if name not in tensors or tensors[name].shape == like.shape:
        return tensors.get(name)
    return method.sent(tensors, name, like)


def _used(total: Total, method: Method, server: Server, name: str) -> Tensor:
    """Mark the entries of a mean to which a client gave weight: the others say nothing."""
    how = method.uploads[name]
    if not isinstance(how, Mean) or how.weights in ("samples", "equal"):
        return torch.ones((), dtype=torch.bool, device=server.initial.device)
    weight = total.weight(name)
    return (server.layout.spread(weight) if weight.dim() else weight) > 0


def check_server_optimizer(experiment: Experiment, method: Method, started: Callable[[], Server]) -> None:
    """Refuse an optimiser of the server that has nothing to move. `started` makes a server to look at."""
    kind, lr = chosen_optimizer(experiment, method)
    if (kind, lr) == PLAIN or set(method.means) & method.broadcast(started()).keys():
        return
    name = "server_lr" if kind == "sgd" else f"server_optimizer {kind}"
    raise FedtailorError(
        f"{type(method).__name__} has no use for {name}: no mean of its uploads is a change of what the server "
        "broadcasts; leave it out, or take another method, like fedavg."
    )

"""The change of an upload against what the client was sent, and its clipping: the same at server and client."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedtailor.messages import Message, State
from fedtailor.method import Mean, Method


def changes(method: Method, message: Message, upload: Mapping[str, Tensor]) -> State:
    """Compute how the uploads that are means differ from what the client was sent: together one vector, the change."""
    found: State = {}
    for name in method.means:
        sent = method.sent(message, name, upload[name])
        found[name] = upload[name] if sent is None else upload[name] - sent
    return found


def norm(change: Mapping[str, Tensor]) -> float:
    """Compute the norm of the whole change, in double precision."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in change.values()))


def clipped(change: Mapping[str, Tensor], bound: float) -> State:
    """Scale a change down to this norm, if it is longer. One of infinite length is none: finite numbers can differ by
    more than there are numbers."""
    length = norm(change)
    if not math.isfinite(length):
        return {name: torch.zeros_like(tensor) for name, tensor in change.items()}
    return {name: tensor * (bound / length) if length > bound else tensor for name, tensor in change.items()}


def check_private_means(method: Method) -> str:
    """Say why a client's whole upload cannot be hidden in a mean; "" if it can."""
    title = type(method).__name__
    for name, how in method.uploads.items():
        if not isinstance(how, Mean):
            if not how.record:
                return f"{title} needs every client's own {name}, and noise hides a client only in a mean"
        elif how.weights not in ("samples", "equal"):
            return f"{title}'s clients upload the weights of their mean, {how.weights}, which no clip bounds"
    return ""

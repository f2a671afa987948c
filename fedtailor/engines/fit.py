"""Do the data, the network and the loss fit together? It is found out before the first round."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor._common.errors import FedtailorError, brief, warn
from fedtailor.data import FederatedData
from fedtailor.training.inputs import Held, as_floats, changes, held, sample_shape, shape_words, tensors
from fedtailor.training.layers import takes_integers
from fedtailor.training.network import Loss, Network

PIECE = 4096  # samples that are checked together


def fit_inputs(data: FederatedData, module: nn.Module, dtype: torch.dtype) -> FederatedData:
    """Keep whole numbers for a network with an embedding, and convert them for all others."""
    if takes_integers(module):
        return data
    if data.tokens is not None:
        warn(
            f"The data {data.name!r} are texts of {data.tokens} tokens, but the network has no embedding and takes "
            "their numbers as values: choose --model gru or transformer."
        )
    return replace(data, x=as_floats(data.x, dtype), tokens=None)


@torch.no_grad()
def try_out(network: Network, data: FederatedData, loss: Loss) -> Tensor:
    """One pass over two samples: do the network, the data and the loss fit together? Returns the outputs."""
    network.module.eval()
    before = changes(data.x, data.y)
    samples = held(data.x[:2])
    embeddings = [layer for layer in network.module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    try:
        checked = _checked_tokens(embeddings, data, samples) if embeddings else nullcontext()
        with checked, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="Using a target size")  # it would be broadcast
            with network.precision():
                outputs: Tensor = network(samples)
                if not isinstance(outputs, Tensor):
                    kind = type(outputs).__name__
                    raise FedtailorError(f"The model returns a {kind}, but it must return one tensor of outputs.")
                given, wanted = outputs.shape[1] if outputs.dim() == 2 else None, len(data.classes)
                if given is not None and given < wanted and loss is functional.cross_entropy:
                    raise FedtailorError(
                        f"The model gives {given} outputs, but there are {wanted} classes: give it one for each."
                    )
                value: Tensor = loss(outputs, data.y[:2])
            written = changes(data.x, data.y) != before
    except FedtailorError:
        raise
    except Exception as error:  # whatever a foreign network or loss raises
        shape = shape_words(sample_shape(data.x))
        raise FedtailorError(
            f"The model, the data ({shape}) and the loss do not fit together ({brief(error)})."
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise FedtailorError("The loss must return one number: the mean over the samples.")
    if written:
        raise FedtailorError("The model or the loss writes into the samples that it gets: have it change a copy.")
    return outputs


@contextmanager
def _checked_tokens(
    layers: Sequence[nn.Embedding | nn.EmbeddingBag], data: FederatedData, samples: Held
) -> Iterator[None]:
    """Refuse tokens of any client that are not among those of the embedding which gets them."""

    def check(layer: nn.Embedding | nn.EmbeddingBag, given: tuple[Any, ...]) -> None:
        for part, tensor in enumerate(tensors(samples)):
            if given and _same_values(given[0], tensor):
                _check_tokens(data, part, layer.num_embeddings)

    hooks = [layer.register_forward_pre_hook(check) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Find out whether tensors have the same whole numbers, in whatever order: padding may have been moved."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.flatten().msort().equal(other.flatten().msort())
    )


def _check_tokens(data: FederatedData, part: int, size: int) -> None:
    """Refuse tokens of an input that are not from 0 to size − 1, and name the client."""
    first = 0
    for samples in data.x.split(PIECE):
        piece = tensors(samples)[part]
        bad = (piece < 0) | (piece >= size)
        if bad.any():
            sample = first + int(bad.reshape(len(piece), -1).any(1).nonzero()[0])
            client = next(c for c, (start, *_, end) in enumerate(data.places.tolist()) if start <= sample < end)
            raise FedtailorError(
                f"Client {data.names[client]} has the token {int(piece[bad][0])}, but the network's embedding takes 0 "
                f"to {size - 1}: number the tokens anew, or make the embedding larger."
            )
        first += len(piece)

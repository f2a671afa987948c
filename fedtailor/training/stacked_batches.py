"""Batches of several clients at once: the samples of each step as (clients, batch, …), in the order that each client
draws for itself. Which these are is drawn on the CPU, and sent ahead for many steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.training.descent import EVALUATION_BATCH, batches
from fedtailor.training.inputs import CPU, select, sent

AHEAD = 1 << 18  # numbers that are sent ahead

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Step:
    """A batch of each client: how many samples it has, which others fill up, and their weights in its client's loss.

    `indices` are those of the samples in each client's training set, `clients` those that take the step if these are
    not the first ones.
    """

    sizes: Sequence[int]
    x: Tensor
    y: Tensor
    weights: Tensor  # (clients, batch, 1)
    indices: Tensor | None = None
    clients: Tensor | None = None


def batches_of(run: Sequence[Any], shares: Numbers | None = None, flat: bool = False) -> Iterator[Step]:
    """Yield the steps of descents, of which the last ones are finished first. `shares` (steps, clients) are factors of
    the clients' losses. `flat` samples are rows, if that copies none."""
    flat = flat and all(call.augment is None for call in run)
    (x, x_starts), (y, y_starts) = pooled([call.x for call in run], flat), pooled([call.y for call in run])
    drawn = [batches(len(call.x), call.settings, call.stream, CPU) for call in run]
    n, dtype = [len(call.x) for call in run], run[0].theta.dtype
    more = int(run[0].settings.join_last)
    widest = max(min(count, (call.settings.batch or count) + more) for call, count in zip(run, n, strict=True))
    orders = [torch.arange(count, device="cpu") if widest >= count else None for count in n]  # of whole batches
    for first, end in pairwise([0, *sorted({call.n_steps for call in run})]):
        k = sum(call.n_steps >= end for call in run)  # those that take these steps
        ahead = max(1, AHEAD // (k * widest * y[:1].numel()))
        for begin in range(first, end, ahead):
            count = min(ahead, end - begin)
            chosen = [next(of) for of in drawn[:k] for _ in range(count)]
            pieces = [orders[place // count] if each is None else each for place, each in enumerate(chosen)]
            sizes = np.array([len(piece) for piece in pieces]).reshape(k, count).T
            there = np.arange(widest) < sizes.T[:, :, None]
            places = np.zeros(there.shape, np.int64)
            places[there] = torch.cat(pieces).numpy()
            places = places.swapaxes(0, 1)
            weights = weights_of(sizes, 1.0 if shares is None else shares[begin : begin + count, :k], widest)
            of_x, of_y = (on_device(places + starts[:k, None], x.device) for starts in (x_starts, y_starts))
            of_steps = of_x.flatten(1).unbind(), taken(y, of_y).unbind(), on_device(weights, x.device, dtype).unbind()
            own = on_device(places, x.device).unbind() if run[0].objective is not None else [None] * count
            for of_step, indices, ys, of_samples, numbers in zip(sizes.tolist(), *of_steps, own, strict=True):
                width = max(of_step)
                if width < widest:
                    ys, of_samples = ys[:, :width], of_samples[:, :width]
                    indices = indices.view(k, widest)[:, :width].flatten()
                    numbers = None if numbers is None else numbers[:, :width]
                xs = select(x, indices).view(k, width, *x.shape[1:])
                for row, (call, size) in enumerate(zip(run, of_step, strict=False)):
                    if call.augment is not None and xs.dim() == 5:
                        xs[row, :size] = call.augment(xs[row, :size])
                yield Step(of_step, xs, ys, of_samples, numbers)


def weights_of(sizes: Numbers, shares: float | Numbers = 1.0, width: int | None = None) -> Numbers:
    """Compute each sample's weight in its client's mean loss, times the client's share: 0 for those that fill up."""
    there = np.arange(width or sizes.max()) < sizes[..., None]
    return (there * (shares / sizes)[..., None])[..., None]


def taken(x: Tensor, indices: Tensor) -> Tensor:
    """Select samples by (clients, batch) indices."""
    return select(x, indices.reshape(-1)).view(*indices.shape, *x.shape[1:])


def pooled(pieces: Sequence[Tensor], flat: bool = False) -> tuple[Tensor, Numbers]:
    """View the pieces as one tensor, and tell where each begins. Slices of one tensor are not copied."""
    first, offsets = pieces[0], [piece.storage_offset() for piece in pieces]
    begin, size = min(offsets), first.stride(0)
    if size and all(
        piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and piece.stride() == first.stride()
        and (offset - begin) % size == 0
        for piece, offset in zip(pieces, offsets, strict=True)
    ):
        starts = np.array([(offset - begin) // size for offset in offsets])
        length = int(max(start + len(piece) for start, piece in zip(starts, pieces, strict=True)))
        found = first.as_strided((length, *first.shape[1:]), first.stride(), begin)
    else:
        found, starts = torch.cat(list(pieces)), np.cumsum([0, *map(len, pieces[:-1])])
    if flat and (row := found[:1].flatten(1)).data_ptr() == found.data_ptr():  # the order in which they lie
        found = found.as_strided((len(found), row.shape[1]), (found.stride(0), row.stride(1)), found.storage_offset())
    return found, starts


def filled_up(pieces: Sequence[Tensor]) -> Tensor:
    """Stack pieces; those with fewer samples than others are filled up with zeros."""
    longest = max(map(len, pieces))
    if all(len(piece) == longest for piece in pieces):
        return torch.stack(list(pieces))
    stacked = pieces[0].new_zeros(len(pieces), longest, *pieces[0].shape[1:])
    for row, piece in zip(stacked.unbind(), pieces, strict=True):
        row[: len(piece)] = piece
    return stacked


def in_order(n: Sequence[int]) -> Iterator[tuple[list[int], Numbers]]:
    """Yield passes over all samples of clients, most samples first: how many each client has in it, and which."""
    for start in range(0, n[0], EVALUATION_BATCH):
        sizes = [min(EVALUATION_BATCH, count - start) for count in n if count > start]
        places = np.zeros((len(sizes), max(sizes)), np.int64)
        for place, size in zip(places, sizes, strict=True):
            place[:size] = range(start, start + size)
        yield sizes, places


def on_device(numbers: Numbers, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Send numbers to the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return sent(tensor if dtype is None else tensor.to(dtype), device)

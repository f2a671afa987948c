"""Real numbers as whole numbers modulo 2⁶⁴: sums of these are exact in any order, and masks cancel in them.

A number v becomes rint(v · 2^b), with b so large that the sum over all parties of a round stays below 2⁶² as long as
each |v| ≤ RANGE: so a sum never wraps, and what does not fit is refused before. Each v is off by 2^−(b+1) at most.
"""

import torch
from torch import Tensor

RANGE = 2.0**28  # the largest absolute value that fits
ROOM = 62  # bits of the largest sum: the 63rd is the sign's, and one is left over
MOST_PARTIES = 1000  # in a round: each agrees on a mask with each


class DoesNotFitError(ValueError):
    """A number is too large for fixed point, or a weight too small; `name` is its tensor's."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"its upload {name!r} {why}")
        self.name = name


def fraction_bits(parties: int) -> int:
    """The number of bits behind the point, b, in a sum over so many parties."""
    return ROOM - 28 - (parties - 1).bit_length()


def resolution(parties: int) -> float:
    """The distance between two numbers that differ: twice the largest error of one."""
    return 2.0 ** -fraction_bits(parties)


def encoded(name: str, values: Tensor, parties: int) -> Tensor:
    """Write finite numbers as whole ones; refuse those that do not fit."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not largest <= RANGE:
        raise DoesNotFitError(name, f"has {largest:.3g} after weighting, and secure aggregation has room up to 2^28")
    return (values.detach().cpu().double() * 2.0 ** fraction_bits(parties)).round_().to(torch.int64).flatten()


def decoded(total: Tensor, parties: int) -> Tensor:
    """Read a sum of whole numbers, in double precision."""
    return total.double() * resolution(parties)

"""Shamir's secret sharing over the prime field of 2⁵²¹ − 1, with Python's whole numbers (Shamir 1979).

A secret is the value at 0 of a random polynomial of degree t − 1, and a share is its value at another place: t shares
give it back, and fewer say nothing about it.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

PRIME = 2**521 - 1
BYTES = 66  # of a share


def shared(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """Cut a secret of at most 64 bytes into a share for each place (from 1), of which `threshold` give it back."""
    if threshold < 1 or len(secret) > 64:
        raise ValueError("a secret of up to 64 bytes and a threshold of at least 1")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: value_at(coefficients, place).to_bytes(BYTES, "big") for place in places}


def value_at(coefficients: list[int], place: int) -> int:
    """Compute a polynomial's value, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


@lru_cache(maxsize=256)  # the same shares come back for each secret of a round
def weights(places: tuple[int, ...], at: int = 0) -> dict[int, int]:
    """Compute Lagrange's weights, with which the values at these places give the value at another."""
    found = {}
    for i in places:
        over = under = 1
        for j in places:
            if j != i:
                over, under = over * (at - j) % PRIME, under * (i - j) % PRIME
        found[i] = over * pow(under, -1, PRIME) % PRIME
    return found


def recovered(
    shares: Mapping[int, bytes], threshold: int, length: int, fits: Callable[[bytes], bool]
) -> tuple[bytes | None, list[int]]:
    """Put a secret of so many bytes together, and name the places with wrong shares.

    `fits` knows the right secret. Where the first shares do not give it, others are tried, so that one wrong share
    among more than `threshold` does no harm. None if nothing fits.
    """
    values = {place: int.from_bytes(share, "big") % PRIME for place, share in shares.items() if len(share) == BYTES}
    places = sorted(values)

    def value(chosen: tuple[int, ...], at: int) -> int:
        return sum(weight * values[place] for place, weight in weights(chosen, at).items()) % PRIME

    for first in range(len(places) if len(places) >= threshold else 0):
        chosen = tuple(sorted((places[first:] + places[:first])[:threshold]))
        secret = value(chosen, 0)
        if secret < 1 << (8 * length) and fits(found := secret.to_bytes(length, "big")):
            wrong = [place for place in places if place not in chosen and value(chosen, place) != values[place]]
            return found, sorted({*wrong, *(shares.keys() - values.keys())})
    return None, []

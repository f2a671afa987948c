"""The numbers of secure aggregation against slow versions with Python's whole numbers, and closed forms."""

import hashlib
import hmac
import math
import secrets
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from fedtailor.privacy import masks
from fedtailor.privacy.fixed_point import RANGE, DoesNotFitError, decoded, encoded, fraction_bits, resolution
from fedtailor.privacy.secret_shares import BYTES, PRIME, recovered, shared, value_at

pytest.importorskip("cryptography")


# --- fixed point ---


@pytest.mark.parametrize("parties", [2, 3, 10, 50, 1000])
def test_a_sum_is_exact_up_to_half_a_step_for_each_party(parties: int) -> None:
    generator = torch.Generator().manual_seed(parties)
    values = torch.randn(parties, 200, generator=generator, dtype=torch.float64) * 1000
    total = torch.zeros(200, dtype=torch.int64)
    for row in values:
        total += encoded("x", row, parties)
    found = decoded(total, parties).tolist()
    exact = [sum(map(Fraction, column)) for column in values.T.tolist()]
    bound = Fraction(parties) / 2 ** (fraction_bits(parties) + 1)
    worst = max(abs(Fraction(a) - b) for a, b in zip(found, exact, strict=True))
    assert 0 < worst <= bound + Fraction(2) ** -30  # the last bits of reading it as a double


@pytest.mark.parametrize("parties", [1, 2, 3, 4, 5, 1000, 1024, 1025])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_of_all_parties_have_room(parties: int, sign: int) -> None:
    total = sum(int(encoded("x", torch.tensor([sign * RANGE]), parties)) for _ in range(parties))
    assert abs(total) <= 2**62
    assert float(decoded(torch.tensor(total), parties)) == sign * RANGE * parties


def test_what_does_not_fit_is_refused_by_name_and_not_wrapped() -> None:
    for bad in (math.nextafter(RANGE, math.inf), -2 * RANGE, 1e300, math.inf, math.nan):
        with pytest.raises(DoesNotFitError, match=r"'theta' .* room up to 2\^28") as refused:
            encoded("theta", torch.tensor([1.0, bad], dtype=torch.float64), 3)
        assert refused.value.name == "theta"
    assert resolution(3) == 2.0**-32


# --- shares ---


def test_shares_of_a_secret_are_values_of_a_polynomial() -> None:
    assert value_at([7, 5, 3], 2) == 7 + 5 * 2 + 3 * 4
    secret = secrets.token_bytes(32)
    assert shared(secret, 1, [1, 9]) == dict.fromkeys((1, 9), int.from_bytes(secret, "big").to_bytes(BYTES, "big"))
    line = {place: int.from_bytes(share, "big") for place, share in shared(secret, 2, [1, 2, 3]).items()}
    assert (2 * line[1] - line[2]) % PRIME == int.from_bytes(secret, "big")  # a line through two points, at 0
    assert (line[3] - line[2] - line[2] + line[1]) % PRIME == 0
    assert pow(3, PRIME - 1, PRIME) == 1


@pytest.mark.parametrize(("threshold", "parties"), [(1, 1), (2, 3), (4, 6), (7, 10), (34, 50)])
def test_any_threshold_of_shares_gives_the_secret_and_fewer_fit_every_secret(threshold: int, parties: int) -> None:
    secret = secrets.token_bytes(32)
    shares = shared(secret, threshold, range(1, parties + 1))
    chosen = dict(secrets.SystemRandom().sample(sorted(shares.items()), threshold))
    assert recovered(chosen, threshold, 32, secret.__eq__) == (secret, [])
    few = dict(list(chosen.items())[1:])
    assert recovered(few, threshold, 32, secret.__eq__) == (None, [])
    other = shared(bytes(32), threshold, range(1, parties + 1))  # any other secret has a polynomial through them
    if threshold > 1:
        through_all = {0: secrets.randbelow(2**256), **{place: int.from_bytes(few[place], "big") for place in few}}
        assert len(through_all) == threshold  # so many points have exactly one polynomial, whatever stands at 0
        assert few != {place: other[place] for place in few}


def test_a_wrong_share_is_found_where_there_is_one_more_and_never_gives_another_secret() -> None:
    secret = secrets.token_bytes(32)
    for liar in range(1, 6):
        shares = shared(secret, 4, range(1, 6))
        shares[liar] = (int.from_bytes(shares[liar], "big") + 1).to_bytes(BYTES, "big")
        assert recovered(shares, 4, 32, secret.__eq__) == (secret, [liar])
        assert recovered({**shares, liar: b"short"}, 4, 32, secret.__eq__) == (secret, [liar])
        without = next(place for place in shares if place != liar)
        assert recovered({p: s for p, s in shares.items() if p != without}, 4, 32, secret.__eq__) == (None, [])


# --- masks ---


def hkdf(secret: bytes, purpose: bytes) -> bytes:
    """RFC 5869 by hand, for 32 bytes."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, purpose + b"\1", hashlib.sha256).digest()


def slow_mask(seed: bytes, length: int) -> list[int]:
    """The key stream block by block: AES of a counter, as whole numbers."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    block = Cipher(algorithms.AES(hkdf(seed, b"fedtailor mask")), modes.ECB()).encryptor()
    stream = b"".join(block.update(counter.to_bytes(16, "big")) for counter in range(length // 2 + 1))
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(length)]


def test_a_mask_is_the_key_stream_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "BLOCK", 7)
    seed = masks.new_seed()
    found = np.zeros(31, np.uint64)
    masks.add_mask(found, seed, 1)
    assert found.tolist() == slow_mask(seed, 31)
    masks.add_mask(found, seed, -1)
    assert not found.any()


def test_both_sides_agree_on_a_mask_and_nobody_else() -> None:
    seeds = {name: [masks.new_seed() for _ in range(3)] for name in "abc"}
    keys = {name: masks.public_keys(*of) for name, of in seeds.items()}
    pair = partial(masks.pair_mask, digest=b"all")
    assert pair(seeds["a"][1], keys["b"]) == pair(seeds["b"][1], keys["a"])
    assert pair(seeds["a"][1], keys["b"]) != pair(seeds["c"][1], keys["a"])
    assert pair(seeds["a"][1], keys["b"]) != masks.pair_mask(seeds["a"][1], keys["b"], b"others")
    found = [masks.is_pairs(seeds[of][place], keys["a"]) for of in "ab" for place in range(3)]
    assert found == [False, True, False, False, False, False]
    found = [masks.is_own(seeds[of][place], keys["a"]) for of in "ab" for place in range(3)]
    assert found == [False, False, True, False, False, False]
    with pytest.raises(ValueError, match=r"(?i)shared key|exchange"):
        pair(seeds["a"][1], bytes(masks.KEYS))  # a public key that makes the secret known to everybody


def test_a_sealed_share_opens_with_its_key_for_what_it_is_about_alone() -> None:
    key = masks.new_seed()
    content = masks.sealed(key, b"share", b"1>2")
    assert masks.unsealed(key, content, b"1>2") == b"share"
    assert masks.unsealed(key, content, b"2>1") is None
    assert masks.unsealed(masks.new_seed(), content, b"1>2") is None
    assert masks.unsealed(key, content[:-1] + bytes([content[-1] ^ 1]), b"1>2") is None
    assert masks.unsealed(key, b"", b"1>2") is None


@pytest.mark.parametrize(("parties", "needed"), [(1, 2), (2, 2), (3, 2), (4, 3), (5, 4), (6, 4), (10, 7), (50, 34)])
def test_two_lists_of_so_many_have_more_than_a_third_in_common(parties: int, needed: int) -> None:
    assert masks.threshold(parties) == needed
    assert 2 * needed - parties >= parties / 3

"""Keys and masks of secure aggregation, all by `cryptography`: X25519, HKDF, AES-GCM, and AES-CTR as the generator.

Every secret of a round is a seed of 32 bytes, from which the rest follows: so a seed is all that has to be shared.
"""

import math
import os
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command

SEED = KEY = 32  # bytes of a secret, of a public key, of a commitment
KEYS = 3 * KEY  # of what a party hands out
NONCE = 12
BLOCK = 1 << 18  # numbers of a mask that are made at once
Words = npt.NDArray[np.uint64]


def threshold(parties: int) -> int:
    """The number of parties of a round, of those that were called, without which nothing is opened: two thirds.

    Two lists of so many have more than a third in common, so fewer than a third that collude with the server cannot
    have two different sums opened.
    """
    return max(2, math.ceil(2 * parties / 3))


def new_seed() -> bytes:
    """Draw a seed from the operating system."""
    return os.urandom(SEED)


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Derive 32 bytes for a purpose: HKDF with SHA-256 (RFC 5869)."""
    need_cryptography()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, purpose).derive(secret)


def private_key(seed: bytes) -> Any:
    """Make the X25519 key that belongs to a seed."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(derived(seed, b"fedtailor key"))


def public_key(seed: bytes) -> bytes:
    """Compute the public half of a seed's key."""
    return bytes(private_key(seed).public_key().public_bytes_raw())


def agreed(seed: bytes, public: bytes, purpose: bytes) -> bytes:
    """Agree on 32 bytes with the owner of a public key: both compute the same. A key that would make them known to
    everybody is a ValueError."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return derived(private_key(seed).exchange(X25519PublicKey.from_public_bytes(public)), purpose)


def public_keys(sealing: bytes, pairs: bytes, own: bytes) -> bytes:
    """Make what a party hands out of its three secrets: the public keys of shares and of masks in common, and a
    commitment to its own mask, which says nothing about it and fits no other."""
    return public_key(sealing) + public_key(pairs) + commitment(own)


def commitment(seed: bytes) -> bytes:
    """Commit to a seed."""
    return sha256(b"fedtailor commitment" + seed).digest()


def is_pairs(seed: bytes, keys: bytes) -> bool:
    """Find out whether a seed is that of the masks in common, of the party with these keys."""
    return public_key(seed) == keys[KEY : 2 * KEY]


def is_own(seed: bytes, keys: bytes) -> bool:
    """Find out whether a seed is that of the own mask, of the party with these keys."""
    return commitment(seed) == keys[2 * KEY :]


def digest_of(keys: Mapping[int, bytes]) -> bytes:
    """Compute a checksum of all parties' keys: whoever was shown others has nothing in common with the rest."""
    return sha256(b"".join(b"%d:" % number + keys[number] for number in sorted(keys))).digest()


def sealing_key(sealing: bytes, keys: bytes, digest: bytes) -> bytes:
    """Agree on the key under which two parties send each other shares."""
    return agreed(sealing, keys[:KEY], b"fedtailor shares" + digest)


def pair_mask(pairs: bytes, keys: bytes, digest: bytes) -> bytes:
    """Agree on the seed of the mask that two parties have in common: one adds it, the other takes it away."""
    return agreed(pairs, keys[KEY : 2 * KEY], b"fedtailor pair" + digest)


def sealed(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt with AES-GCM; `about` must be the same to decrypt."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, content, about)


def unsealed(key: bytes, content: bytes, about: bytes) -> bytes | None:
    """Decrypt; None if it was not sealed with this key, about this."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return bytes(AESGCM(key).decrypt(content[:NONCE], content[NONCE:], about))
    except (InvalidTag, ValueError):
        return None


def add_mask(total: Words, seed: bytes, sign: int) -> None:
    """Add the mask of a seed, in place and modulo 2⁶⁴, or take it away: AES-256's key stream in counter mode, which is
    used once for each seed."""
    need_cryptography()
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(derived(seed, b"fedtailor mask")), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(8 * BLOCK)
    for first in range(0, len(total), BLOCK):
        part = total[first : first + BLOCK]
        mask = np.frombuffer(stream.update(zeros[: 8 * len(part)]), "<u8")
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def need_cryptography() -> None:
    """Refuse to go on without cryptography."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise FedtailorError(f"cryptography is not installed: {install_command('secure')}.") from None

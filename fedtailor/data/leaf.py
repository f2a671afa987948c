"""LEAF's JSON as its scripts write it: Shakespeare, FEMNIST and Sent140 (Caldas et al., LEAF: A Benchmark for Federated
Settings, 2018).

A file has `users` and, for each of them, the lists x and y in `user_data`. A folder has such files, or has them in its
folders train and test. Users are the natural clients; which of the three data sets it is shows in the samples.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor._common.errors import FedtailorError, shown
from fedtailor.data.dataset import TEST, TRAIN, Dataset
from fedtailor.data.foreign_files import check_size, damaged, reading

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80 characters
UNKNOWN = len(ALPHABET) + 1  # the token of all other characters; character i is token i + 1, and 0 is padding
LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # FEMNIST's classes
SIDE = 28  # pixels of FEMNIST's images
WORDS, TOKENS = 25, 10_000  # of a tweet: words that are read, and tokens that they are hashed to
TEXT = 4  # the place of a tweet's text, after id, date, query and user
LONGEST = 1_000  # characters of a user's name
IN_MEMORY = 8  # bytes that a byte of JSON takes when it is read, about

Lists = tuple[list[Any], list[Any]]  # x and y of one user
Arrays = tuple[NDArray[Any], NDArray[np.int64]]
_CODES = np.full(128, UNKNOWN, dtype=np.int64)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(1, UNKNOWN)
_WORD = re.compile(r"[\w']+|[.,!?;]")  # as LEAF's models split a text


def is_leaf(path: Path) -> bool:
    """Recognise LEAF's files: a JSON file, or a folder of some or of train and test sets with some."""
    if path.is_dir():
        return any(path.glob("train/*.json")) or (
            any(path.glob("*.json")) and not any(p.is_dir() for p in path.iterdir())
        )
    return path.suffix.lower() == ".json"


def read_leaf(path: Path) -> Dataset:
    """Read all users' samples; those of the folders train and test are parts of a split."""
    xs, ys, users, parts = [], [], [], []
    kind, taken = "", 0
    for file, part in _files(path):
        with reading(file, "it is not JSON as LEAF writes it, or truncated"):
            check_size(file, IN_MEMORY * file.stat().st_size)
            for user, lists in _users(file):
                kind = kind or _kind(file, lists)
                x, y = _READERS[kind](file, user, *lists)
                taken += x.nbytes
                check_size(path, taken)
                xs.append(x)
                ys.append(y)
                users.append(user)
                parts.append(part)
    if not xs:
        raise FedtailorError(f"LEAF's files in {path} have no samples: make them anew with its preprocess.sh.")
    if len({x.shape[1:] for x in xs}) > 1:
        raise FedtailorError(f"The texts in {path} differ in length: make them anew with LEAF's preprocess.sh.")
    names = sorted(set(users))
    number = {user: position for position, user in enumerate(names)}
    sizes = torch.tensor([len(y) for y in ys])
    split = parts[0] is not None
    return Dataset(
        path.resolve().name,
        torch.from_numpy(np.concatenate(xs)),
        torch.from_numpy(np.concatenate(ys)),
        {"shakespeare": tuple(ALPHABET), "femnist": tuple(LETTERS), "sent140": ("negative", "positive")}[kind],
        torch.tensor([part or 0 for part in parts], dtype=torch.uint8).repeat_interleave(sizes) if split else None,
        torch.tensor([number[user] for user in users]).repeat_interleave(sizes),
        tuple(names),
        own_split=split,
        tokens={"shakespeare": UNKNOWN + 1, "sent140": TOKENS}.get(kind),
    )


def _files(path: Path) -> list[tuple[Path, int | None]]:
    """List the files, each with its part of the split."""
    if not path.is_dir():
        return [(path, None)]
    train, test = (sorted(path.glob(f"{folder}/*.json")) for folder in ("train", "test"))
    if not train:
        return [(file, None) for file in sorted(path.glob("*.json"))]
    return [*((file, TRAIN) for file in train), *((file, TEST) for file in test)]


def _users(file: Path) -> Iterator[tuple[str, Lists]]:
    """Yield the users that have samples. What is not as LEAF writes it raises some exception, or a sentence."""
    content = json.loads(file.read_bytes())
    if not (isinstance(content, dict) and {"users", "user_data"} <= content.keys()):
        raise damaged(file, "it has no 'users' and 'user_data', which LEAF's files have")
    users, counts = content["users"], content.get("num_samples")
    if len(set(users)) != len(users):
        raise damaged(file, "it has a user twice")
    for user, count in zip(users, counts or [None] * len(users), strict=True):
        if not isinstance(user, str) or not user.strip() or len(user.encode()) > LONGEST:
            raise damaged(file, f"its user {shown(user)} has no name, or one that is too long")
        x, y = content["user_data"][user]["x"], content["user_data"][user]["y"]
        if not isinstance(x, list) or not isinstance(y, list) or len({len(x), len(y), count or len(x)}) > 1:
            raise damaged(file, f"its user {shown(user)} does not have as many samples as labels, or as it says")
        if x:
            yield user, (x, y)


def _kind(file: Path, lists: Lists) -> str:
    """Find out which data set the first sample is from."""
    x, y = lists[0][0], lists[1][0]
    if isinstance(x, str) and isinstance(y, str):
        return "shakespeare"
    if isinstance(x, list) and len(x) == SIDE * SIDE and not isinstance(x[0], str):
        return "femnist"
    if isinstance(x, list) and len(x) > TEXT and isinstance(x[TEXT], str):
        return "sent140"
    raise FedtailorError(
        f"The samples of {file} are neither texts and their next characters (Shakespeare), nor {SIDE}×{SIDE} pixels "
        "(FEMNIST), nor tweets (Sent140): of LEAF's data only these can be read."
    )


def _shakespeare(file: Path, user: str, x: list[Any], y: list[Any]) -> Arrays:
    if not x[0] or any(len(text) != len(x[0]) for text in x):
        raise damaged(file, f"the texts of its user {shown(user)} are empty or differ in length")
    codes = np.frombuffer("".join(x).encode("utf-32-le"), np.uint32).reshape(len(x), len(x[0]))
    strange = [label for label in y if len(label) != 1 or label not in ALPHABET]
    if strange:
        raise damaged(
            file, f"its user {shown(user)} has the label {shown(strange[0])}, not one of LEAF's 80 characters"
        )
    return _CODES[np.minimum(codes, 127)], np.array([ALPHABET.index(label) for label in y], dtype=np.int64)


def _femnist(file: Path, user: str, x: list[Any], y: list[Any]) -> Arrays:
    images = np.array(x, dtype=np.float32).reshape(len(x), 1, SIDE, SIDE)
    if not (images.min() >= 0 and images.max() <= 1):
        raise damaged(file, f"its user {shown(user)} has pixels that are not from 0 to 1")
    return images, _labels(file, user, y, tuple(range(len(LETTERS))))


def _sent140(file: Path, user: str, x: list[Any], y: list[Any]) -> Arrays:
    """Hash each word: no vocabulary has to be agreed on, and a client's words stay with it."""
    tokens = np.zeros((len(x), WORDS), dtype=np.int64)
    for row, tweet in zip(tokens, x, strict=True):
        words = _WORD.findall(tweet[TEXT].lower())[:WORDS]
        row[: len(words)] = [crc32(word.encode()) % (TOKENS - 1) + 1 for word in words]
    return tokens, np.minimum(_labels(file, user, y, (0, 1, 4)), 1)


def _labels(file: Path, user: str, y: list[Any], known: tuple[int, ...]) -> NDArray[np.int64]:
    strange = [label for label in y if isinstance(label, bool) or label not in known]
    if strange:
        raise damaged(
            file, f"its user {shown(user)} has the label {shown(strange[0])}, which its data set does not have"
        )
    return np.array(y, dtype=np.int64)


_READERS = {"shakespeare": _shakespeare, "femnist": _femnist, "sent140": _sent140}

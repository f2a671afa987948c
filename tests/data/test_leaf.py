"""LEAF's JSON, written here as LEAF's own scripts write it."""

import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import federate, load

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
ROMEO = "THE_TRAGEDY_OF_ROMEO_AND_JULIET_ROMEO"


def leaf(users: dict[str, tuple[list[Any], list[Any]]], **more: Any) -> dict[str, Any]:
    """The content of a file (LEAF, data/utils/split_data.py)."""
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
        **more,
    }


def write(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def windows(line: str) -> tuple[list[str], list[str]]:
    """Eighty characters and the next one (LEAF, data/shakespeare/preprocess/shake_utils.py)."""
    padded = " " * 80 + line
    return [padded[i : i + 80] for i in range(len(line))], [padded[i + 80] for i in range(len(line))]


def tweet(text: str, user: str) -> list[str]:
    """The entries of x (LEAF, data/sent140/preprocess/data_to_json.py)."""
    return ["1467810369", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, text, "training"]


def test_shakespeare(tmp_path: Path) -> None:
    romeo, juliet = windows("What lady is that?"), windows("O Romeo\u00e9!\n")
    juliet[1][juliet[1].index("\u00e9")] = "e"  # labels are of the alphabet
    plays = {"hierarchies": ["ROMEO AND JULIET"] * 2}
    name = write(tmp_path / "all_data.json", leaf({"Z_JULIET": juliet, ROMEO: romeo}, **plays))
    data = load(name)
    assert data.client is not None
    assert (data.x.dtype, data.x.shape, data.tokens) == (torch.int64, (18 + 10, 80), 82)
    assert data.classes == tuple(ALPHABET)
    assert data.client_names == (ROMEO, "Z_JULIET")
    assert data.part is None
    for user, (texts, labels) in enumerate((romeo, juliet)):
        mine = data.client == user
        tokens = [[ALPHABET.find(c) + 1 or 81 for c in text] for text in texts]
        assert data.x[mine].tolist() == tokens
        assert data.y[mine].tolist() == [ALPHABET.index(label) for label in labels]
    assert int((data.x == 81).sum()) == 2  # é, in two windows
    assert not (data.x == 0).any()


def test_femnist_in_train_and_test(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    x = (torch.randint(256, (12, 784), generator=rng).double() / 255).tolist()
    one, other = leaf({"f0000_14": (x[:5], [0, 9, 10, 35, 36])}), leaf({"f0001_41": (x[5:8], [61, 1, 1])})
    test = leaf({"f0001_41": (x[8:10], [0, 2]), "f0000_14": (x[10:], [61, 5])})
    test["user_data"]["f0002_00"] = {"x": [], "y": []}  # one with too few samples stays there without being a user
    write(tmp_path / "femnist" / "train" / "all_data_0_niid_0_keep_0_train_9.json", one)
    write(tmp_path / "femnist" / "train" / "all_data_1_niid_0_keep_0_train_9.json", other)
    write(tmp_path / "femnist" / "test" / "all_data_0_niid_0_keep_0_test_9.json", test)
    data = load("femnist", tmp_path)
    assert data.client is not None
    assert data.part is not None
    assert (data.name, data.client_names, data.tokens) == ("femnist", ("f0000_14", "f0001_41"), None)
    assert "".join(data.classes) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert data.x.dtype == torch.float32
    torch.testing.assert_close(data.x, torch.tensor(x).reshape(12, 1, 28, 28))
    assert data.y.tolist() == [0, 9, 10, 35, 36, 61, 1, 1, 0, 2, 61, 5]
    assert data.part.tolist() == [0] * 8 + [2] * 4
    assert data.client.tolist() == [0] * 5 + [1] * 3 + [1] * 2 + [0] * 2
    split = federate(data, partition="natural", validation=0)  # the authors' split, unless another is asked for
    assert split.bounds.diff(dim=1).tolist() == [[5, 0, 2], [3, 0, 2]]
    assert federate(data, partition="natural", split="merge").bounds.diff(dim=1).tolist() == [[5, 1, 1], [3, 1, 1]]


def test_sent140(tmp_path: Path) -> None:
    long = " ".join(f"word{number}" for number in range(40))
    mine = [tweet("@someone That's GREAT, really!!", "ann"), tweet(long, "ann"), tweet("", "ann")]
    write(tmp_path / "sent" / "a.json", leaf({"ann": (mine, [1, 0, 4])}))
    write(tmp_path / "sent" / "b.json", leaf({"bob": ([tweet("great", "bob")], [0])}))
    data = load(str(tmp_path / "sent"))
    assert (data.x.dtype, data.x.shape, data.tokens) == (torch.int64, (4, 25), 10_000)
    assert (data.classes, data.y.tolist()) == (("negative", "positive"), [1, 0, 1, 0])
    for row, text in zip(data.x.tolist(), [*(entries[4] for entries in mine), "great"], strict=True):
        words = re.findall(r"[\w']+|[.,!?;]", text.lower())[:25]
        assert row == [crc32(word.encode()) % 9_999 + 1 for word in words] + [0] * (25 - len(words))
    assert data.x[0, 2] == data.x[3, 0]  # the same word at two clients is the same token


def good() -> dict[str, Any]:
    return leaf({"ann": ([tweet("great", "ann")], [1])})


def changed(**changes: Any) -> dict[str, Any]:
    return {**good(), **changes}


LINE = windows("abc")
SQUARE = [[0.5] * 784]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([1, 2], "has no 'users' and 'user_data'"),
        ({"users": ["ann"]}, "has no 'users' and 'user_data'"),
        (leaf({}), "have no samples"),
        (changed(users=["bob"]), "not JSON as LEAF writes it"),
        (changed(users=[7]), "its user 7 has no name"),
        (changed(users=[" "]), "its user ' ' has no name"),
        (changed(users=["\ud800"]), "not JSON as LEAF writes it"),
        (changed(users=["ann"] * 2, num_samples=[1, 1]), "has a user twice"),
        (changed(num_samples=[3]), "'ann' does not have as many samples as labels, or as it says"),
        (leaf({"ann": ([tweet("great", "ann")], [1, 0])}), "does not have as many samples as labels"),
        (leaf({"ann": ([tweet("great", "ann")], [2])}), "has the label 2, which its data set does not have"),
        (leaf({"ann": (SQUARE, [62])}), "has the label 62"),
        (leaf({"ann": ([[0.5] * 783 + [1.5]], [6])}), "has pixels that are not from 0 to 1"),
        (leaf({"ann": ([[0.5] * 783 + [float("nan")]], [6])}), "has pixels that are not from 0 to 1"),
        (leaf({"ann": ([*SQUARE, [0.5] * 3], [6, 6])}), "not JSON as LEAF writes it"),
        (leaf({"ann": (["ab", "abc"], ["a", "b"])}), "are empty or differ in length"),
        (leaf({"ann": ([""], ["a"])}), "are empty or differ in length"),
        (leaf({"ann": (["ab"], ["a"]), "bob": (["abc"], ["a"])}), "differ in length"),
        (leaf({"ann": (["ab"], ["\u00e9"])}), "has the label 'é', not one of LEAF's 80 characters"),
        (leaf({"ann": (["ab"], ["ab"])}), "has the label 'ab'"),
        (leaf({"1": (["000001.jpg"], [0.0])}), "of LEAF's data only these can be read"),  # CelebA
        (leaf({"u": ([[[1, 2], [3]]], [{"target_tokens": [[1]]}])}), "of LEAF's data only these can be read"),  # Reddit
    ],
)
def test_refusals(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(FedtailorError, match=sentence):
        load(write(tmp_path / "data.json", content))


def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(good())
    for content in (text[:-5], "[" * 100_000, '{"users": ' + "9" * 10_000 + "}", "\udcff", ""):
        (tmp_path / "data.json").write_text(content, errors="surrogateescape")
        with pytest.raises(FedtailorError, match="cannot be read: it is not JSON as LEAF writes it") as error:
            load(str(tmp_path / "data.json"))
        assert "\n" not in str(error.value)
    (tmp_path / "data.json").write_text(text)
    monkeypatch.setenv("FEDTAILOR_DATA_LIMIT", "1e-6")
    with pytest.raises(FedtailorError, match="GB of memory or more"):
        load(str(tmp_path / "data.json"))


def test_a_folder_of_images_with_a_file_of_notes_is_one_of_images(tmp_path: Path) -> None:
    write(tmp_path / "clinic" / "notes.json", {})
    (tmp_path / "clinic" / "north").mkdir()
    with pytest.raises(FedtailorError, match="holds no images"):
        load(str(tmp_path / "clinic"))

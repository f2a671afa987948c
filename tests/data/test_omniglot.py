import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedtailor._common.errors import FedtailorError
from fedtailor.data import federate, load

from .files import png, write_files

ALPHABETS = {"images_background": {"Greek": 3, "Latin": 2}, "images_evaluation": {"Angelic": 2}}
DRAWERS = 4


def contents(half: str) -> dict[str, bytes]:
    """Black strokes on white, 105×105, one bit a pixel; the upper left corner is ink."""
    rng = np.random.default_rng(list(ALPHABETS).index(half))
    files = {}
    for alphabet, characters in ALPHABETS[half].items():
        for character in range(1, characters + 1):
            for drawer in range(1, DRAWERS + 1):
                pixels = np.full((105, 105), 255, dtype=np.uint8)
                pixels[:40, :40] = 0
                pixels[60:, 60:] = rng.choice(np.array([0, 255], dtype=np.uint8), (45, 45))
                files[f"{half}/{alphabet}/character{character:02}/0001_{drawer:02}.png"] = png(pixels, "1")
    return files


def write_zips(root: Path, *halves: str) -> None:
    (root / "omniglot").mkdir(exist_ok=True)
    for half in halves:
        with zipfile.ZipFile(root / "omniglot" / f"{half}.zip", "w") as archive:
            for name, raw in contents(half).items():
                archive.writestr(name, raw)
            archive.writestr(f"__MACOSX/{half}/Greek/character01/._0001_01.png", b"junk")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_zips(tmp_path, *ALPHABETS)
    return tmp_path


def test_an_alphabet_is_a_client_and_a_character_a_class(root: Path) -> None:
    data = load("omniglot", root)
    assert data.client is not None
    assert data.group is not None
    assert data.client_names == ("Greek", "Latin", "Angelic")
    assert data.classes[:3] == ("Greek/character01", "Greek/character02", "Greek/character03")
    assert len(data.classes) == 7
    assert len(data) == 7 * DRAWERS
    assert data.y.tolist() == [label for label in range(7) for _ in range(DRAWERS)]
    assert data.client.bincount().tolist() == [3 * DRAWERS, 2 * DRAWERS, 2 * DRAWERS]
    assert (data.group // 20).tolist() == data.y.tolist()
    assert (data.group % 20).tolist() == [0, 1, 2, 3] * 7


def test_images_are_28_by_28_with_bright_ink(root: Path) -> None:
    x = load("omniglot", root).x
    assert x.shape[1:] == (1, 28, 28)
    assert (x[:, 0, :9, :9] == 255).all()
    assert (x[:, 0, 14:, :14] == 0).all()


def test_folders_and_zips_read_alike(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    zipped = load("omniglot", root)
    for halves in (list(ALPHABETS), ["images_background"], ["images_evaluation"]):
        other = tmp_path_factory.mktemp("other")
        write_zips(other, *(half for half in ALPHABETS if half not in halves))
        for half in halves:
            write_files(other / "omniglot", contents(half))
        data = load("omniglot", other)
        assert torch.equal(data.x, zipped.x)
        assert data.classes == zipped.classes


def test_rotations_of_a_drawing_stay_together(root: Path) -> None:
    data = load("omniglot:rotated", root)
    drawings = 7 * DRAWERS
    assert data.group is not None
    assert torch.equal(data.x[drawings : 2 * drawings], data.x[:drawings].rot90(1, (2, 3)))
    assert data.group.unique(return_counts=True)[1].tolist() == [4] * drawings
    group_of = {x.numpy().tobytes(): int(g) for x, g in zip(data.x, data.group, strict=True)}
    assert len(group_of) == len(data) == 4 * drawings  # all images differ
    split = federate(data, partition="natural", test=0.25, validation=0)
    for client, size in enumerate((12, 8, 8)):
        (train, _), (test, _) = split.train(client), split.test(client)
        seen, fresh = (
            {group_of[(x * 255).round().byte().contiguous().numpy().tobytes()] for x in side} for side in (train, test)
        )
        assert (len(seen), len(fresh)) == (size * 3 // 4, size // 4)
        assert not seen & fresh


def test_stratified_every_character_has_three_quarters_of_its_drawings_for_training(root: Path) -> None:
    """As PFLEGO's Omniglot is split: of each class, not of an alphabet as a whole; with all rotations of a drawing."""
    data = load("omniglot:rotated", root)
    of_seeds = [federate(data, partition="natural", test=0.25, validation=0, seed=seed) for seed in range(5)]
    of_seeds += [federate(data, partition="natural", test=0.25, validation=0, labels="own")]
    for split in of_seeds:
        for client, characters in enumerate((3, 2, 2)):
            (_, train), (_, test) = split.train(client), split.test(client)
            assert train.unique(return_counts=True)[1].tolist() == [DRAWERS * 3] * characters
            assert test.unique(return_counts=True)[1].tolist() == [DRAWERS] * characters


def test_an_empty_half_is_refused(tmp_path: Path) -> None:
    for half in ALPHABETS:
        (tmp_path / "omniglot" / half).mkdir(parents=True)
    with pytest.raises(FedtailorError, match=r"images_background cannot be read: there is no ALPHABET/CHARACTER"):
        load("omniglot", tmp_path)


def test_truncated_zip_is_named(root: Path) -> None:
    archive = root / "omniglot" / "images_evaluation.zip"
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(FedtailorError, match=r"images_evaluation\.zip cannot be read: it is truncated or damaged"):
        load("omniglot", root)


def test_truncated_image_is_named(tmp_path: Path) -> None:
    for half in ALPHABETS:
        write_files(tmp_path / "omniglot", contents(half))
    file = tmp_path / "omniglot/images_background/Greek/character02/0001_03.png"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(FedtailorError, match=r"character02/0001_03\.png cannot be read: it is not an image"):
        load("omniglot", tmp_path)


def test_strange_file_names_are_refused(tmp_path: Path) -> None:
    for half in ALPHABETS:
        write_files(tmp_path / "omniglot", contents(half))
    (tmp_path / "omniglot/images_background/Greek/character02/0001_21.png").write_bytes(b"")
    with pytest.raises(FedtailorError, match="a drawer from 01 to 20"):
        load("omniglot", tmp_path)


def test_a_missing_half_and_an_unknown_variant_are_refused(tmp_path: Path) -> None:
    write_zips(tmp_path, "images_background")
    with pytest.raises(FedtailorError, match=r"get omniglot/images_evaluation\.zip from https://github\.com/brenden"):
        load("omniglot", tmp_path)
    with pytest.raises(FedtailorError, match="write 'omniglot', 'omniglot:rotated' or"):
        load("omniglot:turned", tmp_path)


def test_rotations_fall_apart_only_if_asked_for(root: Path) -> None:
    together, apart = load("omniglot:rotated", root), load("omniglot:rotated-apart", root)
    assert torch.equal(apart.x, together.x)
    assert apart.group is None

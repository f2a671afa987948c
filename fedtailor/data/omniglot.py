"""Omniglot: 1,623 characters of 50 alphabets, each drawn by 20 people; zips or folders of PNG files.

Both published halves (background and evaluation) are read. Images are resized to 28×28 and inverted: ink is
bright, paper is 0. A client is an alphabet.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageChops

from fedtailor._common.errors import FedtailorError
from fedtailor.data.dataset import DataInfo, Dataset, DataSets, require
from fedtailor.data.foreign_files import check_archive, damaged, reading
from fedtailor.data.images import open_image

HALVES = ("images_background", "images_evaluation")
SIDE, DRAWERS = 28, 20


def read_omniglot(info: DataInfo, root: Path, variant: str) -> Dataset:
    """Read Omniglot. The `group` of a sample is its drawing: class × 20 + drawer.

    `omniglot:rotated` adds every drawing turned by 90°, 180° and 270°; the four stay on one side of a split.
    `omniglot:rotated-apart` may put them on both, as PFLEGO's release does.
    """
    if variant not in ("", "rotated", "rotated-apart"):
        raise FedtailorError(
            f"'omniglot:{variant}' is not known: write 'omniglot', 'omniglot:rotated' or 'omniglot:rotated-apart'."
        )
    require(info, root)
    drawings = [drawing for half in HALVES for drawing in _drawings(root / "omniglot" / half)]
    alphabets = list(dict.fromkeys(alphabet for alphabet, *_ in drawings))
    characters = list(dict.fromkeys((alphabet, character) for alphabet, character, *_ in drawings))
    client_of = {alphabet: number for number, alphabet in enumerate(alphabets)}
    class_of = {character: number for number, character in enumerate(characters)}
    x = torch.from_numpy(np.stack([pixels for *_, pixels in drawings]))[:, None]
    y = torch.tensor([class_of[alphabet, character] for alphabet, character, *_ in drawings])
    client = torch.tensor([client_of[alphabet] for alphabet, *_ in drawings])
    group = y * DRAWERS + torch.tensor([drawer for _, _, drawer, _ in drawings])
    turns = 4 if variant else 1
    return Dataset(
        name=f"omniglot:{variant}" if variant else "omniglot",
        x=torch.cat([x.rot90(turn, (2, 3)) for turn in range(turns)]),
        y=y.repeat(turns),
        classes=tuple(map("/".join, characters)),
        client=client.repeat(turns),
        client_names=tuple(alphabets),
        group=None if variant == "rotated-apart" else group.repeat(turns),
    )


def _drawings(half: Path) -> Iterator[tuple[str, str, int, NDArray[np.uint8]]]:
    """Yield alphabet, character, drawer (0 to 19) and pixels of each file of one half."""
    file = None
    for file, contents in _pngs(half):
        alphabet, character, drawing = PurePosixPath(file).parts[-3:]
        try:
            drawer = int(PurePosixPath(drawing).stem.split("_")[1]) - 1  # 0964_20.png
        except (IndexError, ValueError):
            drawer = -1
        if not 0 <= drawer < DRAWERS:
            raise damaged(file, "its name is not CHARACTER_DRAWER.png with a drawer from 01 to 20")
        with reading(file, "it is not an image, or truncated"):
            image = ImageChops.invert(open_image(file, contents).convert("L"))
            pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        yield alphabet, character, drawer, pixels
    if file is None:
        raise damaged(half, "there is no ALPHABET/CHARACTER/DRAWING.png in it")


def _pngs(half: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the images of one half in order of their names, from its folder or else its zip."""
    if half.is_dir():
        for path in sorted(half.glob("*/*/*.png")):
            with reading(path):
                contents = path.read_bytes()
            yield path.as_posix(), contents
        return
    path = half.with_suffix(".zip")
    with reading(path):
        archive = zipfile.ZipFile(path)
        check_archive(path, archive)
    with archive:
        for name in sorted(archive.namelist()):
            parts = PurePosixPath(name).parts  # half, alphabet, character, drawing
            if name.endswith(".png") and len(parts) == 4 and parts[0] == half.name:
                with reading(path):
                    contents = archive.read(name)
                yield f"{path}/{name}", contents


def _files(suffixes: tuple[str, str]) -> tuple[str, ...]:
    return tuple(f"omniglot/{half}{suffix}" for half, suffix in zip(HALVES, suffixes, strict=True))


DATA_SETS: DataSets = (
    (
        DataInfo(
            "omniglot", "handwritten characters of 50 alphabets (the clients), 28×28 grey", 1623,
            _files((".zip", ".zip")),
            "https://github.com/brendenlake/omniglot",
            variants="rotated (each drawing in four directions), rotated-apart (not kept together)",
            also=(_files(("", "")), _files(("", ".zip")), _files((".zip", ""))),
        ),
        read_omniglot,
    ),
)  # fmt: skip

"""The user's own pictures: a folder of client/class/picture."""

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data.arrays import encode
from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.data.info import damaged
from fedtailor.errors import FedtailorError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}


def open_picture(file: str | Path, contents: bytes) -> Image.Image:
    """The decoded picture."""
    try:
        image = Image.open(BytesIO(contents))
        image.load()
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError):
        raise damaged(file, "it is not a picture, or truncated") from None
    return image


def read_folder(folder: Path, size: int | None, labelled: bool = True) -> Dataset:
    """All pictures, grey if all are grey and colour otherwise, resized to size × size if that is given. Unless
    `labelled`, they may also lie in the folder itself."""
    if size is not None and size < 1:
        raise FedtailorError(f"picture_size is {size}: give the number of pixels per side, 1 or more.")
    files = _files(folder, "*/*/*")
    loose = [] if files or labelled else _files(folder, "*")
    if not files and not loose:
        raise FedtailorError(
            f"The folder {folder} holds no pictures: it needs them as client/class/picture, "
            "for example hospital-a/healthy/0001.png."
        )
    pictures = [_pixels(file, size) for file in files or loose]
    _check_sizes(files or loose, pictures)
    if any(picture.ndim == 3 for picture in pictures):
        pictures = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in pictures]
    x = torch.from_numpy(np.stack(pictures))
    x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
    if loose:
        return without_labels(folder.resolve().name, x)
    y, classes = encode(np.array([file.parent.name for file in files]), f"The classes of {folder}")
    client, names = encode(np.array([file.parent.parent.name for file in files]), f"The clients of {folder}")
    return Dataset(folder.resolve().name, x, y, classes, client=client, client_names=names)


def _files(folder: Path, pattern: str) -> list[Path]:
    """The pictures of a folder, in the order of their names."""
    return sorted(file for file in folder.glob(pattern) if file.suffix.lower() in SUFFIXES)


def _pixels(file: Path, size: int | None) -> NDArray[np.uint8]:
    """(height, width) of a grey picture, (height, width, 3) of any other."""
    image = open_picture(file, file.read_bytes())
    if image.mode.startswith(("I", "F")):
        raise FedtailorError(f"The picture {file} has more than 8 bits per pixel: save it with 8.")
    image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    if size is not None:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _check_sizes(files: list[Path], pictures: list[NDArray[np.uint8]]) -> None:
    for file, picture in zip(files, pictures, strict=True):
        if picture.shape[:2] != pictures[0].shape[:2]:
            sizes = [f"{shape[1]}×{shape[0]}" for shape in (pictures[0].shape, picture.shape)]
            raise FedtailorError(
                f"The pictures differ in size: {files[0]} is {sizes[0]}, {file} is {sizes[1]}; "
                "say with --picture-size what to resize them to."
            )

"""The user's own images: a folder of client/class/image."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.data.arrays import encode
from fedtailor.data.dataset import Dataset, without_labels
from fedtailor.data.foreign_files import check_size, reading

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # Pillow's names; of some others it calls programs
PIXELS = 50_000_000  # of one image
SIDE = 4096  # pixels to which images are resized, at most


def open_image(file: str | Path, contents: bytes) -> Image.Image:
    """Decode an image. One of too many pixels is refused before it is unpacked."""
    with reading(file, "it is not an image, or truncated"), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # it is refused below
        try:
            image = Image.open(BytesIO(contents), formats=FORMATS)
        except Image.DecompressionBombError:
            raise _too_large(file) from None
        if image.width * image.height > PIXELS:
            raise _too_large(file)
        image.load()
    return image


def _too_large(file: str | Path) -> FedtailorError:
    return FedtailorError(f"The image {file} has more than {PIXELS // 10**6} million pixels: make it smaller.")


def read_folder(folder: Path, size: int | None, labelled: bool = True) -> Dataset:
    """Read all images: grey if all are grey, colour otherwise; resized to size × size if that is given.

    Unless `labelled`, they may also be in the folder itself.
    """
    if size is not None and not 1 <= size <= SIDE:
        raise FedtailorError(f"image_size is {size}: give the number of pixels per side, from 1 to {SIDE}.")
    files = _files(folder, "*/*/*")
    loose = [] if files or labelled else _files(folder, "*")
    if not files and not loose:
        raise FedtailorError(
            f"The folder {folder} holds no images: it needs them as client/class/image, "
            "for example hospital-a/healthy/0001.png."
        )
    images: list[NDArray[np.uint8]] = []
    taken = 0
    for file in files or loose:
        images.append(_pixels(file, size))
        taken += images[-1].nbytes
        check_size(folder, taken)
    x = stacked_images(files or loose, images)
    if loose:
        return without_labels(folder.resolve().name, x)
    y, classes = encode([file.parent.name for file in files], f"The classes of {folder}")
    client, names = encode([file.parent.parent.name for file in files], f"The clients of {folder}")
    return Dataset(folder.resolve().name, x, y, classes, client=client, client_names=names)


def _files(folder: Path, pattern: str) -> list[Path]:
    """List the images of a folder, in the order of their names."""
    return sorted(file for file in folder.glob(pattern) if file.suffix.lower() in SUFFIXES)


def _pixels(file: Path, size: int | None) -> NDArray[np.uint8]:
    """Read an image: (height, width) if it is grey, (height, width, 3) otherwise."""
    with reading(file, "it is not an image, or truncated"):
        return as_pixels(open_image(file, file.read_bytes()), file, size)


def as_pixels(image: Image.Image, name: str | Path, size: int | None) -> NDArray[np.uint8]:
    """Make an array of an image: (height, width) if it is grey, (height, width, 3) otherwise."""
    if image.mode.startswith(("I", "F")):
        raise FedtailorError(f"The image {name} has more than 8 bits per pixel: save it with 8.")
    image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    if size is not None:
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)


def stacked_images(names: Sequence[str | Path], images: list[NDArray[np.uint8]]) -> Tensor:
    """Make one tensor of images, in colour if any of them is."""
    _check_sizes(names, images)
    if any(image.ndim == 3 for image in images):
        images = [p if p.ndim == 3 else np.repeat(p[..., None], 3, axis=2) for p in images]
    x = torch.from_numpy(np.stack(images))
    return x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()


def _check_sizes(files: Sequence[str | Path], images: list[NDArray[np.uint8]]) -> None:
    for file, image in zip(files, images, strict=True):
        if image.shape[:2] != images[0].shape[:2]:
            sizes = [f"{shape[1]}×{shape[0]}" for shape in (images[0].shape, image.shape)]
            raise FedtailorError(
                f"The images differ in size: {files[0]} is {sizes[0]}, {file} is {sizes[1]}; "
                "say with --image-size what to resize them to."
            )

"""Augmentation: random changes of training images, drawn anew for every batch."""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor
from torch.nn import functional

from fedtailor._common.errors import FedtailorError, unknown

KINDS = ("crop", "flip", "jitter")


@dataclass(frozen=True)
class Augmentation:
    """The changes of each training image: random crops, flips and changes of brightness and contrast."""

    crop: int = 0  # pixels of zeros on each side, of which a random window of the image's size is cut
    flip: bool = False  # mirrored left to right with probability 1/2
    jitter: float = 0.0  # brightness and contrast times random factors from 1 − jitter to 1 + jitter

    @classmethod
    def parse(cls, text: str) -> "Augmentation":
        """Read `crop:PIXELS,flip,jitter:SHARE`: any of the three, in any order."""
        asked: dict[str, int | bool | float] = {}
        for word in text.split(","):
            kind, _, value = word.strip().partition(":")
            if kind not in KINDS:
                raise unknown("augmentation", kind, KINDS)
            if kind in asked:
                raise FedtailorError(f"The augmentation {text!r} has {kind!r} twice: give it once.")
            asked[kind] = _value(kind, value)
        return cls(**asked)  # type: ignore[arg-type]

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse inputs of a shape that cannot be augmented."""
        if len(shape) != 3:
            raise FedtailorError(
                f"Augmentation is for images, but these inputs have the shape {'×'.join(map(str, shape))}: leave "
                "--augment out, or give images as (channels, height, width)."
            )
        if self.crop >= min(shape[1:]):
            raise FedtailorError(
                f"The augmentation crop:{self.crop} pads more than the side of an image of {shape[1]}×{shape[2]} "
                f"pixels: give at most {min(shape[1:]) - 1}."
            )

    def __call__(self, images: Tensor, stream: torch.Generator) -> Tensor:
        """Return changed copies of the images, with their channels last in memory."""
        n, _, height, width = images.shape
        changed = images.permute(0, 2, 3, 1).contiguous()
        down, right = torch.randint(2 * self.crop + 1, (2, n, 1), generator=stream).to(images.device)
        mirrored = torch.rand(n, 1, generator=stream, dtype=torch.float64).to(images.device, images.dtype) < 0.5
        factors = torch.rand(2, n, 1, 1, 1, generator=stream, dtype=torch.float64).to(images.device, images.dtype)
        if self.crop or self.flip:
            rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
            columns = torch.where(mirrored, columns.flip(0), columns) if self.flip else columns
            padded = functional.pad(changed, (0, 0, *[self.crop] * 4))
            each = torch.arange(n, device=images.device)[:, None, None]
            changed = padded[each, (rows + down)[:, :, None], (columns + right)[:, None, :]]
        if self.jitter:
            brightness, contrast = 1 + self.jitter * (2 * factors - 1)
            changed = changed * brightness
            mean = changed.mean(dim=(1, 2, 3), keepdim=True)
            changed = mean + contrast * (changed - mean)
        return changed.permute(0, 3, 1, 2)


def _value(kind: str, text: str) -> int | bool | float:
    try:
        if kind == "flip" and not text:
            return True
        if kind == "crop" and int(text) >= 1:
            return int(text)
        if kind == "jitter" and 0 < float(text) <= 1 and isfinite(float(text)):
            return float(text)
    except ValueError:
        pass
    right = {"crop": "crop:4 (pixels, 1 or more)", "flip": "flip", "jitter": "jitter:0.2 (above 0, at most 1)"}[kind]
    raise FedtailorError(f"The augmentation {kind}:{text} is not understood: write {right}.")

"""The picture of a study of leakage: the true images in the first row, each method's reconstructions below."""

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

if TYPE_CHECKING:
    from fedtailor.attacks.leakage import Leakage

SIDE, MOST, GAP = 56, 16, 4  # pixels of an image's longer side, images in a row, pixels between them
LETTER = 7  # pixels of a letter's width


def picture(found: "Leakage") -> bytes:
    """Draw all rows as one PNG file, with at most 16 images in each."""
    assert found.pixels is not None
    rows = [("original", found.true), *((row.title, row.guessed) for row in (*found.baselines, *found.rows))]
    images = [(title, [_image(image, found.pixels) for image in batch[:MOST]]) for title, batch in rows]
    width, height = images[0][1][0].size
    left = LETTER * max(len(title) for title, _ in images) + 2 * GAP
    size = (left + len(images[0][1]) * (width + GAP), len(images) * (height + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for number, (title, line) in enumerate(images):
        top = GAP + number * (height + GAP)
        draw.text((GAP, top + height // 2 - 6), title, fill="black")
        for place, image in enumerate(line):
            sheet.paste(image, (left + place * (width + GAP), top))
    content = BytesIO()
    sheet.save(content, "PNG", optimize=True)
    return content.getvalue()


def _image(pixels: Tensor, span: tuple[float, float]) -> Image.Image:
    """An image of one or three channels, enlarged without smoothing."""
    low, high = span
    values: NDArray[np.uint8] = (
        ((pixels.detach().cpu().double() - low) / (high - low) * 255).round().clamp(0, 255).byte().numpy()
    )
    image = Image.fromarray(values.transpose(1, 2, 0)) if len(values) == 3 else Image.fromarray(values[0])
    factor = max(1, SIDE // max(image.size))
    return image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)

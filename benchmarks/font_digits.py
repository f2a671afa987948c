"""Draw the digits of DejaVu's fonts that come with fedtailor (fedtailor/data/font_digits.npz), from matplotlib's copy:

python -m benchmarks.font_digits FILE
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE, HEIGHT = 56, 36  # pixels of an image, and of a digit in it
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def drawn(font: Path, digit: int) -> Image.Image:
    """Draw a digit in the middle of an image, white on black."""
    large = ImageFont.truetype(font, 100)
    _, top, _, bottom = large.getbbox(str(digit))
    face = ImageFont.truetype(font, round(100 * HEIGHT / (bottom - top)))
    left, top, right, bottom = face.getbbox(str(digit))
    image = Image.new("L", (SIDE, SIDE))
    place = ((SIDE - right - left) / 2, (SIDE - bottom - top) / 2)
    ImageDraw.Draw(image).text(place, str(digit), fill=255, font=face)
    return image


def main(to: str) -> None:
    fonts = [font for font in sorted(FONTS.glob("DejaVu*.ttf")) if "Display" not in font.stem]
    pixels = np.array([[np.asarray(drawn(font, digit)) for digit in range(10)] for font in fonts])
    np.savez_compressed(to, pixels=pixels, fonts=np.array([font.stem for font in fonts]))


if __name__ == "__main__":
    main(*sys.argv[1:])

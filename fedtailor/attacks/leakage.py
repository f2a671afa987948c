"""The outcome of a study of leakage: a row for each method, as numbers, text, Markdown and a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from fedtailor._common.files import make_directory, write_atomically
from fedtailor._common.text import json_text
from fedtailor.attacks.scores import Score, verdict
from fedtailor.experiment import Experiment, deciding_settings

if TYPE_CHECKING:
    from fedtailor.attacks.study import Question

FILE = "leakage"  # the name of the files in a directory
SIDE, MOST, GAP = 56, 16, 4  # pixels of an image's longer side, images in a row, pixels between them
LETTER = 7  # pixels of a letter's width
RULE = (
    "Recognisable: at least half of the way in SSIM from the data set's mean image to the true one; copied: at most "
    "1 % of its squared error."
)
RULE_OF_NUMBERS = "Recognisable: at most half of the squared error of the data set's mean sample; copied: at most 1 %."


@dataclass(frozen=True)
class Row:
    """One method's reconstructions with their scores, in the order of the true samples; `matched` says to what in the
    upload they were fitted, `distance` how far from it they are."""

    title: str
    matched: str
    scores: Sequence[Score]
    guessed: Tensor
    distance: float | None = None
    seconds: float = 0.0

    @property
    def mse(self) -> float:
        return _mean(score.mse for score in self.scores) or 0.0

    @property
    def psnr(self) -> float | None:
        return _mean(score.psnr for score in self.scores)

    @property
    def ssim(self) -> float | None:
        return _mean(score.ssim for score in self.scores)

    @property
    def labels(self) -> float | None:
        """The share of labels that were recovered; None if none could be read."""
        return _mean(None if score.label is None else float(score.label) for score in self.scores)


@dataclass
class Leakage:
    """The rows of all methods, behind those of two guesses that are no leak: the mean image, and noise."""

    experiment: Experiment
    question: "Question"
    true: Tensor
    pixels: tuple[float, float] | None
    baselines: list[Row]
    rows: list[Row] = field(default_factory=list)

    @property
    def n_samples(self) -> int:
        return len(self.true)

    @property
    def rule(self) -> str:
        """The meaning of the verdicts."""
        return RULE_OF_NUMBERS if self.pixels is None else RULE

    def counted(self, row: Row) -> tuple[int, int]:
        """Count a row's recognisable reconstructions, copies among them, and the copies."""
        found = [verdict(one, mean) for one, mean in zip(row.scores, self.baselines[0].scores, strict=True)]
        return sum(each != "nothing" for each in found), found.count("copy")

    def verdict(self, row: Row) -> str:
        """Say in words how much of the samples is to be seen."""
        recognisable, copies = self.counted(row)
        if not recognisable:
            return "not recognisable"
        if copies == self.n_samples:
            return "copied" if copies == 1 else f"all {copies} copied"
        words = "recognisable" if self.n_samples == 1 else f"{recognisable} of {self.n_samples} recognisable"
        return f"{words}, {copies} copied" if copies else words

    @property
    def title(self) -> str:
        """The attack in one line."""
        asked, each = self.question, self.question.samples
        whom = f"{asked.victims} client{'s' * (asked.victims > 1)} with {each} sample{'s' * (each > 1)}"
        private = f", privacy {self.experiment.privacy}" if self.experiment.privacy else ""
        return (
            f"{self.experiment.data}, {self.experiment.model}: {asked.attack.kind} inversion of the uploads of {whom}"
            f"{' each' * (asked.victims > 1)} in round {asked.round}{private}"
        )

    def cells(self) -> list[tuple[str, ...]]:
        """The table: its head, the baselines, and a row for each method."""
        head = ("method", "matched", "PSNR", "SSIM", "MSE", "labels", "verdict")
        rows = [(*self._numbers(row), "no leak") for row in self.baselines]
        return [head, *rows, *((*self._numbers(row), self.verdict(row)) for row in self.rows)]

    @staticmethod
    def _numbers(row: Row) -> tuple[str, ...]:
        psnr, ssim, labels = row.psnr, row.ssim, row.labels
        return (
            row.title,
            row.matched or "–",
            "–" if psnr is None else f"{psnr:.1f}",
            "–" if ssim is None else f"{ssim:.2f}",
            f"{row.mse:.2g}",
            "–" if labels is None else f"{100 * labels:.0f} %",
        )

    def __str__(self) -> str:
        rows = self.cells()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.title, "", *lines, "", self.rule])

    def markdown(self) -> str:
        """The table for a page."""
        head, *rows = self.cells()
        lines = [head, ("---",) * len(head), *rows]
        return "\n".join(["| " + " | ".join(line) + " |" for line in lines])

    def plain(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        return {
            "title": self.title,
            "rule": self.rule,
            "question": asdict(self.question),
            "experiment": deciding_settings(self.experiment),
            "baselines": [self._plain(row) for row in self.baselines],
            "methods": [self._plain(row) for row in self.rows],
        }

    def _plain(self, row: Row) -> dict[str, Any]:
        recognisable, copies = self.counted(row)
        means = {"mse": row.mse, "psnr": row.psnr, "ssim": row.ssim, "labels": row.labels}
        left = row.distance if row.distance is not None and isfinite(row.distance) else None
        found = {"distance": left, "recognisable": recognisable, "copies": copies, "seconds": row.seconds}
        samples = [asdict(score) for score in row.scores]
        return {"method": row.title, "matched": row.matched, **means, **found, "samples": samples}

    def write(self, directory: Path) -> list[Path]:
        """Write the record as JSON and Markdown and, of images, the picture; return the files."""
        make_directory(directory)
        text = f"{self.title}\n\n{self.markdown()}\n\n{self.rule}\n"
        files: dict[str, bytes | str] = {f"{FILE}.json": json_text(self.plain()), f"{FILE}.md": text}
        if self.pixels is not None:
            files[f"{FILE}.png"] = picture(self)
        for name, content in files.items():
            write_atomically(directory / name, content)
        return [directory / name for name in files]


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers among these; None if there are none."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def picture(found: Leakage) -> bytes:
    """Draw the true images in the first row and each method's reconstructions below, at most 16, as a PNG file."""
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

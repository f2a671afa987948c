"""A table as hospitals have it: text, missing cells, an id, a date, columns of very different scale."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

WARDS = ("icu", "medicine", "surgery")


def patients(hospitals: tuple[str, ...], each: int, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each patient. Age, income and ward decide about the diagnosis."""
    rng, found = np.random.default_rng(seed), []
    for hospital in hospitals:
        for _ in range(each):
            age, income, ward = rng.normal(60, 10), rng.normal(30_000, 9_000), int(rng.integers(3))
            risk = (age - 60) / 10 + (income - 30_000) / 9_000 + (ward == 0) + 0.3 * rng.normal()
            found.append(
                {
                    "patient_id": f"P{rng.integers(10**9):09}",
                    "age": "" if rng.random() < 0.1 else f"{age:.1f}",
                    "income": f"{income:.2f}",
                    "ward": WARDS[ward],
                    "smoker": rng.choice(["yes", "no", "NA"]),
                    "admitted": f"2024-0{rng.integers(1, 10)}-1{rng.integers(0, 10)}",
                    "hospital": hospital,
                    "diagnosis": "ill" if risk > 0.3 else "healthy",
                }
            )
    return found


def write(path: Path | str, rows: list[dict[str, Any]], columns: list[str] | None = None, separator: str = ",") -> None:
    """Write some of the columns as CSV, in this order."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]), extrasaction="ignore", delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)

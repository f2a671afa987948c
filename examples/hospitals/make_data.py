"""Make the tables of five hospitals: patients with chest pain, and whether their coronary arteries are narrowed.

    python examples/hospitals/make_data.py DIRECTORY

The patients are invented: no real ones, and no copy of a published data set. The columns and their ranges are those of
a work-up for heart disease. `DIRECTORY/HOSPITAL/patients.csv` is what a hospital trains on,
`DIRECTORY/HOSPITAL/new-patients.csv` has patients who come later, and `DIRECTORY/all.csv` is the first four tables as
one, with a column for the hospital: for simulations.

The model. A hospital draws each column from distributions of its own (`POPULATION` and its changes). The log-odds of
the disease are

    intercept + Σ effect[column] · (value − centre) / scale   of numbers
              + Σ effect[column][value]                        of categories

with the effects `COMMON`, except those that the hospital replaces (`Hospital.own`): there, a sign means something else,
and a model that is right for the others is wrong. The intercept makes the hospital's share of ill patients what it
says (`Hospital.ill`, on average). Then cells go missing at random, and the hospital writes its table in its own way.
"""

import csv
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = dict[str, NDArray[Any]]
Effect = float | dict[str, float]

NEW = 40  # patients who come later, at each hospital
NUMBERS = {  # centre and scale
    "age": (55.0, 9.0),
    "resting_bp": (132.0, 17.0),
    "cholesterol": (245.0, 50.0),
    "max_heart_rate": (148.0, 22.0),
    "st_depression": (1.0, 1.1),
    "vessels": (0.7, 0.9),
}
POPULATION: dict[str, Any] = {  # mean and deviation of a number (mean alone: a count), shares of a category's values
    "age": (54.0, 9.0),
    "sex": {"female": 0.32, "male": 0.68},
    "chest_pain": {"typical": 0.1, "atypical": 0.2, "non-anginal": 0.28, "asymptomatic": 0.42},
    "resting_bp": (131.0, 17.0),
    "cholesterol": (246.0, 50.0),
    "fasting_sugar": {"normal": 0.85, "high": 0.15},
    "ecg": {"normal": 0.52, "st-t": 0.08, "hypertrophy": 0.4},
    "max_heart_rate": (149.0, 22.0),
    "angina": {"no": 0.67, "yes": 0.33},
    "st_depression": 1.0,
    "slope": {"up": 0.47, "flat": 0.45, "down": 0.08},
    "vessels": 0.7,
    "thal": {"normal": 0.55, "fixed": 0.08, "reversible": 0.37},
}
COMMON: dict[str, Effect] = {
    "age": 0.6,
    "sex": {"male": 1.2},
    "chest_pain": {"typical": -0.6, "atypical": -1.2, "non-anginal": -0.8, "asymptomatic": 1.6},
    "resting_bp": 0.3,
    "cholesterol": 0.5,
    "fasting_sugar": {"high": 0.3},
    "ecg": {"st-t": 0.6, "hypertrophy": 0.5},
    "max_heart_rate": -1.2,
    "angina": {"yes": 1.6},
    "st_depression": 1.2,
    "slope": {"up": -0.9, "flat": 0.9, "down": 0.6},
    "vessels": 1.8,
    "thal": {"normal": -1.2, "fixed": 0.8, "reversible": 1.6},
}
COLUMNS = list(POPULATION)
LABEL = "diagnosis"


@dataclass(frozen=True)
class Hospital:
    """A hospital: its size, its share of ill patients, what is different there, and how it writes its table."""

    patients: int
    ill: float
    population: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Effect] = field(default_factory=dict)  # effects in place of the common ones
    missing: Mapping[str, float] = field(default_factory=dict)  # shares of missing cells
    units: Mapping[str, float] = field(default_factory=dict)  # a number is written in this many of the common units
    columns: tuple[str, ...] = (*COLUMNS, LABEL)
    separator: str = ","
    decimal: str = "."


SCREENED = {"typical": 0.6, "non-anginal": -0.4}  # chest pain: no pain says nothing, typical pain much
HOSPITALS = {
    "harbour": Hospital(300, 0.46, missing={"vessels": 0.03, "thal": 0.03}),
    # Examines everybody of a certain age, so that patients without pain are like all others.
    "hill": Hospital(
        290,
        0.36,
        population={"age": (48.0, 8.0), "ecg": {"normal": 0.8, "st-t": 0.18, "hypertrophy": 0.02}},
        own={"chest_pain": SCREENED},
        missing={"cholesterol": 0.08, "slope": 0.2, "thal": 0.3},
        separator=";",
        decimal=",",
    ),
    # Has few patients, most of them ill. They exercise to exhaustion: a high heart rate is no good sign.
    "lake": Hospital(
        120,
        0.72,
        population={"age": (57.0, 8.0), "sex": {"female": 0.1, "male": 0.9}, "max_heart_rate": (122.0, 24.0)},
        own={"max_heart_rate": 0.3},
        missing={"vessels": 0.85, "thal": 0.1, "fasting_sugar": 0.1},
    ),
    # Reads scans by other rules, and measures cholesterol in mmol/l.
    "valley": Hospital(
        200,
        0.58,
        population={"age": (61.0, 8.0), "sex": {"female": 0.05, "male": 0.95}, "resting_bp": (142.0, 19.0)},
        own={"thal": {"fixed": 1.3, "reversible": -0.3}},
        missing={"resting_bp": 0.1, "st_depression": 0.1, "vessels": 0.1},
        units={"cholesterol": 38.67},  # mg/dl
        columns=("patient_id", LABEL, *reversed(COLUMNS)),
    ),
    # Comes when the others are done. It examines whom hill would.
    "meadow": Hospital(90, 0.4, own={"chest_pain": SCREENED}, missing={"thal": 0.05}),
}
LATER = ("meadow",)


def draw(hospital: Hospital, count: int, random: np.random.Generator) -> Table:
    """Draw the columns of so many patients."""
    table: Table = {}
    for name, law in {**POPULATION, **hospital.population}.items():
        if isinstance(law, dict):
            table[name] = random.choice(list(law), count, p=list(law.values()))
        elif name == "vessels":
            table[name] = np.minimum(random.poisson(law, count), 3)
        elif name == "st_depression":
            table[name] = random.exponential(law, count).round(1)
        else:
            mean, deviation = law
            table[name] = random.normal(mean, deviation, count).round()
    return table


def log_odds(hospital: Hospital, table: Table) -> NDArray[np.float64]:
    """The log-odds of the disease, without the intercept."""
    total = np.zeros(len(table["age"]))
    for name, effect in {**COMMON, **hospital.own}.items():
        if isinstance(effect, dict):
            total += np.array([effect.get(value, 0.0) for value in table[name].tolist()])
        else:
            centre, scale = NUMBERS[name]
            total += effect * (table[name] - centre) / scale
    return total


def probability(hospital: Hospital, table: Table) -> NDArray[np.float64]:
    """The probability of the disease: what a model could know at best."""
    many = log_odds(hospital, draw(hospital, 20_000, np.random.default_rng(0)))
    low, high = -20.0, 20.0
    for _ in range(50):  # bisection
        middle = (low + high) / 2
        low, high = (low, middle) if (1 / (1 + np.exp(-many - middle))).mean() > hospital.ill else (middle, high)
    return np.asarray(1 / (1 + np.exp(-log_odds(hospital, table) - low)))


def patients(name: str, count: int, seed: int) -> Table:
    """Draw so many patients of a hospital, in its own units, with None for what is missing."""
    hospital = HOSPITALS[name]
    random = np.random.default_rng([seed, *name.encode()])
    table = draw(hospital, count, random)
    ill = random.random(count) < probability(hospital, table)
    for column, unit in hospital.units.items():
        table[column] = (table[column] / unit).round(1)
    for column, share in hospital.missing.items():
        table[column] = table[column].astype(object)
        table[column][random.random(count) < share] = None
    numbers = 100_000 + random.permutation(7 * count)[:count]
    return {"patient_id": numbers, **table, LABEL: np.where(ill, "yes", "no")}


def write(path: Path, table: Table, hospital: Hospital) -> None:
    """Write a table as the hospital does."""
    cells = [
        [_text(value).replace(".", hospital.decimal) for value in table[name].tolist()] for name in hospital.columns
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=hospital.separator, lineterminator="\n")
        writer.writerow(hospital.columns)
        writer.writerows(zip(*cells, strict=True))


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def make(directory: Path, seed: int = 0) -> None:
    """Write all tables."""
    tables = {name: patients(name, hospital.patients, seed) for name, hospital in HOSPITALS.items()}
    for name, hospital in HOSPITALS.items():
        write(directory / name / "patients.csv", tables[name], hospital)
        write(directory / name / "new-patients.csv", patients(name, NEW, seed + 1), hospital)
    first = [name for name in HOSPITALS if name not in LATER]
    together = {column: np.concatenate([tables[name][column] for name in first]) for column in (*COLUMNS, LABEL)}
    together["hospital"] = np.repeat(first, [HOSPITALS[name].patients for name in first])
    write(directory / "all.csv", together, Hospital(0, 0, columns=(*COLUMNS, LABEL, "hospital")))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make_data.py DIRECTORY")
    make(Path(sys.argv[1]))


if __name__ == "__main__":
    main()

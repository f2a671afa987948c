"""A plan and sites for the tests of kits."""

from pathlib import Path

from fedtailor.sites.plan import Plan, read_plan

PLAN = """
name = "heart"  # a comment that sites should see
server = "localhost"
port = 8002
sites = ["cleveland", "long-beach"]
classes = ["no", "yes"]
[experiment]
method = "pgfed"
rounds = 3
"""


def write_plan(folder: Path, text: str = PLAN) -> Path:
    """Write a plan."""
    path = folder / "federation.toml"
    path.write_text(text)
    return path


def plan(folder: Path, text: str = PLAN) -> Plan:
    """The plan, read."""
    return read_plan(write_plan(folder, text))


def moved(kits: Path, name: str, to: Path) -> Path:
    """Take a site's directory to the site, as mail does; return the site's file there."""
    (kits / name).rename(to / name)
    return to / name / "site.toml"

"""The size of fedtailor and of each extra, installed: the table of docs/installing.md.

    python -m benchmarks.extras

The package goes into an environment of its own, and the packages that an extra adds to those into another. Versions are
the lock file's. pip needs its index; everything is removed again.
"""

import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from benchmarks.measuring import table

ROOT = Path(__file__).parent.parent


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def installed(what: list[str], environment: Path, beside: Path | None = None) -> tuple[int, float]:
    """Install packages in a new environment, beside what another one has. Return their number, with those that they
    need, and their size in MB."""
    venv.create(environment)
    here = site_packages(environment)
    if beside is not None:
        (here / "beside.pth").write_text(str(site_packages(beside)))
    into = ["--python", str(environment / "bin" / "python")]
    command = [sys.executable, "-m", "pip", *into, "install", "--quiet", "--constraint", "requirements.lock"]
    subprocess.run([*command, *what], cwd=ROOT, check=True)
    size = sum(file.stat().st_size for file in here.rglob("*") if file.is_file() and not file.is_symlink())
    return len(list(here.glob("*.dist-info"))), size / 1e6


def main() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "fedtailor"
        rows = [("fedtailor", *installed(["."], base))]
        rows += [(name, *installed(of, Path(directory) / name, beside=base)) for name, of in extras.items()]
    print(table(["", "packages", "MB"], [[name, str(packages), f"{size:.0f}"] for name, packages, size in rows]))


if __name__ == "__main__":
    main()

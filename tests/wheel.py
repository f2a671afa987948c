"""The package as users get it: sdist and wheel are built and checked, and the wheel is tried in a clean environment.

    python -m tests.wheel      or: make package

They are left in `dist`. The clean environment has what pip installs for the wheel, in the lock file's versions.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

from fedtailor._common.version import __version__
from fedtailor.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
OUTSIDE_THE_PACKAGE = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "NOTICE",
    "README.md",
    "pyproject.toml",
}
MADE_BY_SETUPTOOLS = {"PKG-INFO", "setup.cfg"}


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that has to succeed, without this environment's settings of Python, and return its output."""
    print("$", *(Path(word).name if isinstance(word, Path) else word for word in command), flush=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDTAILOR"))}
    ended = subprocess.run(command, cwd=cwd, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        sys.exit(f"{ended.stdout}\nThis ended with {ended.returncode}.")
    return ended.stdout


def files() -> set[str]:
    """The files of the repository, as they are here."""
    names = call("git", "ls-files", "-z").split("\0")
    return {name for name in names if (ROOT / name).is_file()}


def build(of: set[str]) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist, of these files alone.

    What lies about in the working directory would be taken in: setuptools remembers the files of earlier builds.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        for name in of:
            copy = Path(directory) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
        call(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, cwd=Path(directory))
    sdist, wheel = DIST / f"fedtailor-{__version__}.tar.gz", DIST / f"fedtailor-{__version__}-py3-none-any.whl"
    call(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path, of: set[str]) -> None:
    """Compare with the repository: a file of the package that is missing, or one that is not its, is an error."""
    package = {name for name in of if name.startswith("fedtailor/")}
    with ZipFile(wheel) as archive:
        compare(wheel, {name for name in archive.namelist() if ".dist-info/" not in name}, package)
        licences = {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}
        compare(wheel, licences, {"LICENSE", "NOTICE"})
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if ".egg-info/" not in name}
    compare(sdist, names, package | OUTSIDE_THE_PACKAGE | MADE_BY_SETUPTOOLS)
    for file in (sdist, wheel):
        print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB")


def compare(file: Path, there: set[str], wanted: set[str]) -> None:
    if there != wanted:
        sys.exit(f"{file.name}: missing {sorted(wanted - there)}, too many {sorted(there - wanted)}.")


def try_out(wheel: Path) -> None:
    """Install the wheel in an environment of its own, and call it in an empty directory."""
    with tempfile.TemporaryDirectory() as directory:
        home, empty = Path(directory) / "environment", Path(directory) / "empty"
        empty.mkdir()
        venv.create(home, with_pip=True)
        python, fedtailor = home / "bin" / "python", home / "bin" / "fedtailor"
        call(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements.lock", wheel)
        call(python, "-m", "pip", "check")
        said = call(python, "-c", "import fedtailor; print(fedtailor.__file__)", cwd=empty)
        if not Path(said.strip()).is_relative_to(home):
            sys.exit(f"The installed package is not used, but {said}")
        print(call(fedtailor, "--version", cwd=empty))
        print(call(fedtailor, "run", "fedavg", "--rounds", "2", cwd=empty))
        if "doctor" in COMMANDS:
            print(call(fedtailor, "doctor", cwd=empty))


if __name__ == "__main__":
    tracked = files()
    sdist, wheel = build(tracked)
    check_contents(sdist, wheel, tracked)
    try_out(wheel)

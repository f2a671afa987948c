"""Facts of an installation and its machine, for `fedtailor doctor`, and what is wrong with them.

Nothing here may fail: what cannot be found out is None, and what is broken is a problem. Nothing personal is told: home
directories are `~`, and no name of a user or a machine is read.
"""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar

from fedtailor._common.errors import FedtailorError, brief
from fedtailor._common.extras import install_command
from fedtailor._common.version import __version__

PACKAGE = Path(__file__).parents[1]
MODULES = {"pillow": "PIL"}  # whose names do not follow from the package's
NOT_AT_RUN_TIME = ("dev", "docs")  # extras
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LITTLE = 10**9  # bytes of memory, or of a disk, with which one soon runs out
PATIENCE = 30.0  # seconds for another program
CLIENTS, SAMPLES, SHAPE, BATCH = 10, 200, (1, 28, 28), 10  # of the benchmark
IMPORT = """import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except BaseException as error:
    text = str(error).strip().splitlines() or [""]
    sys.exit(f"{type(error).__name__}: {text[0]}")"""
Facts = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, in one sentence that says what to do; with a `serious` one fedtailor cannot be used."""

    text: str
    serious: bool = False


@dataclass(frozen=True)
class Requirement:
    """A package that fedtailor or one of its extras needs."""

    name: str
    versions: str  # like >=2.4,<3
    extra: str = ""

    @property
    def module(self) -> str:
        return MODULES.get(self.name, self.name.replace("-", "_"))

    @property
    def install(self) -> str:
        return install_command(self.extra) if self.extra else f"pip install '{self.name}{self.versions}'"


def examine(seconds: float = 1.0) -> tuple[Facts, list[Problem]]:
    """Look at everything, with about so many seconds of benchmark."""
    problems: list[Problem] = []
    packages = _packages(problems)
    facts: Facts = {"fedtailor": __version__, "commit": commit(), **_system()}
    facts["packages"] = {name: about for name, about in packages.items() if not about["extra"]}
    facts["extras"] = _extras(packages)
    facts["cores"], facts["memory"] = _processors(problems), _memory(problems)
    facts["places"] = _places(problems)
    facts["devices"] = _tried(_devices, problems)
    facts["data"] = _tried(_data_sets, problems)
    facts["benchmark"] = _tried(lambda: benchmark(seconds), problems)
    facts["engines"] = _engines(facts, problems)
    facts["problems"] = [vars(problem) for problem in problems]
    return json.loads(anonymous(json.dumps(facts))), [Problem(anonymous(p.text), p.serious) for p in problems]


def _tried(look: Callable[[], T], problems: list[Problem]) -> T | None:
    """Look at something that takes PyTorch; None, and one problem, if that is broken."""
    try:
        return look()
    except Exception as error:  # whatever a broken library raises
        problem = Problem(f"fedtailor cannot compute here: {brief(error)}.", serious=True)
        if problem not in problems:
            problems.append(problem)
        return None


def anonymous(text: str) -> str:
    """Write home directories as ~, and directories that are named like the user as USER."""
    home = str(Path.home())
    for written in (json.dumps(home)[1:-1], home):
        if len(home) > 1:
            text = text.replace(written, "~")
    names = {name for key in ("USER", "LOGNAME", "USERNAME") if (name := os.environ.get(key))}
    for name in names - {"root"}:
        text = re.sub(rf"(?<=[/\\]){re.escape(name)}(?=[/\\\"' ]|$)", "USER", text)
    return text


# --- the installation ---


def requirements() -> list[Requirement]:
    """Read what fedtailor needs from its installation, or beside a checkout that is not installed."""
    try:
        lines = metadata.requires("fedtailor") or []
    except metadata.PackageNotFoundError:
        file = PACKAGE.parent / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.is_file() else {}
        lines = list(project.get("dependencies", ()))
        for extra, needs in project.get("optional-dependencies", {}).items():
            lines += [f'{need}; extra == "{extra}"' for need in needs]
    found = [_requirement(line) for line in lines]
    return [one for one in found if one is not None and one.extra not in NOT_AT_RUN_TIME]


def _requirement(line: str) -> Requirement | None:
    """Read a line like `onnx>=1.16; extra == "onnx"`."""
    read = re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*(?:;.*extra == ['\"]([\w-]+)['\"])?", line)
    return Requirement(read[1].lower(), read[2].replace(" ", ""), read[3] or "") if read else None


def meets(version: str, versions: str) -> bool:
    """Find out whether a version is among those that a requirement names, by its numbers."""
    compare: dict[str, Callable[[list[int], list[int]], bool]] = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    for sign, limit in re.findall(r"([<>=!]=|[<>])([\w.]+)", versions):
        ours, theirs = _numbers(version), _numbers(limit)
        length = max(len(ours), len(theirs))
        if not compare[sign](ours + [0] * (length - len(ours)), theirs + [0] * (length - len(theirs))):
            return False
    return True


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in found[0].split(".")] if found else []


def _packages(problems: list[Problem]) -> Facts:
    """Find the version of each package, and whether it can be imported: those of extras elsewhere, side by side."""
    needed, found = requirements(), Facts()
    with ThreadPoolExecutor(_cores()) as pool:
        elsewhere = {one.name: pool.submit(_import_error, one) for one in needed if one.extra and _version(one)}
        errors = {one.name: _imported(one) for one in needed if not one.extra}
        errors |= {name: error.result() for name, error in elsewhere.items()}
    for one in needed:
        version, error = _version(one), errors.get(one.name)
        found[one.name] = {"version": version, "needed": one.versions, "error": error, "extra": one.extra}
        what = f" of the extra {one.extra}" if one.extra else ""
        if version is None:
            if not one.extra:
                problems.append(Problem(f"{one.name} is missing: install it with {one.install}.", serious=True))
        elif error is not None:
            said = f"{one.name} {version}{what} cannot be imported ({error}): install it anew with {one.install}."
            problems.append(Problem(said, serious=not one.extra))
        elif not meets(version, one.versions):
            said = f"{one.name} {version}{what} is not the version that is needed ({one.versions}): {one.install}."
            problems.append(Problem(said, serious=not one.extra))
    return found


def _version(package: Requirement) -> str | None:
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return None


def _imported(package: Requirement) -> str | None:
    """Import a package; the error in one line, None if there is none."""
    try:
        importlib.import_module(package.module)
    except Exception as error:  # whatever a broken library raises
        return brief(error)
    return None


def _import_error(package: Requirement) -> str | None:
    """Import a package in another process: one that is broken may end it, and all of them would take long."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", IMPORT, package.module],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {PATIENCE:.0f} seconds"
    except OSError as error:
        return brief(error)
    if ended.returncode == 0:
        return None
    said = ended.stderr.strip().splitlines()
    return said[-1][:200] if ended.returncode == 1 and said else f"it ends the process with code {ended.returncode}"


def _extras(packages: Facts) -> Facts:
    """Group the packages of extras: the version of each, and how to install what is missing."""
    extras: Facts = {}
    for name, about in packages.items():
        if about["extra"]:
            extra = extras.setdefault(about["extra"], {"packages": {}, "install": None})
            extra["packages"][name] = about["version"]
            if about["version"] is None:
                extra["install"] = install_command(about["extra"])
    return extras


def commit() -> str | None:
    """Name the commit of a checkout, and say whether files are changed; None for an installed package."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(PACKAGE.parent)]
        options: Any = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": True}
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], **options).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "--", "fedtailor"], **options).stdout.strip()
        return f"{head}, with changed files" if changed else head
    return None


# --- the machine ---


def _system() -> Facts:
    name = f"{platform.system()} {platform.release()}"
    with suppress(OSError, AttributeError):
        name = f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {name}"
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{name}, {platform.machine()}",
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or None,
    }


def _field(file: str, name: str) -> str | None:
    """Read a line `name: value` of a file of the system."""
    with suppress(OSError):
        for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processors(problems: list[Problem]) -> Facts:
    usable, (limit, _) = _cores(), cgroup_limits()
    asked = {name: os.environ[name] for name in THREADS if os.environ.get(name)}
    for name, value in asked.items():
        if not value.isdecimal() or int(value) > usable:
            problems.append(
                Problem(f"{name} is {value}, and there are {usable} cores: unset it, or set it to at most {usable}.")
            )
    if limit is not None and limit < usable:
        problems.append(
            Problem(
                f"This container may use {limit:g} of the {usable} cores that it sees: give --workers "
                f"{max(1, int(limit))}, as more workers would wait for each other."
            )
        )
    return {"machine": os.cpu_count(), "usable": usable, "container_limit": limit, "environment": asked}


def _memory(problems: list[Problem]) -> Facts:
    total, available = (_kilobytes(name) for name in ("MemTotal", "MemAvailable"))
    if total is None:
        with suppress(OSError, ValueError, AttributeError):
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limits()[1]
    least = min((size for size in (available, limit) if size is not None), default=None)
    if least is not None and least < LITTLE:
        problems.append(
            Problem(
                f"There are {least / 1e9:.1f} GB of memory left: end other programs, or use fewer --workers and "
                "--states disk."
            )
        )
    return {"total": total, "available": available, "container_limit": limit}


def _kilobytes(name: str) -> int | None:
    value = _field("/proc/meminfo", name)
    return int(value.split()[0]) * 1024 if value else None


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None]:
    """Read the limits of a container: how many cores, and how many bytes of memory; None where there is none."""
    own = ""
    with suppress(OSError):
        lines = membership.read_text(encoding="utf-8").splitlines()
        own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    groups = [root / own, *(root / own).parents]
    groups = [group for group in groups if group.is_relative_to(root)]
    cores: list[float] = []
    sizes: list[int] = []
    for group in groups:
        quota = _words(group / "cpu.max")
        if len(quota) == 2 and quota[0].isdecimal():
            cores.append(int(quota[0]) / int(quota[1]))
        sizes += [int(word) for word in _words(group / "memory.max") if word.isdecimal()]
    old = [*_words(root / "cpu" / "cpu.cfs_quota_us"), *_words(root / "cpu" / "cpu.cfs_period_us")]  # the first version
    if len(old) == 2 and old[0].isdecimal():
        cores.append(int(old[0]) / int(old[1]))
    sizes += [int(word) for word in _words(root / "memory" / "memory.limit_in_bytes") if word.isdecimal()]
    real = [size for size in sizes if size < 2**60]  # the first version says no limit by a huge number
    return min(cores, default=None), min(real, default=None)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []


def _places(problems: list[Problem]) -> list[Facts]:
    """Look at the directories that are written to: those of runs and of temporary files, and Ray's memory."""
    found = [_place("runs", Path("runs")), _place("temporary files", Path(tempfile.gettempdir()))]
    if Path("/dev/shm").is_dir():
        found.append(_place("shared memory, for Ray", Path("/dev/shm")))
    for number, place in enumerate(found):
        if not place["writable"]:
            mend = "go to another directory, or give --out" if number == 0 else "set TMPDIR to one that can be written"
            where = f"{place['path']} ({place['for']})"
            problems.append(Problem(f"Nothing can be written to {where}: {mend}.", serious=number == 0))
        elif number < 2 and place["free"] is not None and place["free"] < LITTLE:
            free = f"{place['free'] / 1e9:.1f} GB"
            problems.append(
                Problem(f"There are {free} left on the disk of {place['path']}: make room for {place['for']}.")
            )
    return found


def _place(purpose: str, path: Path) -> Facts:
    """Find the free bytes of a directory and try to write there, or in the nearest above if it is still to be made."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free, writable = None, False
    with suppress(OSError):
        free = disk_usage(there).free
    with suppress(OSError), tempfile.TemporaryFile(dir=there):
        writable = True
    return {"for": purpose, "path": str(path.absolute()), "free": free, "writable": writable}


def _devices() -> Facts:
    torch = importlib.import_module("torch")
    cuda = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"threads": torch.get_num_threads(), "cuda": cuda, "mps": torch.backends.mps.is_available()}


def _data_sets() -> Facts:
    from fedtailor.data import catalogue, data_dir, found

    known = [(info.name, info.bundled, info.bundled or found(info)) for info in catalogue()]
    return {
        "directory": str(data_dir().absolute()),
        "bundled": [name for name, bundled, _ in known if bundled],
        "found": [name for name, bundled, there in known if there and not bundled],
        "missing": [name for name, _, there in known if not there],
    }


# --- at work ---


def benchmark(seconds: float) -> Facts:
    """Train a small network in this process for so many seconds, by the same code as every run."""
    from fedtailor.training.isolation import isolated

    with isolated(), closing(federation("in-process")) as simulation:
        simulation.round(1)  # what is only done once
        begin, rounds = time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < seconds:
            rounds += 1
            simulation.round(1 + rounds)
    speed = rounds * CLIENTS * SAMPLES / spent
    what = f"MLP 784-200-10, batches of {BATCH}, SGD, one process with one thread"
    return {"samples_per_second": round(speed), "seconds": round(spent, 2), "what": what}


def federation(engine: str, **more: Any) -> Any:
    """Start clients with random images, that evaluate nothing."""
    import torch

    from fedtailor.engines.preparation import Objects, prepare
    from fedtailor.engines.simulation import Simulation
    from fedtailor.experiment import make_experiment

    draw = torch.Generator().manual_seed(0)
    data = [
        (torch.rand(SAMPLES, *SHAPE, generator=draw), torch.randint(10, (SAMPLES,), generator=draw))
        for _ in range(CLIENTS)
    ]
    whole: Facts = {"test": 0.0, "validation": 0.0, "evaluation": {"every": 0}}
    settings = {"engine": engine, "workers": 2, "epochs": 1, "batch": BATCH, "rounds": 10**6, **whole, **more}
    simulation = Simulation(prepare(make_experiment(settings), Objects(data=data)))
    simulation.start()
    return simulation


def _engines(facts: Facts, problems: list[Problem]) -> Facts:
    """Find the engines that work here, by a round of the worker processes; otherwise, why not."""
    if facts["benchmark"] is None:
        return {}
    engines: Facts = {"in-process": None, "sites-in-memory": None, "processes": None}
    try:
        with closing(federation("processes")) as simulation:
            simulation.round(1)
    except FedtailorError as error:
        engines["processes"] = str(error)
    except Exception as error:
        engines["processes"] = brief(error)
        problems.append(Problem(f"Worker processes do not work ({brief(error)}): give --engine in-process."))
    for engine, extra in (("ray", "ray"), ("real sites", "nvflare")):
        engines[engine] = facts["extras"].get(extra, {}).get("install")
    return engines

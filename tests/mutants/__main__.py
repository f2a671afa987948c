"""Put each fault of the list into a copy of the code, one at a time, and see whether its test finds it.

`python -m tests.mutants` prints one line a fault; it ends with exit code 1 if a test missed its fault, or if a fault no
longer applies. With `--out FILE` it goes on where it was stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from shutil import copy2

from tests.mutants.faults import FAULTS, ROOT, Fault

SELECTED = "not slow and not long and not sites"
EVERYTHING = "tests"
TOGETHER = 25  # tests that are run at once without a fault
FAILED, NOTHING_RAN = 1, 5  # pytest's exit codes


class Copy:
    """A copy of the working tree, in which tests are run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, tracked.decode().split("\0")):
            if (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                copy2(ROOT / name, place / name)
        self._python("-m", "compileall", "-q", "fedtailor", "tests")  # so that a run compiles its fault alone
        found = self._python("-c", "import fedtailor; print(fedtailor.__file__)").stdout.strip()
        print(f"Testing {found}")
        if not Path(found).resolve().is_relative_to(place.resolve()):
            sys.exit("Not the copy would be tested, but another fedtailor.")

    def pytest(self, test: str, *more: str) -> tuple[int, str]:
        """Run a test, a file or `FILE -k WORDS` until it fails, perhaps with more of them; return pytest's exit code
        and the first test that failed."""
        file, _, words = test.partition(" -k ")
        chosen = [file, *more, *(["-k", words] if words else []), *(["-m", SELECTED] if test == EVERYTHING else [])]
        done = self._python("-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *chosen)
        failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return done.returncode, failed[0] if failed else ""

    def with_fault(self, fault: Fault, test: str) -> tuple[int, str]:
        """Run a test on code with a fault, and mend it."""
        path = self.place / fault.file
        before, times = path.read_text(), path.stat()
        path.write_text(fault.applied(before))
        try:
            return self.pytest(test)
        finally:
            path.write_text(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what was compiled is right again

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.place, env=environment, capture_output=True, text=True
        )


class Results:
    """What was found before, as JSON lines: tests that pass without a fault, and faults by their patch and test."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {record["key"] for record in map(json.loads, lines) if record["right"]}

    def knows(self, key: str) -> bool:
        return key in self._known

    def add(self, key: str, right: bool, **more: object) -> None:
        self._known |= {key} if right else set()
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "right": right, **more}) + "\n")


def pass_together(tests: list[str], copy: Copy, results: Results) -> None:
    """Run many tests without a fault at once: sooner done than one by one, which is left for those that fail."""
    todo = [test for test in dict.fromkeys(tests) if " -k " not in test and not results.knows(_clean(test))]
    for start in range(0, len(todo), TOGETHER):
        some = todo[start : start + TOGETHER]
        if copy.pytest(*some)[0] == 0:
            for test in some:
                results.add(_clean(test), True)


def try_out(fault: Fault, test: str, copy: Copy, results: Results) -> str:
    """Return what is wrong: nothing if the test passes without the fault and fails with it."""
    if why := fault.rotten():
        return why
    if not results.knows(_clean(test)):
        code, failed = copy.pytest(test)
        results.add(_clean(test), code == 0, failed=failed)
        if code:
            return "NOTHING RAN" if code == NOTHING_RAN else f"FAILS WITHOUT IT ({failed or f'exit code {code}'})"
    code, failed = copy.with_fault(fault, test)
    results.add(_key(fault, test), code == FAILED, name=fault.name, failed=failed)
    return "" if code == FAILED else "MISSED" if code == 0 else f"NO RESULT (exit code {code})"


def _clean(test: str) -> str:
    return f"passes {test}"


def _key(fault: Fault, test: str) -> str:
    patch = json.dumps([fault.file, fault.old, fault.new, test])
    return f"{fault.name} {sha256(patch.encode()).hexdigest()[:16]}"


def main() -> int:
    """Try all faults, or some of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="PART", help="faults with this in their name or file")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="results as JSON lines; what was found is not repeated"
    )
    parser.add_argument("--all", action="store_true", help="all fast tests in place of the fault's own: takes hours")
    asked = parser.parse_args()
    faults = [fault for fault in FAULTS if asked.only in fault.name or asked.only in fault.file]
    results, found = Results(asked.out), 0
    with tempfile.TemporaryDirectory() as place:
        copy = Copy(Path(place))
        if not asked.all:
            pass_together([fault.test for fault in faults if not fault.rotten()], copy, results)
        for fault in faults:
            test, begin = EVERYTHING if asked.all else fault.test, time.perf_counter()
            before = results.knows(_key(fault, test)) and not fault.rotten()
            wrong = "" if before else try_out(fault, test, copy, results)
            took = "before" if before else f"{time.perf_counter() - begin:.0f} s"
            print(f"{wrong or 'found'} ({took}): {fault.name}, {fault.file}, {test}", flush=True)
            found += not wrong
    print(f"{found} of {len(faults)} found")
    return 0 if found == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())

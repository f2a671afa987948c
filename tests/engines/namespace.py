"""Tests of what listens on all interfaces: in a network of their own, which has nothing but the loopback interface.

`python -m tests.engines.namespace FILE …` runs the tests of these files there. All processes that they start end with
them: they have process numbers of their own too.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTER = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
ALONE = ["sh", "-c", 'ip link set lo up && "$@"; exit $?', "sh"]  # the shell stays, as the parent of orphans


def inside(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a namespace of its own, with a home directory of its own."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [*ENTER, *ALONE, *command],
            cwd=ROOT,
            env={**os.environ, "HOME": home, "RAY_TMPDIR": home},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=1800,
        )


def why_not() -> str | None:
    """Say why there cannot be a namespace here."""
    try:
        found = inside("true")
    except FileNotFoundError:
        return "a network namespace needs Linux and unshare"
    return f"no network namespace: {found.stdout.strip()}" if found.returncode else None


def run_tests(*files: str) -> subprocess.CompletedProcess[str]:
    return inside(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "--durations", "20", *files)


if __name__ == "__main__":
    outcome = run_tests(*sys.argv[1:])
    print(outcome.stdout)
    sys.exit(outcome.returncode)

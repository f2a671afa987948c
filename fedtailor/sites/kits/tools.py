"""NVFlare's command line tools, each in a process of its own that leaves nothing in the user's home directory; and the
processes that run with a kit."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from fedtailor._common.errors import FedtailorError
from fedtailor._common.extras import install_command

SECONDS = 300  # that a tool has; each takes a few


def need_nvflare() -> None:
    """Refuse to go on without NVFlare."""
    if find_spec("nvflare") is None:
        raise FedtailorError(f"Real sites need NVFlare: install it with {install_command('nvflare')}.")


def nvflare(*words: str | Path) -> None:
    """Run `nvflare WORDS…`; if it refuses, say so in its own words."""
    with TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "nvflare.cli", *map(str, words)],
            env={**os.environ, "HOME": home},
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it does not say why").splitlines()[0].rstrip(".")
        command = " ".join(word for word in words[:2] if isinstance(word, str))
        raise FedtailorError(f"NVFlare's `{command}` refused: {said}.")


def processes_with(kit: Path) -> Iterator[tuple[int, float]]:
    """The processes that run with a kit, and when they were started."""
    ticks = os.sysconf("SC_CLK_TCK")
    boot = next(float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended, or is another user's
                continue
            if any(b"nvflare" in word for word in words) and os.fsencode(kit.resolve()) in words:
                yield int(folder.name), boot + float(after_name[19]) / ticks

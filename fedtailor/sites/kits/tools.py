"""NVFlare's command line tools, each in a process of its own that leaves nothing in the user's home directory."""

import os
import subprocess
import sys
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

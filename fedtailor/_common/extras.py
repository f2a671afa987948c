"""The command that installs an extra, for how fedtailor itself was installed."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fedtailor._common.errors import PACKAGE, FedtailorError


def install_command(extra: str) -> str:
    """Write the command: from a package index, a clone, or the address that pip recorded (PEP 610)."""
    clone = PACKAGE.parent
    if (clone / "pyproject.toml").is_file():  # the code that runs is that of a clone, whatever else is installed
        return f"pip install -e {quote(f'{clone}[{extra}]')}"
    source = _source()
    address = str(source.get("url", ""))
    if "dir_info" in source and (folder := Path(url2pathname(urlsplit(address).path))).is_dir():
        return f"pip install {quote(f'{folder}[{extra}]')}"
    if address and "dir_info" not in source:
        commit = source.get("vcs_info", {})
        at = f"{commit['vcs']}+{address}@{commit['commit_id']}" if commit else address
        return f"pip install {quote(f'fedtailor[{extra}] @ {at}')}"
    return f"pip install 'fedtailor[{extra}]'" + (f", or '.[{extra}]' in a clone" if source else "")


def _source() -> dict[str, Any]:
    """Read where pip took fedtailor from; nothing if that is a package index."""
    try:
        recorded = distribution("fedtailor").read_text("direct_url.json")
        found = json.loads(recorded) if recorded else {}
    except (PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def import_pandas() -> Any:
    """Import pandas for a table, or say how to install it."""
    try:
        import pandas
    except ImportError:
        raise FedtailorError(f"pandas is not installed: {install_command('pandas')}.") from None
    return pandas

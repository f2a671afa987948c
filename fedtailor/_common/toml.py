"""TOML files that people write: read within bounds, and written so that they are read again as they were."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtailor._common.errors import FedtailorError

FILE_LIMIT = 1_000_000  # characters of a file
MOST_LEVELS = 50  # of a dotted name: Python's parser takes a quadratic time for more
_LEVELS = re.compile(rf"""(?:\.\s*[\w"'-]+\s*){{{MOST_LEVELS}}}""")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file that people write; `what` names it in errors."""
    try:
        if path.stat().st_size > 4 * FILE_LIMIT:
            raise FedtailorError(f"The {what} {path} is too large: it may have {FILE_LIMIT:,} characters.")
        return parse_toml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FedtailorError(f"There is no {what} {path}.") from None
    except (ValueError, RecursionError) as error:
        raise FedtailorError(f"The {what} {path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise FedtailorError(f"The {what} {path} cannot be read: {error.strerror}.") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML. What Python's parser cannot do, or not in a short time, is refused as wrong TOML."""
    if len(text) > FILE_LIMIT:
        raise tomllib.TOMLDecodeError(f"more than {FILE_LIMIT:,} characters")
    if _LEVELS.search(text):
        raise tomllib.TOMLDecodeError(f"a name of more than {MOST_LEVELS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deep") from None
    except ValueError as error:  # its own, and that of a number with too many digits
        raise tomllib.TOMLDecodeError(str(error)) from None


def written_again(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Write settings as an experiment file has them and read them again; None if that cannot be done."""
    try:
        return parse_toml(write_toml(settings).encode().decode())
    except (ValueError, TypeError, RecursionError):
        return None


def write_toml(settings: Mapping[str, Any], inside: str = "") -> str:
    """Settings as TOML: plain values first, then one table for each section. What is None is left out."""
    lines, sections = [], list[str]()
    for name, value in settings.items():
        key = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _toml(name)
        if not isinstance(value, Mapping):
            lines += [] if value is None else [f"{key} = {_toml(value)}"]
        elif value:
            sections += ["", f"[{inside}{key}]", write_toml(value, f"{inside}{key}.").rstrip()]
    return "\n".join([*lines, *sections]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"{value:.1f}" if abs(value) < 1e16 else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

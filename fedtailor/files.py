"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Write a file under a temporary name and rename it. A `durable` one also survives a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def fsync_file(path: Path) -> None:
    """Have the system write a file to the disk itself."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())

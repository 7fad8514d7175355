"""Files that are on the disk, not only in the system's cache, when a call returns.

Owns how bytes and names are forced to the disk. What must be whole, and when, is each owner's of a file or folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Writes a file; a kill may leave a part of it."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a whole file; a reader, or a run after kill -9, finds the old content or the new."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        write_file(fresh, content)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # a part of it would take the room that is missing
        raise


def sync_folder(path: Path) -> None:
    """Forces the names in a folder to the disk: what was made, renamed or removed there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

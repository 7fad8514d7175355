"""Files that are on the disk, not only in the system's cache, when a call returns.

Owns how bytes and names are forced to the disk, and how it is told that a disk does not take them. What must be whole,
and when, is each owner's of a file or folder.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Writes a file; a kill may leave a part of it.

    Raises:
        OSError: It cannot be written. It names `path`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(descriptor, content, 0, path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def write_at(descriptor: int, content: bytes, offset: int, path: Path) -> None:
    """Writes all of `content` at a place of a file.

    Raises:
        OSError: The disk does not take it; a part may be written. It names `path`.
    """
    done = 0
    while done < len(content):
        try:
            done += os.pwrite(descriptor, content[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def append(descriptor: int, content: bytes, path: Path) -> None:
    """Writes all of `content` at the end of a file, or nothing.

    Raises:
        OSError: The disk does not take it. It names `path`.
    """
    end = os.fstat(descriptor).st_size
    try:
        write_at(descriptor, content, end, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise

"""Atomic and fsynced file operations: when a call returns, the bytes are on the disk and not only in the page cache."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Writes and fsyncs a file; if the process is killed meanwhile, the file may be incomplete.

    Raises:
        OSError: The file cannot be written; the error names `path`.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(descriptor, content, 0, path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically; a reader, or a run after kill -9, finds either the old or the new content."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        write_file(fresh, content)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)  # a partial file would take space on a full disk
        raise


def sync_folder(path: Path) -> None:
    """Fsyncs a folder: files created, renamed or removed in it stay so after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, content: bytes, offset: int, path: Path) -> None:
    """Writes all of `content` at an offset of a file.

    Raises:
        OSError: The disk refuses; a part may be written. The error names `path`.
    """
    done = 0
    while done < len(content):
        try:
            done += os.pwrite(descriptor, content[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def append(descriptor: int, content: bytes, path: Path) -> None:
    """Appends all of `content` to a file, or nothing.

    Raises:
        OSError: The disk refuses. The error names `path`.
    """
    end = os.fstat(descriptor).st_size
    try:
        write_at(descriptor, content, end, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, end)
        raise

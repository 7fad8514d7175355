"""Temporary folders that are removed even if their process is killed: a later process removes them.

The owner keeps a lock on its folder, which the kernel releases when the process ends. A process that makes its first
folder removes the folders of the same user and host whose owner has ended. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import count

MAX_DEPTH = 32
"""Deepest nesting that `folder_usage` follows, levels."""

BLOCK_BYTES = 512
"""Unit of `st_blocks`, bytes, on every file system."""

_MAX_NAME = 40
_TRIES = 100


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[str]:
    """Yields a new temporary folder and removes it at the end; if this process is killed, a later one removes it.

    Args:
        kind: Part of the name "mrl-<kind>-<host>-<random>", lower-case letters.
    """
    _remove_once()
    folder, lock = _locked(kind)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def _locked(kind: str) -> tuple[str, int]:
    """Makes a folder and locks it; retries if another process removed it between the two steps."""
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix=f"mrl-{kind}-{_host()}-")
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if _lock(lock) is not False and _is_at(lock, folder):
                return folder, lock
            os.close(lock)
    raise RuntimeError(
        f"could not lock a temporary folder in {tempfile.gettempdir()}: other processes removed it {_TRIES} times"
    )


def _is_at(opened: int, folder: str) -> bool:
    """Returns whether `folder` is still the directory that was opened."""
    try:
        return os.path.samestat(os.fstat(opened), os.stat(folder))
    except FileNotFoundError:
        return False


def _lock(opened: int) -> bool | None:
    """Takes the lock of an open folder; returns False if another process has it, None if locks are unsupported."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_abandoned(within: str) -> None:
    """Removes folders in `within` that `temporary_folder` made for this user on this host and whose owner has ended."""
    pattern = re.compile(rf"mrl-[a-z]+-{re.escape(_host())}-\w+")
    with contextlib.suppress(OSError), os.scandir(within) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(folder: str) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid == os.geteuid() and _lock(opened):
            remove(folder)
    finally:
        os.close(opened)


@cache
def _remove_once() -> None:
    remove_abandoned(tempfile.gettempdir())


@cache
def _host() -> str:
    """Returns the host's name for folder names: hosts that share a file system may not see each other's locks."""
    return re.sub(r"\W", "_", os.uname().nodename)[:_MAX_NAME] or "host"


def remove(folder: str) -> None:
    """Removes a folder with its contents, as far as permissions allow; nothing else may write into it meanwhile."""
    empty(folder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def empty(folder: str) -> None:
    """Removes the contents of a folder at any depth and with any mode; follows no links.

    Nested folders are first moved up into `folder`, so that neither paths nor recursion grow with the depth.
    """
    numbers = count()
    stuck = False
    while not stuck and (entries := _entries(folder)):
        stuck = True
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                else:
                    os.chmod(entry.path, stat.S_IRWXU)
                    for inner in _entries(entry.path):
                        _unlink_or_move(inner, folder, numbers)
                    os.rmdir(entry.path)
                stuck = False


def _unlink_or_move(entry: os.DirEntry[str], to: str, numbers: Iterator[int]) -> None:
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.path)
        return
    os.chmod(entry.path, stat.S_IRWXU)  # a folder that is moved must be writable
    while os.path.lexists(place := f"{to}/mrl-{next(numbers)}"):
        pass
    os.rename(entry.path, place)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def folder_usage(folder: str, max_files: int) -> tuple[int, int]:
    """Measures a folder that other processes may write into meanwhile.

    Args:
        folder: Path of the folder.
        max_files: Number of entries above which counting stops.

    Returns:
        Bytes on disk, and the number of files and folders. The number is `max_files` + 1 if a folder is nested deeper
        than MAX_DEPTH or cannot be read, because it could hide more files.
    """
    num_bytes = num_files = 0
    todo = [(folder, 0)]
    while todo:
        place, depth = todo.pop()
        if depth > MAX_DEPTH:
            return num_bytes, max_files + 1
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    num_files += 1
                    if num_files > max_files:
                        return num_bytes, num_files
                    with contextlib.suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                        if entry.is_dir(follow_symlinks=False):
                            todo.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was removed meanwhile
        except OSError:
            return num_bytes, max_files + 1
    return num_bytes, num_files

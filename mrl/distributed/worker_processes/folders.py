"""Temporary folders of processes that may be killed, which are removed at a later start then.

A folder is locked by its owner as long as that lives; the kernel ends the lock with the process. Whoever makes a folder
first removes those of the same user and host whose owner is dead. Imports no torch.
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
"""Folders in folders that `measure` looks into."""

BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system's blocks are."""

_MAX_NAME = 40
_TRIES = 100


@contextlib.contextmanager
def owned_folder(kind: str) -> Iterator[str]:
    """Makes a folder for temporary files, and removes it at the end or, if this process is killed, at a later start.

    Args:
        kind: Part of its name: "mrl-kind-host-random" in the folder for temporary files.
    """
    _remove_once()
    folder, lock = _locked(kind)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def _locked(kind: str) -> tuple[str, int]:
    """Makes a folder and locks it; another one where a process that removes old folders was faster."""
    for _ in range(_TRIES):
        folder = tempfile.mkdtemp(prefix=f"mrl-{kind}-{_host()}-")
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            if _lock(lock) is not False and _is_at(lock, folder):
                return folder, lock
            os.close(lock)
    raise RuntimeError(f"other processes remove every folder that is made in {tempfile.gettempdir()}")


def _is_at(opened: int, folder: str) -> bool:
    """Returns whether a folder that was opened is still at its place."""
    try:
        return os.path.samestat(os.fstat(opened), os.stat(folder))
    except FileNotFoundError:
        return False


def _lock(opened: int) -> bool | None:
    """Returns whether the lock was free, and holds it then; None: this file system has no locks."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_abandoned(within: str) -> None:
    """Removes the folders that `owned_folder` made in `within` for this user on this host and whose owner is dead."""
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
    """Name of this host: a lock on a folder that hosts share may be known to one of them only."""
    return re.sub(r"\W", "_", os.uname().nodename)[:_MAX_NAME] or "host"


def remove(folder: str) -> None:
    """Removes a folder with all that is in it, as far as this user may; nothing else may write into it meanwhile."""
    empty(folder)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def empty(folder: str) -> None:
    """Removes what is in a folder, however deep it is nested and whatever modes it has; follows no links.

    Folders in folders are first moved up into `folder`, so that neither a path nor a call gets longer with the depth.
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


def measure(folder: str, most_files: int) -> tuple[int, int]:
    """Measures a folder that others may write into meanwhile.

    Args:
        folder: Its path.
        most_files: The count ends above this number.

    Returns:
        Bytes on the disk, and the number of files and folders: `most_files` + 1 where a folder is nested deeper than
        MAX_DEPTH or cannot be read, because something could be hidden in it.
    """
    num_bytes = num_files = 0
    todo = [(folder, 0)]
    while todo:
        place, depth = todo.pop()
        if depth > MAX_DEPTH:
            return num_bytes, most_files + 1
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    num_files += 1
                    if num_files > most_files:
                        return num_bytes, num_files
                    with contextlib.suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                        if entry.is_dir(follow_symlinks=False):
                            todo.append((entry.path, depth + 1))
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was removed meanwhile
        except OSError:
            return num_bytes, most_files + 1
    return num_bytes, num_files

"""Resource usage of a process tree that Linux does not limit per process: threads, files, and memory of every kind.

Usage is sampled while the program runs, so it can exceed a limit for a moment. A removed file takes disk space as long
as it is open or mapped, but no folder lists it.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mrl.distributed.worker_processes.folders import BLOCK_BYTES, folder_usage

_TOO_MANY_BYTES = "it wrote more than {} MiB of files"
_MEMORY_SLACK_MB = 64  # Linux's own limit, which a program can handle as a MemoryError, should come first
_STATUS = re.compile(r"^(Threads|RssAnon|RssShmem):\s+(\d+)", re.MULTILINE)
_REMOVED_AND_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ ([1-9]\d*) .* \(deleted\)$", re.MULTILINE)


@dataclass(frozen=True)
class UsageLimits:
    """Limits of a program that are enforced by sampling.

    Attributes:
        threads: Number of threads per process.
        memory_mb: Memory of all processes together, MiB.
        folder_mb: Total size of the files in its folder, and total size of each process's removed files, MiB on disk.
        file_mb: Size of one file, MiB.
        files: Number of files and folders in its folder.
    """

    threads: int
    memory_mb: int
    folder_mb: int
    file_mb: int
    files: int


def process_problem(pid: int, limits: UsageLimits, own_bytes: int = 0) -> str:
    """Returns the limit that a process and its descendants exceed, in words; "" if none, or if they have ended.

    Args:
        pid: Process id.
        limits: Limits of threads, memory and removed files.
        own_bytes: Size of the removed files that the process was started with, bytes on disk.
    """
    threads = memory_kb = 0
    pids = _with_descendants(pid)
    for one in pids:
        found = {name: int(value) for name, value in _STATUS.findall(_read(f"/proc/{one}/status"))}
        threads = max(threads, found.get("Threads", 0))
        memory_kb += found.get("RssAnon", 0) + found.get("RssShmem", 0)
    if threads > limits.threads:
        return f"it started more than {limits.threads} threads"
    if memory_kb >> 10 > limits.memory_mb + _MEMORY_SLACK_MB:
        return f"it took more than {limits.memory_mb} MiB of memory"
    if max(map(partial(_removed_bytes, file_mb=limits.file_mb), pids)) > (limits.folder_mb << 20) + own_bytes:
        return _TOO_MANY_BYTES.format(limits.folder_mb)
    return ""


def folder_problem(folder: str, limits: UsageLimits) -> str:
    """Returns the limit that a program's folder exceeds, in words; "" if none."""
    num_bytes, num_files = folder_usage(folder, limits.files)
    if num_files > limits.files:
        return f"it made more than {limits.files} files and folders, or folders that cannot be read"
    if num_bytes > limits.folder_mb << 20:
        return _TOO_MANY_BYTES.format(limits.folder_mb)
    return ""


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text(encoding="ascii")
        except FileNotFoundError:  # the process has ended, or this kernel does not list children
            return found if not Path(f"/proc/{one}").exists() else [pid, *_slowly(pid)]
        except OSError:
            continue
        found += map(int, children.split())
    return found


def _slowly(pid: int) -> list[int]:
    import psutil  # imported here to keep a program's start fast

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _removed_bytes(pid: int, file_mb: int) -> int:
    """Returns the size of the removed files that a process has open or mapped, bytes on disk.

    The size of a file that is only mapped is not available: it counts as `file_mb`.
    """
    found: dict[int, int] = {}
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):
                info = os.stat(entry.path)
                if stat.S_ISREG(info.st_mode) and not info.st_nlink:
                    found[info.st_ino] = info.st_blocks * BLOCK_BYTES
    for inode in _REMOVED_AND_MAPPED.findall(_read(f"/proc/{pid}/maps")):
        found.setdefault(int(inode), file_mb << 20)
    return sum(found.values())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

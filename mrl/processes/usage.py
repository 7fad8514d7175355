"""What a running program takes that no limit of Linux bounds for one process: threads, files, and memory of every kind.

It is looked at while the program runs, so for a moment there can be more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mrl.processes.folders import measure

_MEMORY_SLACK_MB = 64  # Linux's own limit, which a program can handle as a MemoryError, should come first
_STATUS = re.compile(r"^(Threads|RssAnon|RssShmem):\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Most:
    """What a program may take.

    Attributes:
        threads: Number.
        memory_mb: MiB.
        folder_mb: MiB on the disk of its folder.
        files: Number of files and folders in its folder.
    """

    threads: int
    memory_mb: int
    folder_mb: int
    files: int


def process_problem(pid: int, most: Most) -> str:
    """Returns what a process and its descendants take too much of; "" where it is nothing, or they are gone."""
    threads = memory_kb = 0
    for one in _with_descendants(pid):
        found = {name: int(value) for name, value in _STATUS.findall(_read(f"/proc/{one}/status"))}
        threads = max(threads, found.get("Threads", 0))
        memory_kb += found.get("RssAnon", 0) + found.get("RssShmem", 0)
    if threads > most.threads:
        return f"it started more than {most.threads} threads"
    if memory_kb >> 10 > most.memory_mb + _MEMORY_SLACK_MB:
        return f"it took more than {most.memory_mb} MiB of memory"
    return ""


def folder_problem(folder: str, most: Most) -> str:
    """Returns what is too much in a program's folder; "" where nothing is."""
    num_bytes, num_files = measure(folder, most.files)
    if num_files > most.files:
        return f"it made more than {most.files} files and folders, or folders that cannot be read"
    if num_bytes > most.folder_mb << 20:
        return f"it wrote more than {most.folder_mb} MiB of files"
    return ""


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text(encoding="ascii")
        except FileNotFoundError:  # the process is gone, or this kernel does not list children
            return found if not Path(f"/proc/{one}").exists() else [pid, *_slowly(pid)]
        except OSError:
            continue
        found += map(int, children.split())
    return found


def _slowly(pid: int) -> list[int]:
    import psutil  # a program's own start should not wait for it

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

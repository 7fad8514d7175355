"""What was found out about this machine, kept in the user's cache folder; and what all engines of a job do alike.

Owns the names under which things are kept, how they are written, how ranks agree, and how ways to do a thing are timed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from mrl.distributed import launch

try:
    import fcntl
except ImportError:  # no such locks: two processes may do the same work
    fcntl = None  # type: ignore[assignment]


ROUNDS = 7

Way = TypeVar("Way", bound=Hashable)


@cache
def processor() -> str:
    """Names the processor and what it can do."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    told = {line for line in lines if line.split(":")[0].strip() in kinds}
    return "\n".join([torch.backends.cpu.get_cpu_capability(), *sorted(told)])


def key(*parts: str) -> str:
    """A short name of the parts, good for a file."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def place(name: str) -> Path | None:
    """The file that is kept under the name; None: nothing is kept here."""
    folder = launch.cache_folder()
    return None if folder is None else folder / name


def kept(name: str, make: Callable[[], bytes]) -> bytes:
    """What is kept under the name; else what `make` makes, which then is. One process of this machine makes it.

    Without a cache folder that can be written, every process makes its own.
    """
    path = place(name)
    if path is None:
        return make()
    with suppress(OSError):
        return path.read_bytes()
    with _alone(path):
        with suppress(OSError):
            return path.read_bytes()
        made = make()
        keep(name, made)
        return made


def keep(name: str, data: bytes) -> None:
    """Keeps it, where that can be; another value under the name is replaced."""
    path = place(name)
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(part, path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this machine at a time, where the folder can be written."""
    file = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("wb")
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def agreed(name: str, own: str) -> str:
    """What the first engine of the job to ask said under this name; every later one gets the same."""
    if not dist.is_initialized():
        return own
    store = dist.distributed_c10d._get_default_store()
    found: bytes = store.compare_set(f"mrl/engine/{name}", "", own)
    return found.decode()


def settled(place_name: str, job_name: str, find: Callable[[], str], otherwise: str) -> str:
    """What was found once on this machine, the same on all ranks of a job: that of the first to ask, which all keep.

    Args:
        place_name: Of what is kept.
        job_name: Under which ranks agree, the same on machines that differ.
        find: Finds it out.
        otherwise: Where nothing is kept: each run would find for itself.
    """
    own = otherwise if place(place_name) is None else kept(place_name, lambda: find().encode()).decode()
    said = agreed(job_name, own)
    if said != own:
        keep(place_name, said.encode())
    return said


def best_times(calls: Mapping[Way, Callable[[], object]]) -> dict[Way, float]:
    """Shortest of some calls each, s of one thread's processor; they take turns."""
    times: dict[Way, list[float]] = {way: [] for way in calls}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(1 + ROUNDS):
            for way, call in calls.items():
                began = time.thread_time()
                call()
                times[way].append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return {way: min(found[1:]) for way, found in times.items()}

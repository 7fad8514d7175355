"""Cache of compiled code and measurements of this machine, agreement between ranks on such a value, and a timer."""

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
except ImportError:  # no file locks on this system: two processes may do the same work
    fcntl = None  # type: ignore[assignment]


ROUNDS = 7

Way = TypeVar("Way", bound=Hashable)


@cache
def processor() -> str:
    """Returns a text that identifies the processor and its instruction sets."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    found = {line for line in lines if line.split(":")[0].strip() in kinds}
    return "\n".join([torch.backends.cpu.get_cpu_capability(), *sorted(found)])


def key(*parts: str) -> str:
    """Returns a short hash of the parts, usable as a file name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_file(name: str) -> Path | None:
    """Returns the cache file of a name, or None if there is no cache folder."""
    folder = launch.cache_folder()
    return None if folder is None else folder / name


def cached(name: str, make: Callable[[], bytes]) -> bytes:
    """Returns the cached bytes of a name; on a miss, one process of this machine calls `make` and stores the result.

    Without a writable cache folder every process calls `make`.
    """
    path = cache_file(name)
    if path is None:
        return make()
    with suppress(OSError):
        return path.read_bytes()
    with _alone(path):
        with suppress(OSError):
            return path.read_bytes()
        made = make()
        write_cache(name, made)
        return made


def write_cache(name: str, data: bytes) -> None:
    """Stores the bytes under a name, atomically, replacing an earlier value; does nothing without a writable cache."""
    path = cache_file(name)
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
    """Locks a file, so that one process of this machine at a time runs the body, if the folder is writable."""
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


def first_rank_value(name: str, own: str) -> str:
    """Returns the value that the first rank of the job passed under this name; `own` without torch.distributed."""
    if not dist.is_initialized():
        return own
    store = dist.distributed_c10d._get_default_store()
    found: bytes = store.compare_set(f"mrl/engine/{name}", "", own)
    return found.decode()


def measure_once(place_name: str, job_name: str, find: Callable[[], str], otherwise: str) -> str:
    """Returns a value that is measured once per machine and equal on all ranks of a job.

    The first rank to ask decides; the other ranks store its value in their machine's cache.

    Args:
        place_name: Name in the machine's cache.
        job_name: Name under which ranks agree, equal on different machines.
        find: Measures the value.
        otherwise: Value used if there is no cache folder, instead of measuring in every run.
    """
    own = otherwise if cache_file(place_name) is None else cached(place_name, lambda: find().encode()).decode()
    value = first_rank_value(job_name, own)
    if value != own:
        write_cache(place_name, value.encode())
    return value


def best_times(calls: Mapping[Way, Callable[[], object]]) -> dict[Way, float]:
    """Returns the shortest time of each call, s of single-threaded CPU time, over `ROUNDS` interleaved rounds."""
    times: dict[Way, list[float]] = {way: [] for way in calls}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(1 + ROUNDS):
            for way, call in calls.items():
                start = time.thread_time()
                call()
                times[way].append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {way: min(found[1:]) for way, found in times.items()}

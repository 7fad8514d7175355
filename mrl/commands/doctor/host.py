"""What a host grants its processes: memory, limits, /dev/shm, and what a container leaves out.

Owns reading these of Linux. Files and folders are `folder.py`'s.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.commands.doctor.network import SOCKETS_OF_A_PAIR

GB = 1e9
MIN_RANK_BYTES = 2 * GB
"""A rank with torch, Megatron and transformers imported and nothing of a model holds up to 0.9 GB (measured)."""
MIN_SHM_BYTES = 1 * GB
"""NCCL and workers of torch pass data there; a container's default of 64 MB is too little for one GPU's channels."""
FILES_OF_A_RANK = 1024
"""Open files beside sockets: shards of a checkpoint, libraries, logs."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of a host, bytes.

    Attributes:
        available: What processes can still take.
        total: All of it.
        limit: What a container may take in all; None: no such bound.
    """

    available: int
    total: int
    limit: int | None


def read_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """From Linux, the bound from either version of cgroups."""
    now = psutil.virtual_memory()
    limit, used = None, 0
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for bound, usage in pairs:
        if (cgroup / bound).is_file() and (text := (cgroup / bound).read_text().strip()) != "max":
            limit = int(text) if int(text) < now.total else None
            used = int((cgroup / usage).read_text())
            break
    available = now.available if limit is None else min(now.available, limit - used)
    return HostMemory(available, now.total, limit)


def check_memory(memory: HostMemory, num_ranks: int) -> Iterator[Finding]:
    """Host memory for the ranks of a host, before any model."""
    bound = f", of which a container may take {memory.limit / GB:.1f}" if memory.limit is not None else ""
    found = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free{bound}"
    if memory.available < num_ranks * MIN_RANK_BYTES:
        yield problem(
            "host memory",
            f"{found}, for {num_ranks} rank(s)",
            f"give each rank {MIN_RANK_BYTES / GB:g} GB (--mem of SLURM, --memory of the container), or start fewer",
        )
    else:
        yield ok("host memory", found)


def check_open_files(soft: int, world_size: int) -> Iterator[Finding]:
    """The limit of open files of a rank; every pair of ranks takes sockets."""
    wanted = FILES_OF_A_RANK + SOCKETS_OF_A_PAIR * (world_size - 1)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        yield warning("open files", f"at most {soft}; {world_size} rank(s) may want {wanted}", f"ulimit -n {wanted}")
    else:
        yield ok("open files", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}")


def check_locked_memory(soft: int, adapters: Sequence[str]) -> Iterator[Finding]:
    """The limit of locked memory, which InfiniBand needs.

    Args:
        soft: Bytes.
        adapters: InfiniBand or RoCE adapters of the host.
    """
    if not adapters:
        yield ok("locked memory", "no InfiniBand here, so its limit does not matter")
    elif soft != resource.RLIM_INFINITY:
        yield problem(
            "locked memory",
            f"at most {soft >> 10} KiB, and NCCL over {adapters[0]} locks its buffers",
            "ulimit -l unlimited (limits.conf; of slurmd; --ulimit memlock=-1 of the container)",
        )
    else:
        yield ok("locked memory", f"unlimited, for {', '.join(adapters)}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """The size of /dev/shm and what is free of it."""
    space = os.statvfs(folder)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if free < MIN_SHM_BYTES:
        yield warning(
            str(folder),
            f"{free / GB:.2f} of {total / GB:.2f} GB free",
            "a larger one (--shm-size=16g or --ipc=host of the container), or delete what crashed jobs left there",
        )
    else:
        yield ok(str(folder), f"{free / GB:.1f} of {total / GB:.1f} GB free")


def infiniband_adapters(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Adapters that the host has, also where a container does not hand them in."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def check_container(adapters: Sequence[str], kind: str, devices: Path = Path("/dev/infiniband")) -> Iterator[Finding]:
    """What a container does not hand in.

    Args:
        adapters: InfiniBand adapters of the host.
        kind: Of container; "": none.
        devices: Where the adapters' device files are.
    """
    if kind and adapters and not devices.is_dir():
        yield problem(
            "container",
            f"{kind}: the host has {', '.join(adapters)}, but {devices} is not in here",
            "hand it in (--device=/dev/infiniband, or pyxis's --container-mounts): NCCL would take slow sockets",
        )
    elif kind:
        yield ok("container", kind)


def container_kind(variables: dict[str, str], root: Path = Path("/")) -> str:
    """Docker, Podman, Apptainer ... or "" for none.

    Args:
        variables: `container`, where the container's own program set it.
        root: The root folder.
    """
    marks = {".dockerenv": "Docker", "run/.containerenv": "Podman", ".singularity.d": "Apptainer"}
    return next((name for mark, name in marks.items() if (root / mark).exists()), variables.get("container", ""))

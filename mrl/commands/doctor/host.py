"""Checks of host memory, limits, /dev/shm, and devices that a container lacks."""

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
"""Host memory per rank; a rank with torch, Megatron and transformers imported takes up to 0.9 GB (measured)."""
MIN_SHM_BYTES = 1 * GB
"""Size of /dev/shm that NCCL and torch's workers need; a container's default of 64 MB is too little for one GPU."""
FILES_OF_A_RANK = 1024
"""Open files of a rank other than sockets: checkpoint shards, libraries, logs."""


@dataclass(frozen=True)
class HostMemory:
    """Memory of a host, bytes.

    Attributes:
        available: Memory that processes can still allocate.
        total: Physical memory.
        limit: Memory limit of the container; None: unlimited.
    """

    available: int
    total: int
    limit: int | None


def read_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads the host's memory; the limit from cgroup v1 or v2."""
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
    """Checks that the host has memory for its ranks, without any model."""
    bound = f", of which a container may take {memory.limit / GB:.1f}" if memory.limit is not None else ""
    found = f"{memory.available / GB:.1f} of {memory.total / GB:.1f} GB free{bound}"
    if memory.available < num_ranks * MIN_RANK_BYTES:
        yield problem(
            "host memory",
            f"{found}, for {num_ranks} rank(s)",
            f"give each rank {MIN_RANK_BYTES / GB:g} GB (SLURM's --mem, the container's --memory), or use fewer",
        )
    else:
        yield ok("host memory", found)


def check_open_files(soft: int, world_size: int) -> Iterator[Finding]:
    """Checks the limit of open files of a rank; every pair of ranks uses sockets."""
    wanted = FILES_OF_A_RANK + SOCKETS_OF_A_PAIR * (world_size - 1)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        yield warning("open files", f"at most {soft}; {world_size} rank(s) may want {wanted}", f"ulimit -n {wanted}")
    else:
        yield ok("open files", f"at most {'any number' if soft == resource.RLIM_INFINITY else soft}")


def check_locked_memory(soft: int, adapters: Sequence[str]) -> Iterator[Finding]:
    """Checks the limit of locked memory, which InfiniBand needs.

    Args:
        soft: Limit, bytes.
        adapters: InfiniBand or RoCE adapters of the host.
    """
    if not adapters:
        yield ok("locked memory", "no InfiniBand, so the limit does not matter")
    elif soft != resource.RLIM_INFINITY:
        yield problem(
            "locked memory",
            f"at most {soft >> 10} KiB, and NCCL over {adapters[0]} locks its buffers",
            "ulimit -l unlimited (in limits.conf and for slurmd; for a container --ulimit memlock=-1)",
        )
    else:
        yield ok("locked memory", f"unlimited, for {', '.join(adapters)}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Checks the size and the free space of /dev/shm."""
    space = os.statvfs(folder)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if free < MIN_SHM_BYTES:
        yield warning(
            str(folder),
            f"{free / GB:.2f} of {total / GB:.2f} GB free",
            "enlarge it (container: --shm-size=16g or --ipc=host), or delete files that crashed jobs left there",
        )
    else:
        yield ok(str(folder), f"{free / GB:.1f} of {total / GB:.1f} GB free")


def infiniband_adapters(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Returns the InfiniBand adapters of the host, including those that a container cannot use."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def check_container(adapters: Sequence[str], kind: str, devices: Path = Path("/dev/infiniband")) -> Iterator[Finding]:
    """Checks that a container has the host's InfiniBand devices.

    Args:
        adapters: InfiniBand adapters of the host.
        kind: Type of the container; "": none.
        devices: Folder of the adapters' device files.
    """
    if kind and adapters and not devices.is_dir():
        yield problem(
            "container",
            f"{kind}: the host has {', '.join(adapters)}, but the container has no {devices}",
            "add it (--device=/dev/infiniband, or pyxis's --container-mounts); otherwise NCCL uses slow sockets",
        )
    elif kind:
        yield ok("container", kind)


def container_type(variables: dict[str, str], root: Path = Path("/")) -> str:
    """Returns the type of container (Docker, Podman, Apptainer ...), or "" outside a container.

    Args:
        variables: Environment variable `container`, if the container runtime set it.
        root: Root folder.
    """
    marks = {".dockerenv": "Docker", "run/.containerenv": "Podman", ".singularity.d": "Apptainer"}
    return next((name for mark, name in marks.items() if (root / mark).exists()), variables.get("container", ""))

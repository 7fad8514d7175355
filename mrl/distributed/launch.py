"""Starts and stops this process as a rank of the job; the one reader of os.environ.

Owns what the launcher tells (rank, world size, host layout), the device of the rank, threads, and the default process
group. It knows torchrun's variables and a plain single process. Process groups of the parallel layout are in
`groups.py`. `environment` needs no torch, so that a mistake is told before torch is imported.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from mrl.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Environment:
    """What the launcher says of this process.

    Attributes:
        rank: 0 .. world_size-1 over all hosts.
        world_size: Processes of the job.
        local_rank: 0 .. local_world_size-1 on this host.
        local_world_size: Processes of the job on this host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def environment() -> Environment:
    """Reads the launcher's variables; no process group is needed.

    Raises:
        UserError: torchrun's variables are incomplete or contradict each other.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Environment()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"the environment has some of torchrun's variables but not {', '.join(missing)}. Start with "
            "`torchrun --nproc-per-node N -m mrl ...`, or unset RANK and WORLD_SIZE for a single process."
        )
    try:
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in names[:4])
    except ValueError as error:
        raise UserError(f"one of {', '.join(names[:4])} is not a number: {error}.") from error
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size} contradict."
        )
    return Environment(rank, size, local_rank, local_size)


def choose_device(wanted: str) -> str:
    """The device kind that `run.device` asks for: cpu or cuda.

    Raises:
        UserError: CUDA was asked for and there is none, or the CPU where Megatron would find CUDA devices.
    """
    import torch

    if wanted == "cpu" and torch.cuda.is_available():
        raise UserError("run.device=cpu on a machine with CUDA: hide its devices too, by CUDA_VISIBLE_DEVICES=''.")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device=cuda, but torch sees no CUDA device. Use run.device=auto or cpu.")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def start(device: str = "auto", *, num_threads: int = 0, timeout_s: float = 600.0) -> torch.device:
    """Collective over the job: makes this process a rank with a device, threads and the default process group.

    Args:
        device: `run.device`.
        num_threads: CPU threads of this rank; 0: the host's cores divided by its ranks.
        timeout_s: A collective that waits longer fails, s.

    Returns:
        The device of this rank.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from mrl.distributed import device as device_module

    env = environment()
    kind = choose_device(device)
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // env.local_world_size))
    if kind == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps TP collectives in launch order
        torch.cuda.set_device(env.local_rank)
    elif env.local_world_size == env.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())  # a laptop's hostname often does not resolve
    device_module.prepare(kind)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if env.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return torch.device(kind, env.local_rank) if kind == "cuda" else torch.device("cpu")


def stop(*, in_order: bool = True) -> None:
    """Collective over the job: leaves the process group. Ranks that exit without it sometimes die with SIGABRT.

    Args:
        in_order: Wait for the others first; False after an error, when they may never come.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        if in_order:
            dist.barrier()
        dist.destroy_process_group()


def device_name(device: torch.device) -> str:
    """Such as "cpu" or "NVIDIA H100 80GB HBM3"."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])

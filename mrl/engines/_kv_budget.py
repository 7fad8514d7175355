"""Size of the KV cache, from the free memory. Allocates nothing."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from mrl.distributed.launch import get_launcher_env


def kv_budget(
    device: torch.device, utilization: float, tp_group: dist.ProcessGroup | None, *, later_bytes: int = 0
) -> int:
    """Collective over the replica: returns the bytes for the KV cache of each rank, the minimum over the replica.

    Args:
        device: CUDA: the device's free memory counts. CPU: the host's, divided equally among the ranks of the host.
        utilization: Fraction of the free memory, (0, 1).
        tp_group: Ranks of the replica; None: a replica of one rank.
        later_bytes: Bytes that this rank will allocate before it generates; subtracted from the free memory.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // get_launcher_env().local_world_size
    budget = torch.tensor(int(max(0, free - later_bytes) * utilization), dtype=torch.int64, device=device)
    if tp_group is not None:
        dist.all_reduce(budget, op=dist.ReduceOp.MIN, group=tp_group)
    return int(budget)

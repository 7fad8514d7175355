"""How many bytes the KV cache may take.

Owns the reading of free memory; nothing is allocated here.
"""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from mrl.distributed.launch import environment


def kv_budget(
    device: torch.device, utilization: float, tp_group: dist.ProcessGroup | None, *, later_bytes: int = 0
) -> int:
    """Collective over the replica: bytes for the KV cache, the same on each of its ranks.

    Args:
        device: On CUDA its free memory counts; on a CPU the host's, shared equally by the ranks of the host.
        utilization: Part of the free memory, (0, 1).
        tp_group: Ranks of the replica; None: this rank alone.
        later_bytes: What this rank will take before it generates; not free.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // environment().local_world_size
    budget = torch.tensor(int(max(0, free - later_bytes) * utilization), dtype=torch.int64, device=device)
    if tp_group is not None:
        dist.all_reduce(budget, op=dist.ReduceOp.MIN, group=tp_group)
    return int(budget)

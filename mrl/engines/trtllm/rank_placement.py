"""Placement of a replica's ranks on hosts, as TensorRT-LLM assumes it. Imports no torch."""

from __future__ import annotations

from mrl.errors import UserError


def check_hosts(first_rank: int, size: int, num_devices: int, ranks_of_host: int) -> None:
    """Checks that a replica's ranks are placed on hosts as TensorRT-LLM assumes.

    From its sources: `gpus_per_node` is the number of devices that a rank sees; ranks are on host rank // gpus_per_node
    of the replica (`mapping.py`), and each of several hosts has equally many (`llmapi/llm_args.py:
    world_size_per_node`). The PyTorch models load their weights on the device of the rank's index within its host
    (`_utils.local_mpi_rank`).

    Args:
        first_rank: MPI rank of the replica's first rank.
        size: Number of ranks in the replica.
        num_devices: Number of devices that this rank sees.
        ranks_of_host: Number of ranks on this rank's host, over all replicas.

    Raises:
        UserError: The ranks are placed differently.
    """
    what = f"rollout.tensor_model_parallel_size={size}"
    if ranks_of_host > num_devices:
        raise UserError(
            f"{what}: this rank sees {num_devices} device(s), but {ranks_of_host} ranks are on its host; TensorRT-LLM "
            "needs each rank of a replica to see the devices of all. Make all devices of the host visible to its ranks "
            "(no --gpus-per-task)."
        )
    last_rank = first_rank + size - 1
    inside = first_rank // num_devices == last_rank // num_devices
    if not inside and (first_rank % num_devices or size % num_devices):
        raise UserError(
            f"{what}: ranks {first_rank} to {last_rank} form a replica, on hosts of {num_devices} devices. "
            "TensorRT-LLM needs a replica inside one host, or on complete hosts: set a size that divides the devices "
            "of a host, or a multiple of them."
        )

"""What a run would cost on a cluster of any size, without running it: `mrl plan CONFIG --world-size N`.

Owns the predictions and their text. They come from the layouts (`weights/traffic.py`) and the vendors' figures
(`hardware.py`): bounds, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config import Config
from mrl.grid import Grid
from mrl.hardware import Hardware
from mrl.models.base import ArchSpec
from mrl.prepare import resolve
from mrl.weights.megatron import megatron_layouts
from mrl.weights.native import native_layouts
from mrl.weights.traffic import Bytes, Traffic, traffic

GB = 1e9


@dataclass(frozen=True)
class RefitPrediction:
    """A refit on a cluster.

    Attributes:
        traffic: Its bytes.
        seconds: Of the rank that takes longest, its local copies and its links one after the other.
        bound_s: The same with everything at once: what no refit of these layouts beats.
        full_gather_s: A refit that gathers every full tensor on every rank.
        staging_bytes: Most that a rank holds in buffers.
    """

    traffic: Traffic
    seconds: float
    bound_s: float
    full_gather_s: float
    staging_bytes: int


def describe(config: Config, world_size: int, hardware: Hardware) -> str:
    """The refit's bytes, by link, and its predicted time.

    Args:
        config: What was asked for.
        world_size: Ranks to plan for.
        hardware: Figures of the cluster.

    Raises:
        UserError: The run would be refused.
    """
    resolved = resolve(config, world_size)
    arch, grid = resolved.arch, resolved.grid
    found = predict_refit(resolved.config, arch, grid, hardware)
    total = found.traffic.total
    moved = total.intra_node + total.inter_node
    nodes = -(-world_size // hardware.gpus_per_node)
    return "\n".join(
        [
            f"{world_size} ranks on {nodes} node(s) of {hardware.gpus_per_node}",
            f"actor     tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}"
            + (f", experts ep {grid.ep} x etp {grid.expert_tp}" if arch.moe else ""),
            f"rollout   {grid.num_replicas} replica(s) of tp {grid.rollout_tp}"
            + (f", experts ep {grid.rollout_ep} x tp {grid.rollout_moe_tp}" if arch.moe else ""),
            "",
            "refit, each time the weights change (bytes over all ranks)",
            f"  copied inside ranks      {total.local / GB:12.3f} GB",
            f"  sent inside nodes        {total.intra_node / GB:12.3f} GB",
            f"  sent between nodes       {total.inter_node / GB:12.3f} GB",
            f"  a gather of full tensors {found.traffic.full_gather_bytes / GB:12.3f} GB"
            + (f", {found.traffic.full_gather_bytes / moved:.1f} times what is sent" if moved else ""),
            f"  staging of a rank        {found.staging_bytes / GB:12.3f} GB at most",
            f"  predicted time           {found.seconds:12.4f} s from peak figures; bound {found.bound_s:.4f} s, "
            f"full gather {found.full_gather_s:.4f} s",
        ]
    )


def predict_refit(config: Config, arch: ArchSpec, grid: Grid, hardware: Hardware) -> RefitPrediction:
    """The bytes and seconds of a refit."""
    rollout_dtype = config.rollout.dtype or config.model.dtype
    sources = megatron_layouts(arch, grid, dtype=config.model.dtype, te=True)
    found = traffic(sources, native_layouts(arch, grid, rollout_dtype), hardware.gpus_per_node)
    each = found.full_gather_bytes / grid.world_size
    gather_rate = (
        hardware.inter_node_bytes_per_s if grid.world_size > hardware.gpus_per_node else hardware.intra_node_bytes_per_s
    )
    bucket_bytes = config.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    received = max(share.intra_node + share.inter_node for share in found.shares)
    return RefitPrediction(
        traffic=found,
        seconds=max(sum(_seconds(share, hardware)) for share in found.shares),
        bound_s=max(max(_seconds(share, hardware)) for share in found.shares),
        full_gather_s=each / gather_rate,
        staging_bytes=min(STAGING_BUFFERS * bucket_bytes, 2 * received),
    )


STAGING_BUFFERS = 4
"""Buckets that a rank holds at a time: to send and to receive, each twice, so that messages and copies overlap."""


def _seconds(share: Bytes, hardware: Hardware) -> tuple[float, float, float]:
    """Local copies (read and written), links of the node, links between nodes."""
    return (
        2 * share.local / hardware.memory_bytes_per_s,
        share.intra_node / hardware.intra_node_bytes_per_s,
        share.inter_node / hardware.inter_node_bytes_per_s,
    )

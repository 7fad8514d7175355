"""Predicts bytes and duration of a weight sync from the layouts of both sides and the links' peak rates.

`resharding/transfer_cost.py` counts the bytes; `engines/_memory_plan.py` has the engines' layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mrl.commands.plan.memory import selects_layers, sends_adapters, staging_bytes, trained_dtype
from mrl.config.config import Config, LoraConfig
from mrl.engines._capabilities import memory_plan
from mrl.models.base import ArchSpec, PipelineStage
from mrl.observability.hardware import Hardware
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Layout
from mrl.resharding.lora import WEIGHT, adapted_modules, adapter_layout, engine_matrices, peft_name
from mrl.resharding.megatron import chunk_layers, megatron_layouts
from mrl.resharding.shards import param_specs, parts_of
from mrl.resharding.transfer_cost import ReceivedBytes, Traffic, traffic

PUBLISHED_SECONDS, PUBLISHED_BYTES, PUBLISHED_RECEIVERS = 1.3, 1e12, 128
"""Weight sync between nodes as Perplexity measured it: Kimi-K2 (10^12 parameters in FP8) from 256 GPUs to 128 others.

Source: https://research.perplexity.ai/articles/weight-transfer-for-rl-post-training-in-under-2-seconds. The number of
replicas is not published; with one, each GPU receives least.
"""
PUBLISHED_RATE = PUBLISHED_BYTES / PUBLISHED_RECEIVERS / PUBLISHED_SECONDS
"""Rate into each receiving GPU, bytes/s: a lower bound of what was reached."""


@dataclass(frozen=True)
class RefitPrediction:
    """Cost of a weight sync on a cluster.

    Attributes:
        traffic: Bytes by kind of link.
        seconds: Duration on the slowest rank, receiving or (with few senders) sending, s: its local copies and its
            links, one after the other.
        bound_s: Same with all of these concurrently, s: a lower bound for these layouts.
        full_gather_s: Duration of a weight sync that gathers every full tensor on every rank, s.
        received_bytes: Most bytes that one rank receives.
        staging_bytes: Most bytes of transport buffers on one rank.
    """

    traffic: Traffic
    seconds: float
    bound_s: float
    full_gather_s: float
    received_bytes: int
    staging_bytes: int

    @property
    def seconds_at_published_rate(self) -> float | None:
        """Duration at `PUBLISHED_RATE`, s; None if nothing is sent between nodes, for which nothing was published."""
        return self.received_bytes / PUBLISHED_RATE if self.traffic.total.inter_node else None


def predict_refit(config: Config, arch: ArchSpec, grid: ParallelLayout, hardware: Hardware) -> RefitPrediction:
    """Predicts bytes and duration of a weight sync."""
    lora = config.actor.lora
    alike = grid.rollout_pp == 1 and not (lora.rank and selects_layers(lora))
    few, places, times = one_layer_of_each(arch, grid) if alike else (arch, grid, {})
    found = traffic(
        *synced_layouts(config, few, places, te=True),
        hardware.gpus_per_node,
        times=times | _times_of_adapters(few, lora, times),
    )
    each = found.full_gather_bytes / len(grid.samplers)
    gather_rate = (
        hardware.inter_node_bytes_per_s if grid.world_size > hardware.gpus_per_node else hardware.intra_node_bytes_per_s
    )
    received = max(share.intra_node + share.inter_node for share in found.shares)
    senders = len(grid.trainers)
    sent = ReceivedBytes(
        0, found.total.intra_node // senders, found.total.inter_node // senders
    )  # assumed evenly spread
    return RefitPrediction(
        traffic=found,
        seconds=max(sum(_seconds(share, hardware)) for share in (*found.shares, sent)),
        bound_s=max(max(_seconds(share, hardware)) for share in (*found.shares, sent)),
        full_gather_s=each / gather_rate,
        received_bytes=received,
        staging_bytes=staging_bytes(config, grid, received),
    )


def synced_layouts(
    config: Config, arch: ArchSpec, grid: ParallelLayout, *, te: bool
) -> tuple[dict[int, Layout], dict[int, Layout]]:
    """Returns rank -> layout of what a weight sync sends, and of where it arrives.

    These are all weights, or with `actor.lora.merge=false` the adapters, which all syncs but the first send alone.
    """
    sources = megatron_layouts(arch, grid, dtype=config.model.dtype, te=te)
    targets = memory_plan(config).layouts(config, arch, grid)
    if not sends_adapters(config):
        return sources, targets
    return _adapters_of(config, arch, sources), _adapters_of(config, arch, targets)


def _adapters_of(config: Config, arch: ArchSpec, layouts: Mapping[int, Layout]) -> dict[int, Layout]:
    """Returns the layouts of the adapters beside stored weights; equal ones share one object."""
    distinct = {id(layout): layout for layout in layouts.values()}
    found = {
        key: adapter_layout(engine_matrices(arch, layout, config.actor.lora, trained_dtype(config)))
        for key, layout in distinct.items()
    }
    return {rank: found[id(layout)] for rank, layout in layouts.items()}


def _times_of_adapters(arch: ArchSpec, lora: LoraConfig, times: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers of real layers for the adapters of `one_layer_of_each`."""
    if not lora.rank or not times:
        return {}
    modules = adapted_modules(arch, lora)
    return {peft_name(one, which): times[one + WEIGHT] for one in modules for which in ("lora_A", "lora_B")}


def one_layer_of_each(arch: ArchSpec, grid: ParallelLayout) -> tuple[ArchSpec, ParallelLayout, dict[str, int]]:
    """Returns a model with one layer per chunk of each stage, its layout, and each tensor's number of real layers.

    All layers of a chunk are sharded alike, so the prediction for thousands of ranks takes seconds.
    """
    few = replace(arch, num_layers=grid.pp * grid.vpp)
    places = replace(grid, first_stage_layers=None, last_stage_layers=None)
    real_layers, times = chunk_layers(arch, grid), {}
    for place, layers in chunk_layers(few, places).items():
        for layer in layers:
            for spec in param_specs(arch):
                if spec.place is PipelineStage.LAYER:
                    experts = range(arch.moe.num_experts) if arch.moe and spec.kind.is_expert else range(1)
                    for part in parts_of(spec, arch):
                        for expert in experts:
                            times[part.name.format(layer=layer, expert=expert)] = len(real_layers[place])
    return few, places, times


def _seconds(share: ReceivedBytes, hardware: Hardware) -> tuple[float, float, float]:
    """Returns the durations of local copies (read and write), of links inside the node and between nodes."""
    return (
        2 * share.local / hardware.memory_bytes_per_s,
        share.intra_node / hardware.intra_node_bytes_per_s,
        share.inter_node / hardware.inter_node_bytes_per_s,
    )

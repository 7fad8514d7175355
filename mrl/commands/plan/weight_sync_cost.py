"""Predicts bytes and duration of a weight sync from the layouts of both sides and the links' peak rates.

`resharding/transfer_cost.py` counts the bytes; `engines/_memory_plan.py` has the engines' layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mrl.commands.plan.memory import (
    StageMemory,
    memory_by_stage,
    num_parameters,
    selects_layers,
    sends_adapters,
    staging_bytes,
    trained_dtype,
)
from mrl.commands.plan.published import SYNC_DIRECT, SYNC_GATHERED, SYNCS, PublishedSync
from mrl.config.config import Config, LoraConfig
from mrl.engines._capabilities import memory_plan
from mrl.engines._memory_plan import Device
from mrl.models.base import ArchSpec, PipelineStage, layer_kinds
from mrl.observability.hardware import Hardware
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import lora as adapters
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.layout import Layout
from mrl.resharding.lora import WEIGHT, adapted_modules, adapter_layout, engine_matrices, peft_name
from mrl.resharding.megatron import chunk_layers, megatron_layouts
from mrl.resharding.shards import layers_of, param_specs, parts_of
from mrl.resharding.transfer_cost import ReceivedBytes, Traffic, traffic
from mrl.trainer.run_plan import Resolved


@dataclass(frozen=True)
class RefitPrediction:
    """Cost of a weight sync on a cluster.

    Attributes:
        traffic: Bytes by kind of link.
        seconds: Duration on the slowest rank, receiving or (with few senders) sending, s: its local copies and its
            links, one after the other.
        bound_s: Same with all of these concurrently, s: a lower bound for these layouts.
        full_gather_s: Duration of a weight sync that gathers every full tensor on every rank, s.
        model_bytes: Size of the model, or of the adapters if only they are sent, bytes.
        received_bytes: Most bytes that one rank receives.
        staging_bytes: Most bytes of transport buffers on one rank.
    """

    traffic: Traffic
    seconds: float
    bound_s: float
    full_gather_s: float
    model_bytes: int
    received_bytes: int
    staging_bytes: int

    @property
    def published(self) -> dict[PublishedSync, float]:
        """Published rate of another system -> duration at it, s; direct transfers only if nodes send to each other."""
        return {
            sync: (self.model_bytes if sync.gathers else self.received_bytes) / sync.bytes_per_s
            for sync in SYNCS
            if sync.gathers or self.traffic.total.inter_node
        }

    @property
    def closest(self) -> PublishedSync:
        """Published weight sync that is most like this one: direct between nodes, gathered inside a node."""
        return SYNC_DIRECT if self.traffic.total.inter_node else SYNC_GATHERED


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
    elements = adapters.num_parameters(arch, lora) if sends_adapters(config) else num_parameters(arch)
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
        model_bytes=elements * ITEM_BYTES[config.model.dtype],
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


def memory_with_refit(plan: Resolved, device: Device, refit: RefitPrediction | None) -> list[StageMemory]:
    """Returns the memory of a rank of each stage, without staging if the weight sync is known to send nothing.

    Where there is staging, it is that for all of an engine's weights: a rank may send more than it receives.
    """
    sends_nothing = refit is not None and not refit.staging_bytes
    return memory_by_stage(plan, device, moved_bytes=0 if sends_nothing else None)


def one_layer_of_each(arch: ArchSpec, grid: ParallelLayout) -> tuple[ArchSpec, ParallelLayout, dict[str, int]]:
    """Returns a model with one layer of each kind per chunk, its layout, and each tensor's number of real layers.

    All layers of a chunk with the same kinds of MLP and attention are sharded alike, so the prediction for thousands of
    ranks takes seconds. A chunk may have none of a kind.
    """
    kinds = [(one.moe is not None, one.linear_attention is not None) for one, _ in layer_kinds(arch)]
    few = replace(arch, num_layers=len(kinds) * grid.pp * grid.vpp, sliding_window=None, windowed_layers=())
    if arch.moe is not None:
        dense = tuple(layer for layer in range(few.num_layers) if not kinds[layer % len(kinds)][0])
        few = replace(few, moe=replace(arch.moe, dense_layers=dense))
    if arch.linear_attention is not None:
        linear = tuple(layer for layer in range(few.num_layers) if kinds[layer % len(kinds)][1])
        few = replace(few, linear_attention=replace(arch.linear_attention, layers=linear))
    places = replace(grid, first_stage_layers=None, last_stage_layers=None)
    real_layers, times = chunk_layers(arch, grid), {}
    for place, layers in chunk_layers(few, places).items():
        for layer in layers:
            number = sum(_kind(arch, each) == _kind(few, layer) for each in real_layers[place])
            for spec in param_specs(few):
                if spec.place is PipelineStage.LAYER and layer in layers_of(spec, few):
                    experts = range(arch.moe.num_experts) if arch.moe and spec.kind.is_expert else range(1)
                    for part in parts_of(spec, arch):
                        for expert in experts:
                            times[part.name.format(layer=layer, expert=expert)] = number
    return few, places, times


def _kind(arch: ArchSpec, layer: int) -> tuple[bool, bool]:
    """Returns whether a layer has experts, and whether its attention is linear."""
    return layer in arch.moe_layers, layer in arch.linear_layers


def _seconds(share: ReceivedBytes, hardware: Hardware) -> tuple[float, float, float]:
    """Returns the durations of local copies (read and write), of links inside the node and between nodes."""
    return (
        2 * share.local / hardware.memory_bytes_per_s,
        share.intra_node / hardware.intra_node_bytes_per_s,
        share.inter_node / hardware.inter_node_bytes_per_s,
    )

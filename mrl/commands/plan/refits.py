"""How long a refit takes on a cluster and what it sends, from the layouts of both sides and the links' peak rates.

Owns the prediction. The bytes are counted by `resharding/transfer_cost.py`; what an engine wants stands in
`engine_weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.commands.plan.engine_weights import engine_layouts
from mrl.commands.plan.memory import staging_bytes
from mrl.config.config import Config
from mrl.models.base import ArchSpec, Place
from mrl.observability.hardware import Hardware
from mrl.parallel_layout import Grid
from mrl.resharding.megatron import chunk_layers, megatron_layouts
from mrl.resharding.shards import parts_of, table
from mrl.resharding.transfer_cost import Bytes, Traffic, traffic


@dataclass(frozen=True)
class RefitPrediction:
    """A refit on a cluster.

    Attributes:
        traffic: Its bytes.
        seconds: Of the rank that takes longest to get its part, or to send it where few send to many: its local
            copies and its links one after the other.
        bound_s: The same with everything at once: what no refit of these layouts beats.
        full_gather_s: A refit that gathers every full tensor on every rank.
        received_bytes: Most that one rank is sent.
        staging_bytes: Most that a rank holds in buffers of the transport.
    """

    traffic: Traffic
    seconds: float
    bound_s: float
    full_gather_s: float
    received_bytes: int
    staging_bytes: int


def predict_refit(config: Config, arch: ArchSpec, grid: Grid, hardware: Hardware) -> RefitPrediction:
    """The bytes and seconds of a refit."""
    few, places, times = one_layer_of_each(arch, grid) if grid.rollout_pp == 1 else (arch, grid, {})
    sources = megatron_layouts(few, places, dtype=config.model.dtype, te=True)
    found = traffic(sources, engine_layouts(config, few, places), hardware.gpus_per_node, times=times)
    each = found.full_gather_bytes / len(grid.samplers)
    gather_rate = (
        hardware.inter_node_bytes_per_s if grid.world_size > hardware.gpus_per_node else hardware.intra_node_bytes_per_s
    )
    received = max(share.intra_node + share.inter_node for share in found.shares)
    senders = len(grid.trainers)
    sent = Bytes(0, found.total.intra_node // senders, found.total.inter_node // senders)  # it is spread over them
    return RefitPrediction(
        traffic=found,
        seconds=max(sum(_seconds(share, hardware)) for share in (*found.shares, sent)),
        bound_s=max(max(_seconds(share, hardware)) for share in (*found.shares, sent)),
        full_gather_s=each / gather_rate,
        received_bytes=received,
        staging_bytes=staging_bytes(config, grid, received),
    )


def one_layer_of_each(arch: ArchSpec, grid: Grid) -> tuple[ArchSpec, Grid, dict[str, int]]:
    """A model with one layer in each chunk of each stage, its grid, and how many layers each of its tensors stands for.

    The layers of a chunk are cut and placed alike, so that thousands of ranks take seconds.
    """
    few = replace(arch, num_layers=grid.pp * grid.vpp)
    places = replace(grid, first_stage_layers=None, last_stage_layers=None)
    whole, times = chunk_layers(arch, grid), {}
    for place, layers in chunk_layers(few, places).items():
        for layer in layers:
            for spec in table(arch):
                if spec.place is Place.LAYER:
                    experts = range(arch.moe.num_experts) if arch.moe and spec.kind.is_expert else range(1)
                    for part in parts_of(spec, arch):
                        for expert in experts:
                            times[part.name.format(layer=layer, expert=expert)] = len(whole[place])
    return few, places, times


def _seconds(share: Bytes, hardware: Hardware) -> tuple[float, float, float]:
    """Local copies (read and written), links of the node, links between nodes."""
    return (
        2 * share.local / hardware.memory_bytes_per_s,
        share.intra_node / hardware.intra_node_bytes_per_s,
        share.inter_node / hardware.inter_node_bytes_per_s,
    )

"""What a run would be, without starting it: `mrl train CONFIG --dry-run`.

Owns the text only. The same checks refuse the same mistakes as in a real run; no process group exists, no weight is
read and no folder is made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from mrl import preflight
from mrl.algorithms import base as algorithms
from mrl.config import Config, to_yaml
from mrl.grid import Grid
from mrl.models.base import ArchSpec
from mrl.prepare import load_model_facts
from mrl.weights.layout import Layout
from mrl.weights.megatron import megatron_layout
from mrl.weights.native import native_layout
from mrl.weights.plan import Plan, make_plan

MIB = 1 << 20


def describe(config: Config, world_size: int) -> str:
    """The resolved config, who sits where, and the cost of a refit.

    Args:
        config: What was asked for.
        world_size: Ranks to plan for.

    Raises:
        UserError: The run would be refused.
    """
    config = replace(config, algorithm=algorithms.build(config.algorithm, config.rollout).config)
    arch, tokenizer = load_model_facts(config)
    preflight.check(config, arch, world_size, tokenizer.vocab_size)
    grid = preflight.grid_of(config, world_size)
    cost = refit_plan(config, arch, grid)
    bucket_bytes = config.rollout.checkpoint_engine.update_weights_bucket_megabytes * MIB
    lines = [
        "# config",
        to_yaml(config).rstrip(),
        "",
        f"# ranks: {grid.world_size} = tp {grid.tp} x dp {grid.dp} x pp {grid.pp}"
        f" (model chunks per stage {grid.vpp}); {grid.num_replicas} rollout replica(s) of tp {grid.rollout_tp}",
        "rank    tp    dp    pp replica",
        *(_row(grid, rank) for rank in range(grid.world_size)),
        "",
        "# refit, each time the weights change",
        f"copied inside ranks    {cost.bytes_local / MIB:.2f} MiB",
        f"sent between ranks     {cost.bytes_moved / MIB:.2f} MiB (lower bound {cost.lower_bound_bytes / MIB:.2f} MiB)",
        f"staging of a rank      {cost.peak_staging_bytes(bucket_bytes) / MIB:.2f} MiB",
    ]
    return "\n".join(lines)


def refit_plan(config: Config, arch: ArchSpec, grid: Grid) -> Plan:
    """The copies of a refit between all ranks of a grid; ranks with equal shards share a layout."""

    @cache
    def actor(tp: int, pp: int) -> Layout:
        rank = next(r for r in range(grid.world_size) if (grid.coords(r).tp, grid.coords(r).pp) == (tp, pp))
        return megatron_layout(arch, grid, rank, dtype=config.model.dtype, te=False)

    @cache
    def engine(tp_rank: int) -> Layout:
        return native_layout(arch, grid.rollout_tp, tp_rank, config.rollout.dtype or config.model.dtype)

    ranks = range(grid.world_size)
    sources = {rank: actor(grid.coords(rank).tp, grid.coords(rank).pp) for rank in ranks}
    return make_plan(sources, {rank: engine(grid.rollout_tp_rank(rank)) for rank in ranks})


def _row(grid: Grid, rank: int) -> str:
    at = grid.coords(rank)
    return f"{rank:4d} {at.tp:5d} {at.dp:5d} {at.pp:5d} {grid.replica(rank):7d}"

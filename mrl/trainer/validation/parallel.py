"""Parallel layout from the config (`build_parallel_layout`), and rules that it fits ranks and model. Imports no torch.

Rules of MoE layouts are in `experts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from mrl.config import user_code
from mrl.config.config import Config
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.models._positions import position_limit
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import chunk_layers, expert_shard
from mrl.resharding.shards import TensorShard, check_divides, check_experts_divide
from mrl.trainer.validation.ranges import value_at
from mrl.trainer.validation.rollout_ranks import key_of, num_rollout_ranks

MAX_RANKS = 1 << 17
"""Upper limit on the number of ranks; sharding plans are computed for every rank."""


def build_parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """Returns the parallel layout of the config."""
    return ParallelLayout(
        world_size=world_size,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        vpp=config.parallel.virtual_pipeline_model_parallel_size or 1,
        cp=config.parallel.context_parallel_size,
        ep=config.parallel.expert_model_parallel_size,
        etp=config.parallel.expert_tensor_parallel_size,
        first_stage_layers=config.parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.parallel.num_layers_in_last_pipeline_stage,
        rollout_tp=config.rollout.tensor_model_parallel_size,
        rollout_ep=config.rollout.expert_parallel_size,
        rollout_pp=config.rollout.pipeline_model_parallel_size,
        rollout_ranks=num_rollout_ranks(config.rollout),
    )


def check_ranks(config: Config, world_size: int) -> None:
    """Checks that the actor's layout divides the number of ranks.

    Raises:
        UserError: It does not; the message names the sizes and a command that starts enough ranks.
    """
    if world_size > MAX_RANKS:
        raise UserError(f"The run has {world_size} ranks, but mrl supports at most {MAX_RANKS}. Start fewer.")
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    sizes = {name: getattr(config.parallel, name) for name in names}
    num_ranks = math.prod(sizes.values())
    own = num_rollout_ranks(config.rollout)
    if own >= world_size > 0 and own:
        raise UserError(
            f"{key_of(config.rollout)} leaves none of this job's {world_size} rank(s) to train. Reserve fewer. "
            f"{_how_many_ranks(config)}"
        )
    if (world_size - own) % num_ranks:
        product = " x ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)
        equals = f" = {num_ranks}" if " x " in product else ""
        of = f"the {world_size} rank(s) of this job"
        if own:
            of = f"the {world_size - own} rank(s) of this job's {world_size} that train ({key_of(config.rollout)})"
        raise UserError(f"{product}{equals} does not divide {of}. {_how_many_ranks(config)}")


def layout_rules(config: Config, grid: ParallelLayout) -> Iterator[str]:
    """Yields a message for each broken rule between the sizes of the layout."""
    if grid.vpp > 1 and grid.pp == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size={grid.vpp} needs "
            "parallel.pipeline_model_parallel_size above 1, because chunks are interleaved over stages. Raise it, or "
            "remove the virtual size."
        )
    if config.parallel.sequence_parallel and grid.tp == 1:
        yield (
            "parallel.sequence_parallel=true needs parallel.tensor_model_parallel_size above 1. Raise it, or set "
            "sequence_parallel to false."
        )
    stage = len(grid.trainers) // grid.pp
    if grid.ep > 1 and stage % (grid.ep * grid.expert_tp):
        yield (
            f"parallel.expert_model_parallel_size={grid.ep} x parallel.expert_tensor_parallel_size={grid.expert_tp} = "
            f"{grid.ep * grid.expert_tp} does not divide the {stage} rank(s) of a pipeline stage. "
            f"{_how_many_ranks(config)}"
        )
    if grid.rollout_pp > 1 and not engine_capabilities(config.rollout.name).has_pipeline_parallelism:
        if user_code.is_user_code(config.rollout.name):  # mrl's own engines refuse it in their FIELDS
            yield (
                f"rollout.pipeline_model_parallel_size={grid.rollout_pp} is not supported with rollout.name="
                f"{config.rollout.name}: only rollout.name=trtllm_engine has pipeline parallelism. Set it to 1."
            )
    elif len(grid.samplers) % grid.rollout_size:
        stages = f" x rollout.pipeline_model_parallel_size={grid.rollout_pp}" if grid.rollout_pp > 1 else ""
        yield (
            f"rollout.tensor_model_parallel_size={grid.rollout_tp}{stages} does not divide the {len(grid.samplers)} "
            f"{'rank(s) of this job that sample' if grid.has_separate_rollout else 'rank(s) of this job'}, "
            f"and all replicas have equal sizes. {_how_many_ranks(config)}"
        )


def division_rules(arch: ArchSpec, grid: ParallelLayout) -> Iterator[str]:
    """Yields a message for each dimension of the model that the layout does not divide."""
    attempts: tuple[Callable[[], object], ...] = (
        lambda: check_divides(arch, TensorShard(grid.tp, 0, "parallel.tensor_model_parallel_size")),
        lambda: check_divides(arch, TensorShard(grid.rollout_tp, 0, "rollout.tensor_model_parallel_size")),
        lambda: chunk_layers(arch, grid),
    )
    for attempt in attempts:
        try:
            attempt()
        except UserError as error:
            yield str(error)


def _how_many_ranks(config: Config) -> str:
    """Returns advice: how to start enough ranks, how to check the config without them, how to run on one rank."""
    parallel, rollout = config.parallel, config.rollout
    num_ranks = build_parallel_layout(config, 1).min_world_size
    names = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_parallel_size",
        "num_ranks",
        "nnodes",
    }
    defaults = {f"parallel.{item.name}": item.default for item in fields(parallel)}
    defaults |= {f"rollout.{item.name}": item.default for item in fields(rollout) if item.name in names}
    changed = {key: value for key, value in defaults.items() if value_at(config, key) != value}
    alone = " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in changed.items())
    start = f"torchrun --nproc-per-node {num_ranks} -m mrl ... (launch/torchrun.sh)"
    if engine_capabilities(rollout.name).needs_mpi(rollout):
        start = f"NPROC={num_ranks} launch/mpirun.sh ..."
    how_many = f"a multiple of {num_ranks} ranks"
    if own := num_rollout_ranks(rollout):
        how_many = f"{num_ranks} ranks, {own} of them for rollouts, or more in steps of {num_ranks - own}"
    return (
        f"Start {how_many}: {start}; or only check the config: mrl train ... --dry-run --world-size "
        f"{num_ranks}; or use one process: {alone}"
    )


def same_layout_rules(
    config: Config, arch: ArchSpec, other: ArchSpec, grid: ParallelLayout, *, host: str, name: str
) -> Iterator[str]:
    """Yields the end of a message for each reason why a second model cannot use the actor's layout and sequences.

    Args:
        config: Config with the algorithm's defaults filled in.
        arch: Architecture of the actor.
        other: Architecture of the second model.
        grid: Parallel layout of both.
        host: Noun for the actor in messages ("student").
        name: Noun for the model in messages ("teacher").
    """
    if (other.moe is None) != (arch.moe is None):
        yield (
            f": one of {host} and {name} is an MoE model and the other is dense, but both use one parallel layout. "
            f"Choose a {name} of the {host}'s kind."
        )
    if (limit := position_limit(other)) < config.rollout.max_sequence_length:
        yield (
            f" has positions for {limit} tokens, fewer than the "
            f"{config.rollout.max_sequence_length} of prompt and response. Choose another {name}, or lower "
            "rollout.prompt_length or rollout.response_length."
        )
    for message in division_rules(other, replace(grid, rollout_tp=1)):
        yield f": {message}"
    if other.moe is not None:
        try:
            check_experts_divide(other.moe, expert_shard(grid, 0))
        except UserError as error:
            yield f": {error}"

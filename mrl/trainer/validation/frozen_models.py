"""Rules of forward-only models (separate teachers, reward model), which use the actor's layout. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import expert_shard
from mrl.resharding.shards import check_experts_divide
from mrl.trainer.validation.parallel import division_rules


def forward_only_config(config: Config) -> Config:
    """Returns the config from which a forward-only model is built like an actor, offloaded while it is not used."""
    actor = replace(
        config.actor, param_offload=True, grad_offload=True, optimizer_offload=True, router_replay="none",
        recompute="none",
    )  # fmt: skip
    return replace(config, actor=actor)


def forward_only_rules(
    config: Config, arch: ArchSpec, other: ArchSpec, grid: ParallelLayout, *, host: str, name: str
) -> Iterator[str]:
    """Yields the end of a message for each broken rule.

    Args:
        config: Config with the algorithm's defaults filled in.
        arch: Architecture of the actor.
        other: Architecture of the forward-only model.
        grid: Parallel layout of both.
        host: Noun for the actor in messages ("student").
        name: Noun for the model in messages ("teacher").
    """
    if (other.moe is None) != (arch.moe is None):
        yield (
            f": one of {host} and {name} is an MoE model and the other is dense, but both use one parallel layout. "
            f"Choose a {name} of the {host}'s kind."
        )
    if other.max_position_embeddings < config.rollout.max_sequence_length:
        yield (
            f" has positions for {other.max_position_embeddings} tokens, fewer than the "
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

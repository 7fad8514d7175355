"""Models that are only run forward, in the actor's layout: what is built for one, and when it fits there.

Owns what teachers and a reward model have in common. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import Grid
from mrl.resharding.megatron import expert_shard
from mrl.resharding.shards import check_experts_divide
from mrl.trainer.validation.parallel import division_rules


def guest_config(config: Config) -> Config:
    """The config with a model that has layers of its own in the actor's place: it only runs forward."""
    actor = replace(
        config.actor, param_offload=True, grad_offload=True, optimizer_offload=True, router_replay="none",
        recompute="none",
    )  # fmt: skip
    return replace(config, actor=actor)


def guest_rules(config: Config, arch: ArchSpec, guest: ArchSpec, grid: Grid, *, host: str, name: str) -> Iterator[str]:
    """The end of a message for each broken rule.

    Args:
        config: What was asked for.
        arch: The actor.
        guest: The model.
        grid: The layout of both.
        host: What the actor is called.
        name: What the model is called.
    """
    if (guest.moe is None) != (arch.moe is None):
        yield (
            f": of {host} and {name} one is a mixture of experts and the other is not, which share no layout. Give a "
            f"{name} of the {host}'s kind."
        )
    if guest.max_position_embeddings < config.rollout.longest:
        yield (
            f" has positions for {guest.max_position_embeddings} tokens, fewer than the {config.rollout.longest} of "
            "prompt and response."
        )
    for message in division_rules(guest, replace(grid, rollout_tp=1)):
        yield f": {message}"
    if guest.moe is not None:
        try:
            check_experts_divide(guest.moe, expert_shard(grid, 0))
        except UserError as error:
            yield f": {error}"

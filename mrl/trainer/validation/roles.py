"""Refuses ranks that only sample where they cannot be: too many of them, or nothing for them to do.

Owns the rules of `rollout.num_ranks` and `rollout.nnodes`; which engines run on ranks of their own stands in their
`FIELDS`. What has no answer for such a run refuses it by `refuse_roles`. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config, RolloutConfig
from mrl.errors import UserError
from mrl.parallel_layout import Grid


def own_ranks(rollout: RolloutConfig) -> int:
    """Ranks that only sample; 0: all ranks train and sample."""
    return rollout.num_ranks or rollout.nnodes * rollout.n_gpus_per_node


def key_of(rollout: RolloutConfig) -> str:
    """What gave rollouts ranks of their own, as it is written."""
    if rollout.num_ranks:
        return f"rollout.num_ranks={rollout.num_ranks}"
    return f"rollout.nnodes={rollout.nnodes} x rollout.n_gpus_per_node={rollout.n_gpus_per_node}"


def role_rules(config: Config, grid: Grid, *, supervised: bool) -> Iterator[str]:
    """A message for each broken rule about ranks that only sample.

    Args:
        config: What was asked for.
        grid: The layout.
        supervised: The algorithm samples nothing.
    """
    rollout = config.rollout
    if rollout.num_ranks and rollout.nnodes:
        yield (
            f"rollout.num_ranks={rollout.num_ranks} and rollout.nnodes={rollout.nnodes} both say how many ranks only "
            "sample. Set one of them."
        )
    if grid.has_roles and config.reward.model.path is not None:
        yield (
            f"{key_of(rollout)} with reward.model.path: a reward model is in the actor's layout on ranks that train, "
            "and samples are scored where they were sampled. Leave one of them out."
        )
    if grid.has_roles and supervised:
        yield (
            f"{key_of(rollout)} with algorithm.name={config.algorithm.name}: nothing is sampled to train on, and those "
            "ranks would be idle. Leave it out."
        )


def refuse_roles(config: Config, what: str, instead: str) -> None:
    """Raises where rollouts have ranks of their own.

    Args:
        config: Of the run.
        what: Cannot do that, and why.
        instead: What to do, as a sentence.

    Raises:
        UserError: With the key.
    """
    if own_ranks(config.rollout):
        raise UserError(f"{key_of(config.rollout)}: {what}. {instead}")

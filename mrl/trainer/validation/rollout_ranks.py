"""Rules of ranks that only sample (`rollout.num_ranks`, `rollout.nnodes`). Imports no torch.

The engines' `FIELDS` say which engines support them. Code that does not support them calls `refuse_roles`.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config, RolloutConfig
from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout


def num_rollout_ranks(rollout: RolloutConfig) -> int:
    """Returns the number of ranks that only sample; 0 if all ranks train and sample."""
    return rollout.num_ranks or rollout.nnodes * rollout.n_gpus_per_node


def key_of(rollout: RolloutConfig) -> str:
    """Returns the settings that separate the sampling ranks, as "key=value"."""
    if rollout.num_ranks:
        return f"rollout.num_ranks={rollout.num_ranks}"
    return f"rollout.nnodes={rollout.nnodes} x rollout.n_gpus_per_node={rollout.n_gpus_per_node}"


def role_rules(config: Config, grid: ParallelLayout, *, supervised: bool) -> Iterator[str]:
    """Yields a message for each broken rule; `supervised` is True for an algorithm that does not sample."""
    rollout = config.rollout
    if rollout.num_ranks and rollout.nnodes:
        yield (
            f"rollout.num_ranks={rollout.num_ranks} and rollout.nnodes={rollout.nnodes} both set the number of ranks "
            "that only sample. Set one of them."
        )
    if grid.has_separate_rollout and config.reward.model.path is not None:
        yield (
            f"{key_of(rollout)} is not supported with reward.model.path: the reward model runs on ranks that train, "
            "but samples are scored on ranks that sample. Remove one of them."
        )
    if grid.has_separate_rollout and supervised:
        yield (
            f"{key_of(rollout)} with algorithm.name={config.algorithm.name}: the algorithm does not sample, so these "
            "ranks would be idle. Remove it."
        )


def refuse_roles(config: Config, what: str, instead: str) -> None:
    """Raises if some ranks only sample.

    Args:
        config: Settings of the run.
        what: Clause that says who does not support it and why.
        instead: Sentence that says how to proceed.

    Raises:
        UserError: `rollout.num_ranks` or `rollout.nnodes` is set.
    """
    if num_rollout_ranks(config.rollout):
        raise UserError(f"{key_of(config.rollout)}: {what}. {instead}")

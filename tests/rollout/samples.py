"""Samples that follow from their prompts alone, whoever makes them."""

import torch
import torch.distributed as dist

from mrl.parallel_layout import ParallelLayout
from mrl.rollout.prompt_assignment import LengthHistory, assign
from mrl.types import Prompt, Rollout
from tests import layouts

SAMPLES = 3

LAYERS, TOP_K = 4, 3
"""Of the engine's record."""


def prompts(count):
    return [Prompt(uid, tuple(range(uid % 5 + 1)), f"p{uid}", source=f"data:{uid}") for uid in range(count)]


def rollouts_of(prompt):
    """What any replica would sample for the prompt: lengths and values follow from the ids alone."""
    for sample in range(SAMPLES):
        length = (prompt.uid * 7 + sample * 3) % 6 + 1
        ids = [100 * prompt.uid + 10 * sample + i for i in range(length)]
        yield Rollout(
            prompt, sample, ids, [-0.5 * i for i in ids], "length" if length == 6 else "stop", 0,
            reward=float(length), reward_parts={"r": float(length)}, routed_experts=routed([*prompt.prompt_ids, *ids]),
            sampled_mask=None if prompt.uid % 2 else [token % 3 != 1 for token in ids],
        )  # fmt: skip


def routed(ids):
    """A record in which every entry tells its token, layer and place."""
    tokens = torch.tensor(ids, dtype=torch.int16)[:, None, None] * 10
    return tokens + torch.arange(LAYERS * TOP_K, dtype=torch.int16).view(LAYERS, TOP_K)


def groups_of(grid_args):
    """This rank's groups in a job of that layout."""
    return layouts.groups_of(ParallelLayout(dist.get_world_size(), **grid_args))


def sampled(groups, count):
    """What this rank's replica samples for its part of the prompts."""
    grid = groups.grid
    if not groups.is_sampler:
        return []
    mine = assign(prompts(count), grid.num_replicas, SAMPLES, LengthHistory(4.0))[grid.replica(groups.rank)]
    return [rollout for prompt in mine for rollout in rollouts_of(prompt)]

"""Which rewards each turn of an episode answers for (`algorithm.credit=turn`).

Owns the way from the environment's rewards, turn by turn, to a row of outcomes for each turn, and which turn each token
belongs to. What an algorithm makes of these rows is what it makes of samples.

The rewards of turn k are weight x r_k, and those of the last turn have besides all that is not the environment's: what
other reward functions give, and what the algorithm adds. Together they are the sample's. A turn's outcome is the sum of
its own and those after it, undiscounted, and its group are the samples of the prompt that came so far. Where only the
last turns are rewarded and all are as long, that is the outcome of the episode.

Source: the return of a step and groups of steps, GiGPO, arXiv 2505.10978, section 4.2, with the turn's number for the
state and discount 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.config.config import RewardConfig
from mrl.distributed.collectives import all_gather_ragged
from mrl.rollout.dispatch import StepBatch
from mrl.types import Rollout, SampleTable

ENVIRONMENT = "environment"
"""Of `reward.functions`: the environment's own."""


def gather_turn_rewards(rollouts: Sequence[Rollout], over: dist.ProcessGroup) -> dict[tuple[int, int], list[float]]:
    """Collective over `over`: what the environment gave for each turn, by (uid, sample index).

    Args:
        rollouts: Those that this rank speaks for.
        over: Who hears of it.
    """
    rows = [
        [rollout.prompt.uid, rollout.sample_index, reward]
        for rollout in rollouts
        for reward in (rollout.episode.turn_rewards if rollout.episode is not None else ())
    ]
    local = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 3)
    found: dict[tuple[int, int], list[float]] = {}
    for uid, sample, reward in all_gather_ragged(local, over).tolist():
        found.setdefault((int(uid), int(sample)), []).append(reward)
    return found


def credited(outcomes: Outcomes, table: SampleTable, data: StepBatch, reward: RewardConfig) -> tuple[Outcomes, Tensor]:
    """Outcomes with a row for each turn, and which of these rows the turns of this rank's sequences are.

    Sets `data.batch.turn_R`.

    Args:
        outcomes: Of the samples, shaped.
        table: They are its rows.
        data: This rank's; its mask is still that of all sampled tokens.
        reward: Knows the weight of the environment's rewards in the total.

    Raises:
        RuntimeError: A sequence has more or fewer turns of tokens than of rewards.
    """
    weight = sum(function.weight for function in reward.functions if function.name == ENVIRONMENT)
    keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
    given = [[weight * reward for reward in table.turn_rewards[key]] for key in keys]
    own = [
        [*part[:-1], part[-1] + total - math.fsum(part)]
        for part, total in zip(given, outcomes.rewards_N.tolist(), strict=True)
    ]
    to_go = [[math.fsum(part[turn:]) for turn in range(len(part))] for part in own]
    lens_N = torch.tensor([len(part) for part in own], dtype=torch.int64)
    turn_U = torch.tensor([turn for part in own for turn in range(len(part))], dtype=torch.int64)
    rows_U = torch.arange(len(own)).repeat_interleave(lens_N)
    places = torch.stack([outcomes.group_id_N[rows_U], turn_U], dim=1)
    of_turns = replace(
        outcomes,
        rewards_N=torch.tensor([reward for part in to_go for reward in part], dtype=torch.float64),
        own_N=torch.tensor([reward for part in own for reward in part], dtype=torch.float64),
        group_id_N=torch.unique(places, dim=0, return_inverse=True)[1],
        response_lens_N=outcomes.response_lens_N[rows_U],
        truncated_N=outcomes.truncated_N[rows_U],
        parts={name: part_N[rows_U] for name, part_N in outcomes.parts.items()},
    )
    starts_N = lens_N.cumsum(0) - lens_N
    mine = [torch.arange(int(starts_N[row]), int(starts_N[row] + lens_N[row])) for row in data.index_B.tolist()]
    index_U = torch.cat([torch.zeros(0, dtype=torch.int64), *mine])
    data.batch.turn_R = _turn_R(data, lens_N[data.index_B])
    return of_turns, index_U


def _turn_R(data: StepBatch, turns_B: Tensor) -> Tensor:
    """Turns of all sequences, counted through; one begins where a token is sampled and the one before it was not."""
    batch = data.batch
    mask_R, sequence_R = batch.response_mask_R, batch.sequence_R
    follows_R = torch.zeros_like(mask_R)
    follows_R[1:] = mask_R[:-1] & (sequence_R[1:] == sequence_R[:-1])
    begins_R = mask_R & ~follows_R
    found_B = torch.zeros_like(turns_B).index_add_(0, sequence_R, begins_R.long())
    if not torch.equal(found_B, turns_B):
        raise RuntimeError(f"sequences of {turns_B.tolist()} turns have {found_B.tolist()} of sampled tokens")
    return begins_R.cumsum(0) - 1

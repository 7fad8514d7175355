"""Turn-level credit assignment for multi-turn episodes (`algorithm.credit=turn`).

Each turn becomes one row of `Outcomes`, which algorithms treat like a sample:

- Reward of turn k: weight x r_k, with r_k from the environment. The last turn also gets the rest of the sample's reward
  (other reward functions, shaping by the algorithm), so that the turns add up to the sample's reward.
- Return of turn k: undiscounted sum of the rewards of turns k, k+1, ...
- Group of turn k: turn k of all samples of the prompt that have so many turns.

If only last turns are rewarded and all episodes have the same number of turns, this equals the episode's outcome.

Source: step-level returns and groups of GiGPO, arXiv 2505.10978, section 4.2, with the turn number as the state and
discount 1.
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
"""Name in `reward.functions` of the reward that the environment gives."""


def gather_turn_rewards(rollouts: Sequence[Rollout], over: dist.ProcessGroup) -> dict[tuple[int, int], list[float]]:
    """Collective over `over`: returns the environment's reward of each turn, by (uid, sample index).

    Args:
        rollouts: Samples that this rank contributes.
        over: Process group that receives the rewards.
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


def assign_turn_credit(
    outcomes: Outcomes, table: SampleTable, data: StepBatch, reward: RewardConfig
) -> tuple[Outcomes, Tensor]:
    """Splits the outcomes of samples into outcomes of turns; sets `data.batch.turn_R`.

    Args:
        outcomes: Outcomes of all samples, with shaped rewards.
        table: Table with the same rows as `outcomes`.
        data: Batch of this rank; `response_mask_R` must still be True at all sampled tokens.
        reward: Config with the weight of the environment's reward.

    Returns:
        Outcomes with one row for each turn of all samples, and the row numbers of the turns of this rank's sequences.

    Raises:
        RuntimeError: The number of turns in a sequence's tokens differs from its number of turn rewards.
    """
    weight = sum(function.weight for function in reward.functions if function.name == ENVIRONMENT)
    keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
    weighted = [[weight * reward for reward in table.turn_rewards[key]] for key in keys]
    rewards = [
        [*part[:-1], part[-1] + total - math.fsum(part)]
        for part, total in zip(weighted, outcomes.rewards_N.tolist(), strict=True)
    ]
    returns = [[math.fsum(part[turn:]) for turn in range(len(part))] for part in rewards]
    lens_N = torch.tensor([len(part) for part in rewards], dtype=torch.int64)
    turn_U = torch.tensor([turn for part in rewards for turn in range(len(part))], dtype=torch.int64)
    rows_U = torch.arange(len(rewards)).repeat_interleave(lens_N)
    groups_U2 = torch.stack([outcomes.group_id_N[rows_U], turn_U], dim=1)
    of_turns = replace(
        outcomes,
        rewards_N=torch.tensor([each for part in returns for each in part], dtype=torch.float64),
        own_N=torch.tensor([each for part in rewards for each in part], dtype=torch.float64),
        group_id_N=torch.unique(groups_U2, dim=0, return_inverse=True)[1],
        response_lens_N=outcomes.response_lens_N[rows_U],
        truncated_N=outcomes.truncated_N[rows_U],
        sampled_lens_N=None if outcomes.sampled_lens_N is None else outcomes.sampled_lens_N[rows_U],
        parts={name: part_N[rows_U] for name, part_N in outcomes.parts.items()},
    )
    starts_N = lens_N.cumsum(0) - lens_N
    own = [torch.arange(int(starts_N[row]), int(starts_N[row] + lens_N[row])) for row in data.index_B.tolist()]
    index_U = torch.cat([torch.zeros(0, dtype=torch.int64), *own])
    data.batch.turn_R = _turn_R(data, lens_N[data.index_B])
    return of_turns, index_U


def _turn_R(data: StepBatch, turns_B: Tensor) -> Tensor:
    """Numbers the turns of the batch; a turn starts at a sampled token that does not follow another sampled token."""
    batch = data.batch
    mask_R, sequence_R = batch.response_mask_R, batch.sequence_R
    follows_R = torch.zeros_like(mask_R)
    follows_R[1:] = mask_R[:-1] & (sequence_R[1:] == sequence_R[:-1])
    begins_R = mask_R & ~follows_R
    found_B = torch.zeros_like(turns_B).index_add_(0, sequence_R, begins_R.long())
    if not torch.equal(found_B, turns_B):
        raise RuntimeError(
            f"The environments rewarded {turns_B.tolist()} turns of the sequences, but their tokens have "
            f"{found_B.tolist()} sampled parts. This is a bug in the episode's record of tokens; please report it."
        )
    return begins_R.cumsum(0) - 1

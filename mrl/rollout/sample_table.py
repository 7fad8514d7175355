"""Gathering of the sample table: metadata and rewards of all samples on every rank, without their tokens.

`dispatch.py` moves the tokens; no rank stores all of them.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.distributed.collectives import all_gather_ragged, raise_on_all_ranks, world_group
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.observability.metrics import is_correct
from mrl.rollout.turn_credit import gather_turn_rewards
from mrl.types import EPISODE_ENDS, Rollout, SampleTable

NAMED = 8
"""Maximum number of failed samples that are logged one by one."""


def gather_table(
    rollouts: Sequence[Rollout],
    groups: ProcessGroups,
    reward_names: Sequence[str],
    *,
    with_kept_tokens: bool = False,
    with_turn_rewards: bool = False,
    over: dist.ProcessGroup | None = None,
) -> SampleTable:
    """Collective over `over`: gathers the metadata of all samples; the first rank of each replica contributes them.

    Args:
        rollouts: Scored samples on the first rank of each replica; ignored on other ranks.
        groups: Process groups and coordinates of this rank.
        reward_names: Keys of `Rollout.reward_parts`, in the config's order.
        with_kept_tokens: True to include the columns `SampleTable.KEPT`; rollouts must have `support`.
        with_turn_rewards: True to include the environment's `turn_rewards`; rollouts must be episodes.
        over: Process group that contains at least all ranks that sample; None: all ranks.

    Raises:
        RuntimeError: `with_kept_tokens` is set and a rollout lacks the kept ids of some token.
    """
    own = rollouts if groups.is_replica_leader else ()
    kept: list[list[float]] = [[] for _ in own]
    if with_kept_tokens:
        with raise_on_all_ranks(over):
            kept = [_kept_columns(rollout) for rollout in own]
    rows = [
        [
            groups.rank,
            rollout.prompt.uid,
            rollout.sample_index,
            len(rollout.prompt.prompt_ids),
            len(rollout.response_ids),
            rollout.reward,
            is_correct(rollout),
            rollout.reward_error is not None,
            rollout.finish_reason == "length",
            zlib.crc32(array("q", rollout.response_ids)),
            rollout.num_sampled,
            *_episode_columns(rollout),
            rollout.reward_cached,
            rollout.policy_version,
            min(rollout.versions)[0],
            len(rollout.versions),
            *(rollout.reward_parts.get(name, math.nan) for name in reward_names),
            *kept_columns,
        ]
        for rollout, kept_columns in zip(own, kept, strict=True)
    ]
    columns = (
        *SampleTable.FACTS,
        *(f"reward/{name}" for name in reward_names),
        *(SampleTable.KEPT if with_kept_tokens else ()),
    )
    local = torch.from_numpy(np.array(rows, dtype=np.float64).reshape(len(rows), len(columns)))
    rewards = gather_turn_rewards(own, over or world_group()) if with_turn_rewards else None
    return SampleTable(columns, all_gather_ragged(local, over or world_group()), rewards)


def _episode_columns(rollout: Rollout) -> tuple[int, int, int, int]:
    """Returns the columns num_turns, tool_calls, failed_calls and end."""
    episode = rollout.episode
    if episode is None:
        return 1, 0, 0, -1
    return episode.num_turns, episode.num_tool_calls, episode.num_failed_calls, EPISODE_ENDS.index(episode.end)


def gather_failures(
    rollouts: Sequence[Rollout], table: SampleTable, groups: ProcessGroups, over: dist.ProcessGroup | None = None
) -> str:
    """Collective over `over`: returns a warning with the number and causes of scoring failures; "" without failures.

    Args:
        rollouts: Scored samples on the first rank of each replica; ignored on other ranks.
        table: Table of all these samples.
        groups: Process groups and coordinates of this rank.
        over: Process group as in `gather_table`.

    Raises:
        UserError: No sample has a score.
    """
    missing = len(table) - len(table.scored)
    if not (missing or table["failed"].any()):
        return ""
    errors = [
        rollout.reward_error for rollout in (rollouts if groups.is_replica_leader else ()) if rollout.reward_error
    ]
    own = _to_bytes(errors[:NAMED])
    lines = bytes(all_gather_ragged(own, over or world_group()).tolist()).splitlines()
    named = [json.loads(line) for line in lines[:NAMED]] or ["all reward functions returned None for them"]
    if missing == len(table):
        raise UserError(f"none of the {missing} samples has a score: {named[0]}")
    failed = int(table["failed"].sum())
    why = " | ".join([*named, *([f"and {failed - NAMED} more"] if failed > NAMED else [])])
    return f"scoring failed for {failed} of {len(table)} samples; {missing} have no score and are left out: {why}"


def _to_bytes(values: Sequence[object]) -> Tensor:
    """Encodes JSON-serializable values, one line each, as a uint8 tensor."""
    lines = "".join(json.dumps(value) + "\n" for value in values).encode()
    return torch.frombuffer(bytearray(lines), dtype=torch.uint8) if lines else torch.empty(0, dtype=torch.uint8)


def _kept_columns(rollout: Rollout) -> list[float]:
    """Returns the columns `SampleTable.KEPT`."""
    support, length = rollout.kept_tokens, len(rollout.response_ids)
    if support is None or not support.counts_R.numel() == len(rollout.log_kept_mass) == length:
        came = None if support is None else (support.counts_R.numel(), len(rollout.log_kept_mass))
        raise RuntimeError(
            f"The engine returned kept token ids and masses for {came} response tokens of sample "
            f"{rollout.sample_index} of prompt {rollout.prompt.source or rollout.prompt.uid}, expected {length} of "
            "each. This is a bug in the engine; please report it."
        )
    counts = support.counts_R.tolist()
    mass = [math.exp(value) for value, count in zip(rollout.log_kept_mass, counts, strict=True) if count]
    return [support.ids_K.numel(), max(counts), sum(mass), min(mass)]


def gather_reward_facts(
    rollouts: Sequence[Rollout], groups: ProcessGroups
) -> dict[tuple[int, int], dict[str, float | str]]:
    """Collective over the job: returns the non-empty `reward_facts` of all samples, by (uid, sample index)."""
    own = [
        [rollout.prompt.uid, rollout.sample_index, rollout.reward_facts]
        for rollout in (rollouts if groups.is_replica_leader else ())
        if rollout.reward_facts
    ]
    gathered = all_gather_ragged(_to_bytes(own), world_group())
    rows = (json.loads(line) for line in bytes(gathered.tolist()).splitlines())
    return {(uid, sample): facts for uid, sample, facts in rows}


def to_outcomes(table: SampleTable, reward_weights: Mapping[str, float]) -> Outcomes:
    """Returns the table as algorithms see it; `reward_weights` has the weight of each reward function by its name."""
    return Outcomes(
        rewards_N=table["reward"],
        group_id_N=table["uid"].long(),
        response_lens_N=table["response_len"].long(),
        truncated_N=table["truncated"].bool(),
        parts={name: table[f"reward/{name}"] for name in reward_weights},
        part_weights=reward_weights,
        sampled_lens_N=table["sampled_len"].long(),
    )

"""What every rank knows of all samples: a few numbers each, and what reward functions said besides.

Owns the table of a step (`gather_table`) and what algorithms see of it. No rank ever holds all tokens; `dispatch.py`
moves them.
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

from mrl.algorithms.base import Outcomes
from mrl.distributed.collectives import all_gather_ragged, everyone, together
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.observability.metrics import is_correct
from mrl.rollout.turn_credit import gather_turn_rewards
from mrl.types import EPISODE_ENDS, Rollout, SampleTable

NAMED = 8
"""Failed samples that are told one by one."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


def gather_table(
    rollouts: Sequence[Rollout],
    groups: ProcessGroups,
    reward_names: Sequence[str],
    *,
    supports: bool = False,
    turns: bool = False,
    over: dist.ProcessGroup | None = None,
) -> SampleTable:
    """Collective over `over`: the facts of all samples; the first rank of each replica speaks for it.

    Args:
        rollouts: Scored, on the first rank of each replica; ignored on the others.
        groups: Who sits where.
        reward_names: Keys of `Rollout.reward_parts`, in the config's order.
        supports: Whether rollouts have a support: the columns `SampleTable.KEPT` are there too.
        turns: Whether they are episodes whose turns are credited: `turn_rewards` are there too.
        over: Who hears of them, the ranks that sample at least; None: the job.

    Raises:
        RuntimeError: A rollout has no support, or not one for each of its tokens.
    """
    speaks_for = rollouts if groups.leads_replica else ()
    kept: list[list[float]] = [[] for _ in speaks_for]
    if supports:
        with together(over):
            kept = [_kept(rollout) for rollout in speaks_for]
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
            *_of_episode(rollout),
            rollout.reward_cached,
            rollout.policy_version,
            min(rollout.versions)[0],
            len(rollout.versions),
            *(rollout.reward_parts.get(name, math.nan) for name in reward_names),
            *own,
        ]
        for rollout, own in zip(speaks_for, kept, strict=True)
    ]
    columns = (
        *SampleTable.FACTS,
        *(f"reward/{name}" for name in reward_names),
        *(SampleTable.KEPT if supports else ()),
    )
    local = torch.from_numpy(np.array(rows, dtype=np.float64).reshape(len(rows), len(columns)))
    rewards = gather_turn_rewards(speaks_for, over or everyone()) if turns else None
    return SampleTable(columns, all_gather_ragged(local, over or everyone()), rewards)


def _of_episode(rollout: Rollout) -> tuple[int, int, int, int]:
    """Columns num_turns, tool_calls, failed_calls and end of the table."""
    episode = rollout.episode
    if episode is None:
        return 1, 0, 0, -1
    return episode.num_turns, episode.num_tool_calls, episode.num_failed_calls, EPISODE_ENDS.index(episode.end)


def gather_failures(
    rollouts: Sequence[Rollout], table: SampleTable, groups: ProcessGroups, over: dist.ProcessGroup | None = None
) -> str:
    """Collective over `over`: how many samples could not be scored, and why the first of them could not; "" for none.

    Args:
        rollouts: Scored, on the first rank of each replica; ignored on the others.
        table: Of all of them.
        groups: Who sits where.
        over: As of `gather_table`.

    Raises:
        UserError: No sample has a score, so that there is nothing to train on or to report.
    """
    missing = len(table) - len(table.scored)
    if not (missing or table["failed"].any()):
        return ""
    mine = [rollout.reward_error for rollout in (rollouts if groups.leads_replica else ()) if rollout.reward_error]
    said = b"".join(json.dumps(error).encode() + b"\n" for error in mine[:NAMED])
    own = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else _NOTHING
    lines = bytes(all_gather_ragged(own, over or everyone()).tolist()).splitlines()
    named = [json.loads(line) for line in lines[:NAMED]] or ["no reward function has an opinion on them"]
    if missing == len(table):
        raise UserError(f"none of the {missing} samples has a score: {named[0]}")
    failed = int(table["failed"].sum())
    why = " | ".join([*named, *([f"and {failed - NAMED} more"] if failed > NAMED else [])])
    return f"{failed} of {len(table)} samples could not be scored, {missing} have no score and are left out: {why}"


def _kept(rollout: Rollout) -> list[float]:
    """Its `SampleTable.KEPT`."""
    support, length = rollout.support, len(rollout.response_ids)
    if support is None or not support.counts_R.numel() == len(rollout.log_kept_mass) == length:
        came = None if support is None else (support.counts_R.numel(), len(rollout.log_kept_mass))
        raise RuntimeError(
            f"sample {rollout.sample_index} of prompt {rollout.prompt.source or rollout.prompt.uid} came with kept "
            f"tokens and masses of {came} response tokens, expected {length}: the engine did not keep them"
        )
    counts = support.counts_R.tolist()
    mass = [math.exp(value) for value, count in zip(rollout.log_kept_mass, counts, strict=True) if count]
    return [support.ids_K.numel(), max(counts), sum(mass), min(mass)]


def gather_facts(rollouts: Sequence[Rollout], groups: ProcessGroups) -> dict[tuple[int, int], dict[str, float | str]]:
    """Collective over the job: (uid, sample index) of each sample -> its `reward_facts`, where there are any."""
    mine = [
        [rollout.prompt.uid, rollout.sample_index, rollout.reward_facts]
        for rollout in (rollouts if groups.leads_replica else ())
        if rollout.reward_facts
    ]
    lines = "".join(json.dumps(row) + "\n" for row in mine).encode()
    own = torch.frombuffer(bytearray(lines), dtype=torch.uint8) if lines else _NOTHING
    gathered = all_gather_ragged(own, everyone())
    rows = (json.loads(line) for line in bytes(gathered.tolist()).splitlines())
    return {(uid, sample): facts for uid, sample, facts in rows}


def outcomes(table: SampleTable, reward_weights: Mapping[str, float]) -> Outcomes:
    """What algorithms see of the table; `reward_weights` by the names of its "reward/" columns."""
    return Outcomes(
        rewards_N=table["reward"],
        group_id_N=table["uid"].long(),
        response_lens_N=table["response_len"].long(),
        truncated_N=table["truncated"].bool(),
        parts={name: table[f"reward/{name}"] for name in reward_weights},
        part_weights=reward_weights,
    )

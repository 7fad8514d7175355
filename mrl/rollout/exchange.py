"""How samples travel: from the replicas that sampled them to the data-parallel ranks that train on them.

Owns the cut of a step's samples into minibatches, their balance over the data-parallel ranks, and the ragged all-to-all
that moves them (`pack`). Nothing depends on which replica sampled: minibatches are cut from the order (prompt uid,
sample index).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.data.packing import balance
from mrl.distributed.collectives import all_to_all_ragged, together
from mrl.distributed.groups import ProcessGroups
from mrl.types import Rollout, RolloutBatch, SampleTable

Rows = list[list[list[int]]]
"""Rows of the table by [minibatch][data-parallel index]."""


@dataclass
class StepBatch:
    """A step's samples on the rank that trains on them.

    Attributes:
        batch: This data-parallel index's sequences; all tp and pp ranks of the index hold the same.
        minibatches: Rows of `batch` for each optimizer step; a minibatch may be empty here.
        index_B: Where each row stands in the step's table, int64.
    """

    batch: RolloutBatch
    minibatches: list[list[int]]
    index_B: Tensor


def pack(
    rollouts: Sequence[Rollout],
    table: SampleTable,
    groups: ProcessGroups,
    minibatch_size: int,
    *,
    routing: tuple[int, int] | None = None,
) -> StepBatch:
    """Collective over the job: moves every sample of `table` to the ranks that train on it.

    Minibatches are `minibatch_size` prompts in uid order, so that they hold the same samples at any layout; inside one,
    sequences are spread over the data-parallel ranks so that each gets about as many tokens.

    Args:
        rollouts: This replica's samples; those not in the table are dropped.
        table: All samples to train on.
        groups: Who sits where.
        minibatch_size: Prompts per optimizer step.
        routing: (layers, experts of a token) where the rollouts have `routed_experts`, the same on every rank.

    Raises:
        RuntimeError: `routing` is given and a rollout has no such record.
    """
    prompt_lens, response_lens = table["prompt_len"].long(), table["response_len"].long()
    seq_lens = prompt_lens + response_lens
    rows = _rows_of_ranks(table, seq_lens.tolist(), groups.grid.dp, minibatch_size)
    route = _Route(rollouts, table, groups, rows)
    tokens_P = route.carry([_tokens(parts) for parts in route.sent], seq_lens.tolist())
    logprobs_R = route.carry([_logprobs(parts) for parts in route.sent], response_lens.tolist())
    routed_P = None
    if routing is not None:
        with together():
            records = [_records(parts, routing) for parts in route.sent]
        width = 2 * math.prod(routing)
        routed_P = route.carry(records, (width * seq_lens).tolist()).view(torch.int16).view(-1, *routing)

    index_B = torch.tensor(route.mine, dtype=torch.int64)
    batch = RolloutBatch(
        tokens_P=tokens_P,
        prompt_lens_B=prompt_lens[index_B],
        response_lens_B=response_lens[index_B],
        response_mask_R=torch.ones(logprobs_R.numel(), dtype=torch.bool),
        rollout_logprobs_R=logprobs_R,
        group_id_B=table["uid"].long()[index_B],
        rewards_B=table["reward"][index_B].float(),
        truncated_B=table["truncated"].bool()[index_B],
        routed_experts_P=routed_P,
    )
    return StepBatch(batch, _local_rows(rows, groups.coords.dp), index_B)


class _Route:
    """Which sample goes from which rank to which: the same for each of its fields.

    Attributes:
        mine: Rows of the table that this rank trains on, in the order of its minibatches.
        sent: By rank, the rollouts that this rank sends it, in that rank's order.
    """

    def __init__(self, rollouts: Sequence[Rollout], table: SampleTable, groups: ProcessGroups, rows: Rows) -> None:
        grid = groups.grid
        keys = list(zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True))
        held = {(rollout.prompt.uid, rollout.sample_index): rollout for rollout in rollouts if groups.leads_replica}
        wanted = [[row for minibatch in rows for row in minibatch[dp]] for dp in range(grid.dp)]
        self.mine = wanted[groups.coords.dp]
        self.sent = [
            [held[keys[row]] for row in wanted[grid.coords(rank).dp] if keys[row] in held]
            for rank in range(grid.world_size)
        ]
        self._senders = table["rank"].long()[self.mine].tolist()
        # stable: from each sender in the order of `mine`
        self._arrival = sorted(range(len(self.mine)), key=self._senders.__getitem__)

    def carry(self, parts: list[Tensor], lens: Sequence[int]) -> Tensor:
        """Collective over the job: one field of this rank's samples, one after the other, in the order of `mine`.

        Args:
            parts: By rank, the field of what is sent to it, one-dimensional.
            lens: Elements of the field, by row of the table.
        """
        arriving = [(self._senders[i], lens[self.mine[i]]) for i in self._arrival]
        counts = [0] * len(parts)
        for sender, length in arriving:
            counts[sender] += length
        arrived = torch.split(all_to_all_ragged(parts, counts), [length for _, length in arriving])
        place = {i: position for position, i in enumerate(self._arrival)}
        return _concatenate([arrived[place[i]] for i in range(len(self.mine))], parts[0].dtype)


def _rows_of_ranks(table: SampleTable, seq_lens: Sequence[int], dp: int, minibatch_size: int) -> Rows:
    """Minibatches in the order of the prompts, each balanced over the data-parallel ranks; rows ascend."""
    of_row = table["uid"].long().tolist()
    uids = sorted(set(of_row))
    minibatch_of = {uid: i // minibatch_size for i, uid in enumerate(uids)}
    members: list[list[int]] = [[] for _ in range(-(-len(uids) // minibatch_size))]
    for row, uid in enumerate(of_row):
        members[minibatch_of[uid]].append(row)
    return [
        [sorted(rows[i] for i in part) for part in balance([seq_lens[row] for row in rows], dp)] for rows in members
    ]


def _local_rows(all_rows: Rows, dp: int) -> list[list[int]]:
    """Rows of the local batch that make up each minibatch: the batch is their concatenation."""
    local: list[list[int]] = []
    start = 0
    for minibatch in all_rows:
        local.append(list(range(start, start + len(minibatch[dp]))))
        start += len(minibatch[dp])
    return local


def _tokens(rollouts: Sequence[Rollout]) -> Tensor:
    ids = [i for rollout in rollouts for i in (*rollout.prompt.prompt_ids, *rollout.response_ids)]
    return torch.tensor(ids, dtype=torch.int64)


def _logprobs(rollouts: Sequence[Rollout]) -> Tensor:
    return torch.tensor([x for rollout in rollouts for x in rollout.rollout_logprobs], dtype=torch.float32)


def _records(rollouts: Sequence[Rollout], routing: tuple[int, int]) -> Tensor:
    return _concatenate([_routed_bytes(rollout, routing) for rollout in rollouts], torch.uint8)


def _routed_bytes(rollout: Rollout, routing: tuple[int, int]) -> Tensor:
    """A rollout's record as bytes, since gloo sends no int16."""
    routed = rollout.routed_experts
    if routed is None or routed.shape != (rollout.num_tokens, *routing):
        shape = None if routed is None else list(routed.shape)
        raise RuntimeError(
            f"sample {rollout.sample_index} of prompt {rollout.prompt.source or rollout.prompt.uid} came with routed "
            f"experts {shape}, expected {[rollout.num_tokens, *routing]}: the engine did not keep them"
        )
    return routed.to(torch.int16).contiguous().view(torch.uint8).flatten()


def _concatenate(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

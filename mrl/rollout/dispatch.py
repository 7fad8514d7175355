"""How samples travel: from the replicas that sampled them to the data-parallel ranks that train on them.

Owns the cut of a step's samples into minibatches, their balance over the data-parallel ranks, and what of a sample goes
where (`pack`). Nothing depends on which replica sampled: minibatches are cut from the order (prompt uid, sample index).

A sample leaves its replica once: to the first rank of the data-parallel index that trains on it, which passes it on to
the ranks that work on the same sequences. Where the engine's choices of experts travel too, each pipeline stage is sent
those of its own layers; the ids that truncation kept go to the last stage, which alone scores. Ranks that only sample
send and get nothing.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.data.packing import balance_families
from mrl.distributed.collectives import together
from mrl.distributed.groups import ProcessGroups
from mrl.parallel_layout import Coords
from mrl.rollout.all_to_all import Message, move
from mrl.types import Rollout, RolloutBatch, SampleTable, Support

Rows = list[list[list[int]]]
"""Rows of the table by [minibatch][data-parallel index]."""

WIRE_BYTES = 4
"""Of a token id, of a log-probability, and of a count."""


@dataclass(frozen=True)
class RoutingRecord:
    """What the engine keeps of its choices of experts, and which part of it a pipeline stage trains with.

    Attributes:
        num_layers: Of the model.
        top_k: Experts of a token.
        dtype: The smallest integer type that holds an expert's index and -1.
        layers: By pipeline stage, the layers that it holds.
    """

    num_layers: int
    top_k: int
    dtype: torch.dtype
    layers: Sequence[Sequence[int]]


@dataclass
class StepBatch:
    """A step's samples on the rank that trains on them.

    Attributes:
        batch: This data-parallel index's sequences; all tp and pp ranks of the index hold the same, but for
            `routed_experts_P`, which has the layers of the rank's stage, and `support_R`, which the last stage has.
        minibatches: Rows of `batch` for each optimizer step; a minibatch may be empty here. A rank that does not train
            has none.
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
    shares: bool,
    routing: RoutingRecord | None = None,
    only_newest: bool = False,
) -> StepBatch:
    """Collective over the job: moves every sample of `table` to the ranks that train on it.

    Minibatches are `minibatch_size` prompts in uid order, so that they hold the same samples at any layout; inside one,
    samples are spread over the data-parallel ranks so that each computes about as many tokens.

    Args:
        rollouts: This replica's samples; those not in the table are dropped.
        table: All samples to train on; their supports travel where it has the columns `SampleTable.KEPT`.
        groups: Who sits where.
        minibatch_size: Prompts per optimizer step.
        shares: A rank computes the prompt of its samples once (`actor.use_prefix_grouper`).
        routing: Where the rollouts have `routed_experts`, the same on every rank.
        only_newest: Tokens that older weights than a response's last ones sampled are not trained.

    Raises:
        RuntimeError: `routing` is given and a rollout has no such record.
    """
    prompt_lens, response_lens = table["prompt_len"].long(), table["response_len"].long()
    rows = _rows_of_ranks(table, groups.grid.dp, minibatch_size, shares=shares)
    travel = _Travel(rollouts, table, groups, rows, only_newest=only_newest)
    tokens_P, logprobs_R = travel.tokens_and_logprobs()
    index_B = torch.tensor(travel.mine, dtype=torch.int64)
    sampled_R = _take_off_marks(tokens_P, prompt_lens[index_B], response_lens[index_B])
    batch = RolloutBatch(
        tokens_P=tokens_P,
        prompt_lens_B=prompt_lens[index_B],
        response_lens_B=response_lens[index_B],
        response_mask_R=sampled_R,
        rollout_logprobs_R=logprobs_R,
        group_id_B=table["uid"].long()[index_B],
        rewards_B=table["reward"][index_B].float(),
        truncated_B=table["truncated"].bool()[index_B],
        sample_index_B=table["sample_index"].long()[index_B],
        correct_B=table["correct"].bool()[index_B],
        routed_experts_P=None if routing is None else travel.routed_experts(routing),
        support_R=travel.support(table["kept_ids"].long().tolist()) if "kept_ids" in table.columns else None,
    )
    minibatches = _local_rows(rows, groups.coords.dp) if groups.trains else []
    return StepBatch(batch, minibatches, index_B)


class _Travel:
    """Which sample goes from which rank to which: the same for each of its fields.

    Attributes:
        mine: Rows of the table that this rank trains on, in the order of its minibatches.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        table: SampleTable,
        groups: ProcessGroups,
        rows: Rows,
        *,
        only_newest: bool = False,
    ) -> None:
        self._groups, self._only_newest = groups, only_newest
        self._wanted = [[row for minibatch in rows for row in minibatch[dp]] for dp in range(groups.grid.dp)]
        self.mine = self._wanted[groups.coords.dp] if groups.trains else []
        self._senders = table["rank"].long().tolist()
        self._responses = table["response_len"].long().tolist()
        self._lens = (table["prompt_len"] + table["response_len"]).long().tolist()
        keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
        row_of = {key: row for row, key in enumerate(keys)}
        found = ((row_of.get((one.prompt.uid, one.sample_index)), one) for one in rollouts if groups.leads_replica)
        self._held = {row: rollout for row, rollout in found if row is not None}

    def tokens_and_logprobs(self) -> tuple[Tensor, Tensor]:
        """Collective over the job: tokens_P, observed ones marked, and rollout_logprobs_R of the rows in `mine`."""
        tokens_at, logprobs_at = self._places(self._lens), self._places(self._responses)
        tokens_P = torch.empty(sum(self._lens[row] for row in self.mine), dtype=torch.int64)
        logprobs_R = torch.empty(sum(self._responses[row] for row in self.mine), dtype=torch.float32)

        tokens, logprobs = tokens_P.numpy(), logprobs_R.numpy()  # a sample is too little for a call of PyTorch's

        def write(row: int, part: Tensor) -> None:
            numbers, length = part.numpy().view(np.int32), self._lens[row]
            numbers[:length] = self._ids(row)
            numbers[length:].view(np.float32)[:] = self._held[row].rollout_logprobs

        def read(row: int, part: Tensor) -> None:
            numbers, length = part.numpy().view(np.int32), self._lens[row]
            tokens[tokens_at[row]] = numbers[:length]
            logprobs[logprobs_at[row]] = numbers[length:].view(np.float32)

        sizes = [WIRE_BYTES * (length + response) for length, response in zip(self._lens, self._responses, strict=True)]
        first_ranks = [self._groups.grid.rank(Coords(tp=0, cp=0, dp=dp, pp=0)) for dp in range(len(self._wanted))]
        messages = [
            Message(row, self._senders[row], receiver, sizes[row])
            for receiver, wanted in zip(first_ranks, self._wanted, strict=True)
            for row in wanted
            if self._senders[row] != receiver
        ]
        move(messages, self._groups.rank, write, read)
        own = self.mine if self._groups.trains and self._groups.rank == first_ranks[self._groups.coords.dp] else []
        for row in own:
            if self._senders[row] == self._groups.rank:
                tokens[tokens_at[row]] = self._ids(row)
                logprobs[logprobs_at[row]] = self._held[row].rollout_logprobs
        for tensor in (tokens_P, logprobs_R):
            self._pass_on(tensor, over_stages=True)
        return tokens_P, logprobs_R

    def _ids(self, row: int) -> array[int]:
        """Prompt and response of a sample that is here, as they travel."""
        rollout = self._held[row]
        ids = array("i", rollout.prompt.prompt_ids)
        ids.extend(_marked(rollout, only_newest=self._only_newest))
        return ids

    def support(self, sizes: Sequence[int]) -> Support | None:
        """Collective over the job: support_R of the rows in `mine`, on the last pipeline stage.

        Args:
            sizes: Kept ids of each row of the table.
        """
        last = self._groups.grid.pp - 1
        on_last = self._groups.trains and self._groups.coords.pp == last
        counts_at, ids_at = self._places(self._responses), self._places(sizes)
        mine = self.mine if on_last else []
        counts_R = torch.empty(sum(self._responses[row] for row in mine), dtype=torch.int32)
        ids_K = torch.empty(sum(sizes[row] for row in mine), dtype=torch.int32)

        def write(row: int, part: Tensor) -> None:
            kept = self._held[row].support
            if kept is not None:  # as the table said
                torch.cat([kept.counts_R, kept.ids_K], out=part.view(torch.int32))

        def read(row: int, part: Tensor) -> None:
            numbers = part.view(torch.int32)
            counts_R[counts_at[row]] = numbers[: self._responses[row]]
            ids_K[ids_at[row]] = numbers[self._responses[row] :]

        messages = [
            Message(
                row,
                self._senders[row],
                self._groups.grid.rank(Coords(tp=0, cp=0, dp=dp, pp=last)),
                WIRE_BYTES * (self._responses[row] + sizes[row]),
            )
            for dp, wanted in enumerate(self._wanted)
            for row in wanted
        ]
        move(messages, self._groups.rank, write, read)
        for tensor in (counts_R, ids_K):
            self._pass_on(tensor, over_stages=False)
        return Support(ids_K, counts_R) if on_last else None

    def routed_experts(self, routing: RoutingRecord) -> Tensor:
        """Collective over the job: routed_experts_P of the rows in `mine`, of this stage's layers.

        Raises:
            RuntimeError: A rollout has no such record.
        """
        with together():
            records = {row: _record(rollout, routing) for row, rollout in self._held.items()}
        places = self._places(self._lens)
        layers = routing.layers[self._groups.coords.pp] if self._groups.trains else ()
        count = sum(self._lens[row] for row in self.mine)
        routed_P = torch.empty(count, len(layers), routing.top_k, dtype=routing.dtype)
        stages = len(routing.layers)

        def write(item: int, part: Tensor) -> None:
            row, stage = divmod(item, stages)
            wanted = routing.layers[stage]
            shape = (self._lens[row], len(wanted), routing.top_k)
            numbers = part.view(routing.dtype)[: math.prod(shape)].view(shape)
            for begin, end in _runs(wanted):
                numbers[:, begin:end] = records[row][:, wanted[begin] : wanted[begin] + end - begin]

        def read(item: int, part: Tensor) -> None:
            place = routed_P[places[item // stages]]
            place.copy_(part.view(routing.dtype)[: place.numel()].view(place.shape))

        messages = [
            Message(
                row * stages + stage,
                self._senders[row],
                self._groups.grid.rank(Coords(tp=0, cp=0, dp=dp, pp=stage)),
                _padded(self._lens[row] * len(held) * routing.top_k * routing.dtype.itemsize),
            )
            for dp, wanted in enumerate(self._wanted)
            for row in wanted
            for stage, held in enumerate(routing.layers)
        ]
        move(messages, self._groups.rank, write, read)
        self._pass_on(routed_P.view(torch.uint8), over_stages=False)  # gloo sends no int16
        return routed_P

    def _places(self, lens: Sequence[int]) -> dict[int, slice]:
        """Where a field of each row of `mine` lies among all of them, from its length by row of the table."""
        ends = itertools.accumulate(lens[row] for row in self.mine)
        return {row: slice(end - lens[row], end) for row, end in zip(self.mine, ends, strict=True)}

    def _pass_on(self, tensor: Tensor, *, over_stages: bool) -> None:
        """Collective over the data-parallel index: all its ranks get what its first one has, or each stage's first."""
        groups = self._groups
        if not groups.trains:
            return
        coords = groups.coords
        steps = [(groups.cp, replace(coords, cp=0), coords.tp == 0), (groups.tp, replace(coords, tp=0), True)]
        if over_stages:
            steps.insert(0, (groups.pp, replace(coords, pp=0), coords.tp == coords.cp == 0))
        for group, first, takes_part in steps:
            if takes_part and group.size() > 1 and tensor.numel():
                dist.broadcast(tensor, src=groups.grid.rank(first), group=group)


def _marked(rollout: Rollout, *, only_newest: bool) -> Sequence[int]:
    """Response ids as they travel: one that is not trained as its bitwise complement, which is negative."""
    ids, mask = rollout.response_ids, rollout.sampled_mask
    if only_newest and len(rollout.versions) > 1:
        old = len(ids) - rollout.versions[-1][1]
        mask = [place >= old and (mask is None or mask[place]) for place in range(len(ids))]
    return ids if mask is None else [token if own else ~token for token, own in zip(ids, mask, strict=True)]


def _take_off_marks(tokens_P: Tensor, prompt_lens_B: Tensor, response_lens_B: Tensor) -> Tensor:
    """Makes all ids of travelled rows what they are, in place; True for each response token that was sampled."""
    sampled_P = tokens_P >= 0
    tokens_P ^= tokens_P >> 63  # all bits of a negative number are turned
    lens = torch.stack([prompt_lens_B, response_lens_B], dim=1).flatten()
    is_response_P = (torch.arange(len(lens)) % 2 == 1).repeat_interleave(lens)
    return sampled_P[is_response_P]


def _rows_of_ranks(table: SampleTable, dp: int, minibatch_size: int, *, shares: bool) -> Rows:
    """Minibatches in the order of the prompts, each balanced over the data-parallel ranks; rows ascend."""
    families: dict[int, list[int]] = {}
    for row, uid in enumerate(table["uid"].long().tolist()):
        families.setdefault(uid, []).append(row)
    lens = table["prompt_len"].long().tolist(), table["response_len"].long().tolist()
    uids = sorted(families)
    minibatches = []
    for first in range(0, len(uids), minibatch_size):
        members = [families[uid] for uid in uids[first : first + minibatch_size]]
        if not shares:
            members = [[row] for row in sorted(row for family in members for row in family)]
        minibatches.append(balance_families(members, *lens, dp))
    return minibatches


def _local_rows(all_rows: Rows, dp: int) -> list[list[int]]:
    """Rows of the local batch that make up each minibatch: the batch is their concatenation."""
    local: list[list[int]] = []
    start = 0
    for minibatch in all_rows:
        local.append(list(range(start, start + len(minibatch[dp]))))
        start += len(minibatch[dp])
    return local


def _record(rollout: Rollout, routing: RoutingRecord) -> Tensor:
    routed, wanted = rollout.routed_experts, (rollout.num_tokens, routing.num_layers, routing.top_k)
    if routed is None or routed.shape != wanted:
        shape = None if routed is None else list(routed.shape)
        raise RuntimeError(
            f"sample {rollout.sample_index} of prompt {rollout.prompt.source or rollout.prompt.uid} came with routed "
            f"experts {shape}, expected {list(wanted)}: the engine did not keep them"
        )
    return routed


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of the list in which every number is one more than the last."""
    ends = [i for i in range(1, len(layers) + 1) if i == len(layers) or layers[i] != layers[i - 1] + 1]
    return zip([0, *ends], ends, strict=False)


def _padded(num_bytes: int) -> int:
    """Up to what the next message can begin at."""
    return -(-num_bytes // WIRE_BYTES) * WIRE_BYTES

"""Dispatch of a step's samples from the rollout replicas to the data-parallel ranks that train on them.

`dispatch_samples` splits the samples into minibatches in the order (prompt uid, sample index), so the split does not
depend on which replica sampled what, and balances each minibatch over the data-parallel ranks.

A sample is sent once, to the first rank of its data-parallel index, which broadcasts it to the other ranks of that
index (tp, cp, pp). Routing records are sent to each pipeline stage for its own layers only; kept token ids are sent to
the last stage only, which computes log-probabilities. Ranks that only sample receive nothing.
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
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups
from mrl.parallel_layout import Coords
from mrl.rollout.all_to_all import RankMessage, send_messages
from mrl.types import Rollout, RolloutBatch, SampleTable, SamplingMask

Rows = list[list[list[int]]]
"""Row numbers of the sample table, by [minibatch][data-parallel index]."""

WIRE_BYTES = 4
"""Bytes of a token id, a log-probability or a count in a message."""


@dataclass(frozen=True)
class StageRoutingFormat:
    """Format of the routing records for router replay, and their split over pipeline stages.

    Attributes:
        num_layers: Layers of the model with experts.
        top_k: Experts for each token.
        dtype: Smallest integer type for expert indices and -1.
        layers: Numbers of these layers in each pipeline stage, counted from 0 over the layers with experts.
    """

    num_layers: int
    top_k: int
    dtype: torch.dtype
    layers: Sequence[Sequence[int]]


@dataclass
class StepBatch:
    """Samples of a step on a rank that trains on them.

    Attributes:
        batch: Sequences of this data-parallel index, equal on all its ranks except for `routed_experts_P` (layers of
            the rank's pipeline stage) and `kept_tokens_R` (last stage only).
        minibatches: Rows of `batch` for each optimizer step; a minibatch may be empty on this rank. Empty list on ranks
            that do not train.
        index_B: Row of the step's sample table for each sequence, int64.
    """

    batch: RolloutBatch
    minibatches: list[list[int]]
    index_B: Tensor


def dispatch_samples(
    rollouts: Sequence[Rollout],
    table: SampleTable,
    groups: ProcessGroups,
    minibatch_size: int,
    *,
    keep_groups: bool,
    routing: StageRoutingFormat | None = None,
    mask_offpolicy: bool = False,
) -> StepBatch:
    """Collective over the job: sends every sample of `table` to the ranks that train on it.

    A minibatch has `minibatch_size` prompts in uid order, so it contains the same samples at any parallel layout.
    Within a minibatch, samples are spread so that each data-parallel rank computes about the same number of tokens.

    Args:
        rollouts: Samples of this replica; those not in the table are dropped.
        table: Table of all samples to train on. With the columns `SampleTable.KEPT`, kept token ids are sent too.
        groups: Process groups and coordinates of this rank.
        minibatch_size: Prompts per optimizer step.
        keep_groups: True to keep the samples of a prompt on one rank, which computes the prompt once
            (`actor.use_prefix_grouper`).
        routing: Format of `Rollout.routed_experts`, equal on every rank; None without router replay.
        mask_offpolicy: True to exclude tokens of a partial rollout that older weights sampled from training
            (`rollout.mask_offpolicy`).

    Raises:
        RuntimeError: `routing` is given and a rollout has no routing record.
    """
    prompt_lens, response_lens = table["prompt_len"].long(), table["response_len"].long()
    rows = _split_into_minibatches(table, groups.grid.dp, minibatch_size, keep_groups=keep_groups)
    dispatch = _Dispatch(rollouts, table, groups, rows, mask_offpolicy=mask_offpolicy)
    tokens_P, logprobs_R = dispatch.tokens_and_logprobs()
    index_B = torch.tensor(dispatch.own_rows, dtype=torch.int64)
    trained_R = _decode_trained(tokens_P, prompt_lens[index_B], response_lens[index_B])
    batch = RolloutBatch(
        tokens_P=tokens_P,
        prompt_lens_B=prompt_lens[index_B],
        response_lens_B=response_lens[index_B],
        response_mask_R=trained_R,
        rollout_logprobs_R=logprobs_R,
        group_id_B=table["uid"].long()[index_B],
        rewards_B=table["reward"][index_B].float(),
        truncated_B=table["truncated"].bool()[index_B],
        sample_index_B=table["sample_index"].long()[index_B],
        correct_B=table["correct"].bool()[index_B],
        routed_experts_P=None if routing is None else dispatch.routed_experts(routing),
        kept_tokens_R=dispatch.kept_tokens(table["kept_ids"].long().tolist()) if "kept_ids" in table.columns else None,
    )
    minibatches = _local_rows(rows, groups.coords.dp) if groups.is_trainer else []
    return StepBatch(batch, minibatches, index_B)


class _Dispatch:
    """Sender and receiver of every sample, and one method for each field that is sent.

    Attributes:
        own_rows: Rows of the table that this rank trains on, in the order of its minibatches.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        table: SampleTable,
        groups: ProcessGroups,
        rows: Rows,
        *,
        mask_offpolicy: bool = False,
    ) -> None:
        self._groups, self._mask_offpolicy = groups, mask_offpolicy
        self._wanted = [[row for minibatch in rows for row in minibatch[dp]] for dp in range(groups.grid.dp)]
        self.own_rows = self._wanted[groups.coords.dp] if groups.is_trainer else []
        self._senders = table["rank"].long().tolist()
        self._responses = table["response_len"].long().tolist()
        self._lens = (table["prompt_len"] + table["response_len"]).long().tolist()
        keys = zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), strict=True)
        row_of = {key: row for row, key in enumerate(keys)}
        found = ((row_of.get((one.prompt.uid, one.sample_index)), one) for one in rollouts if groups.is_replica_leader)
        self._local = {row: rollout for row, rollout in found if row is not None}

    def tokens_and_logprobs(self) -> tuple[Tensor, Tensor]:
        """Collective over the job: returns tokens_P and rollout_logprobs_R of `own_rows`.

        Ids of tokens that are not trained are bitwise complements, see `_encode_trained`.
        """
        tokens_at, logprobs_at = self._slices(self._lens), self._slices(self._responses)
        tokens_P = torch.empty(sum(self._lens[row] for row in self.own_rows), dtype=torch.int64)
        logprobs_R = torch.empty(sum(self._responses[row] for row in self.own_rows), dtype=torch.float32)

        tokens, logprobs = tokens_P.numpy(), logprobs_R.numpy()  # numpy has less overhead on short slices

        def write(row: int, part: Tensor) -> None:
            numbers, length = part.numpy().view(np.int32), self._lens[row]
            numbers[:length] = self._ids(row)
            numbers[length:].view(np.float32)[:] = self._local[row].rollout_logprobs

        def read(row: int, part: Tensor) -> None:
            numbers, length = part.numpy().view(np.int32), self._lens[row]
            tokens[tokens_at[row]] = numbers[:length]
            logprobs[logprobs_at[row]] = numbers[length:].view(np.float32)

        sizes = [WIRE_BYTES * (length + response) for length, response in zip(self._lens, self._responses, strict=True)]
        first_ranks = [self._groups.grid.rank(Coords(tp=0, cp=0, dp=dp, pp=0)) for dp in range(len(self._wanted))]
        messages = [
            RankMessage(row, self._senders[row], receiver, sizes[row])
            for receiver, wanted in zip(first_ranks, self._wanted, strict=True)
            for row in wanted
            if self._senders[row] != receiver
        ]
        send_messages(messages, self._groups.rank, write, read)
        receives = self._groups.is_trainer and self._groups.rank == first_ranks[self._groups.coords.dp]
        for row in self.own_rows if receives else []:
            if self._senders[row] == self._groups.rank:
                tokens[tokens_at[row]] = self._ids(row)
                logprobs[logprobs_at[row]] = self._local[row].rollout_logprobs
        for tensor in (tokens_P, logprobs_R):
            self._broadcast(tensor, over_stages=True)
        return tokens_P, logprobs_R

    def _ids(self, row: int) -> array[int]:
        """Returns the encoded prompt and response ids of a sample on this rank."""
        rollout = self._local[row]
        ids = array("i", rollout.prompt.prompt_ids)
        ids.extend(_encode_trained(rollout, mask_offpolicy=self._mask_offpolicy))
        return ids

    def kept_tokens(self, sizes: Sequence[int]) -> SamplingMask | None:
        """Collective over the job: returns kept_tokens_R of `own_rows` on the last pipeline stage, None elsewhere.

        Args:
            sizes: Number of kept ids of each row of the table.
        """
        last = self._groups.grid.pp - 1
        on_last = self._groups.is_trainer and self._groups.coords.pp == last
        counts_at, ids_at = self._slices(self._responses), self._slices(sizes)
        rows = self.own_rows if on_last else []
        counts_R = torch.empty(sum(self._responses[row] for row in rows), dtype=torch.int32)
        ids_K = torch.empty(sum(sizes[row] for row in rows), dtype=torch.int32)

        def write(row: int, part: Tensor) -> None:
            kept = self._local[row].kept_tokens
            if kept is not None:  # always true, `gather_table` has checked it
                torch.cat([kept.counts_R, kept.ids_K], out=part.view(torch.int32))

        def read(row: int, part: Tensor) -> None:
            numbers = part.view(torch.int32)
            counts_R[counts_at[row]] = numbers[: self._responses[row]]
            ids_K[ids_at[row]] = numbers[self._responses[row] :]

        messages = [
            RankMessage(
                row,
                self._senders[row],
                self._groups.grid.rank(Coords(tp=0, cp=0, dp=dp, pp=last)),
                WIRE_BYTES * (self._responses[row] + sizes[row]),
            )
            for dp, wanted in enumerate(self._wanted)
            for row in wanted
        ]
        send_messages(messages, self._groups.rank, write, read)
        for tensor in (counts_R, ids_K):
            self._broadcast(tensor, over_stages=False)
        return SamplingMask(ids_K, counts_R) if on_last else None

    def routed_experts(self, routing: StageRoutingFormat) -> Tensor:
        """Collective over the job: returns routed_experts_P of `own_rows` for the layers of this pipeline stage.

        Raises:
            RuntimeError: A rollout has no routing record.
        """
        with raise_on_all_ranks():
            records = {row: _record(rollout, routing) for row, rollout in self._local.items()}
        slices = self._slices(self._lens)
        layers = routing.layers[self._groups.coords.pp] if self._groups.is_trainer else ()
        count = sum(self._lens[row] for row in self.own_rows)
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
            target = routed_P[slices[item // stages]]
            target.copy_(part.view(routing.dtype)[: target.numel()].view(target.shape))

        messages = [
            RankMessage(
                row * stages + stage,
                self._senders[row],
                self._groups.grid.rank(Coords(tp=0, cp=0, dp=dp, pp=stage)),
                _padded(self._lens[row] * len(held) * routing.top_k * routing.dtype.itemsize),
            )
            for dp, wanted in enumerate(self._wanted)
            for row in wanted
            for stage, held in enumerate(routing.layers)
        ]
        send_messages(messages, self._groups.rank, write, read)
        self._broadcast(routed_P.view(torch.uint8), over_stages=False)  # gloo cannot send int16
        return routed_P

    def _slices(self, lens: Sequence[int]) -> dict[int, slice]:
        """Returns the slice of each of `own_rows` in a packed tensor; `lens` has the length of every table row."""
        ends = itertools.accumulate(lens[row] for row in self.own_rows)
        return {row: slice(end - lens[row], end) for row, end in zip(self.own_rows, ends, strict=True)}

    def _broadcast(self, tensor: Tensor, *, over_stages: bool) -> None:
        """Collective over the data-parallel index: broadcasts from its first rank, or from the first of each stage."""
        groups = self._groups
        if not groups.is_trainer:
            return
        coords = groups.coords
        steps = [(groups.cp, replace(coords, cp=0), coords.tp == 0), (groups.tp, replace(coords, tp=0), True)]
        if over_stages:
            steps.insert(0, (groups.pp, replace(coords, pp=0), coords.tp == coords.cp == 0))
        for group, first, takes_part in steps:
            if takes_part and group.size() > 1 and tensor.numel():
                dist.broadcast(tensor, src=groups.grid.rank(first), group=group)


def _encode_trained(rollout: Rollout, *, mask_offpolicy: bool) -> Sequence[int]:
    """Returns the response ids; an id that is not trained becomes its bitwise complement, which is negative."""
    ids, mask = rollout.response_ids, rollout.sampled_mask
    if mask_offpolicy and len(rollout.versions) > 1:
        num_old = len(ids) - rollout.versions[-1][1]
        mask = [i >= num_old and (mask is None or mask[i]) for i in range(len(ids))]
    return ids if mask is None else [token if trained else ~token for token, trained in zip(ids, mask, strict=True)]


def _decode_trained(tokens_P: Tensor, prompt_lens_B: Tensor, response_lens_B: Tensor) -> Tensor:
    """Restores ids of `_encode_trained` in place; returns which response tokens are trained, bool [R]."""
    trained_P = tokens_P >= 0
    tokens_P ^= tokens_P >> 63  # flips all bits of negative numbers
    lens = torch.stack([prompt_lens_B, response_lens_B], dim=1).flatten()
    is_response_P = (torch.arange(len(lens)) % 2 == 1).repeat_interleave(lens)
    return trained_P[is_response_P]


def _split_into_minibatches(table: SampleTable, dp: int, minibatch_size: int, *, keep_groups: bool) -> Rows:
    """Splits the rows into minibatches in prompt order, each balanced over the data-parallel ranks; rows ascend."""
    families: dict[int, list[int]] = {}
    for row, uid in enumerate(table["uid"].long().tolist()):
        families.setdefault(uid, []).append(row)
    lens = table["prompt_len"].long().tolist(), table["response_len"].long().tolist()
    uids = sorted(families)
    minibatches = []
    for first in range(0, len(uids), minibatch_size):
        members = [families[uid] for uid in uids[first : first + minibatch_size]]
        if not keep_groups:
            members = [[row] for row in sorted(row for family in members for row in family)]
        minibatches.append(balance_families(members, *lens, dp))
    return minibatches


def _local_rows(all_rows: Rows, dp: int) -> list[list[int]]:
    """Returns the rows of the local batch in each minibatch; the batch is the concatenation of its minibatches."""
    local: list[list[int]] = []
    start = 0
    for minibatch in all_rows:
        local.append(list(range(start, start + len(minibatch[dp]))))
        start += len(minibatch[dp])
    return local


def _record(rollout: Rollout, routing: StageRoutingFormat) -> Tensor:
    routed, wanted = rollout.routed_experts, (rollout.num_tokens, routing.num_layers, routing.top_k)
    if routed is None or routed.shape != wanted:
        shape = None if routed is None else list(routed.shape)
        raise RuntimeError(
            f"The engine returned a routing record of shape {shape} for sample {rollout.sample_index} of prompt "
            f"{rollout.prompt.source or rollout.prompt.uid}, expected {list(wanted)}. This is a bug in the engine; "
            "please report it, or set rollout.enable_rollout_routing_replay=false."
        )
    return routed


def _runs(layers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each part of the list that has consecutive numbers."""
    ends = [i for i in range(1, len(layers) + 1) if i == len(layers) or layers[i] != layers[i - 1] + 1]
    return zip([0, *ends], ends, strict=False)


def _padded(num_bytes: int) -> int:
    """Rounds up to a multiple of WIRE_BYTES, so that the next message is aligned."""
    return -(-num_bytes // WIRE_BYTES) * WIRE_BYTES

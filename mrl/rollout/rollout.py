"""Rollouts across ranks: prompts spread over engine replicas, samples brought together and balanced for training.

Owns what the config asks to be sampled, who generates what (`assign`), the table of facts about all samples that every
rank knows (`gather_table`), and the exchange that moves samples from the replicas to the data-parallel ranks that train
on them (`pack`). No rank ever holds all tokens: the table has a few numbers per sample, the exchange is a ragged
all-to-all. Nothing depends on which replica sampled: minibatches are cut from the order (prompt uid, sample index).
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.config import Config
from mrl.data.packing import balance
from mrl.distributed.collectives import all_gather_ragged, all_to_all_ragged, everyone, together
from mrl.distributed.groups import ProcessGroups
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.observe.metrics import is_correct
from mrl.types import Prompt, Rollout, RolloutBatch, SampleTable

_NOTHING = torch.empty(0, dtype=torch.uint8)

HISTORY_LIMIT = 200_000
"""Data rows whose response length is remembered; the oldest are forgotten."""


def training_sampling(config: Config, eos_ids: tuple[int, ...]) -> SamplingConfig:
    """The distribution of training rollouts, which end with one of the `eos_ids`."""
    rollout = config.rollout
    return SamplingConfig(
        n=rollout.n,
        max_tokens=rollout.response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        greedy=not rollout.do_sample,
        ignore_eos=rollout.ignore_eos,
        stop_token_ids=eos_ids,
        stop=tuple(rollout.stop),
        seed=config.run.seed,
    )


def held_out_sampling(config: Config, eos_ids: tuple[int, ...]) -> SamplingConfig:
    """The distribution of held-out rollouts."""
    val = config.rollout.val_kwargs
    return replace(
        training_sampling(config, eos_ids),
        n=val.n,
        temperature=val.temperature or 1.0,
        top_k=val.top_k,
        top_p=val.top_p,
        min_p=val.min_p,
        greedy=val.greedy,
    )


class LengthHistory:
    """Mean response length of each data row seen so far: long answers start first and spread over the replicas.

    Every rank keeps the same history, since each is fed from the same table.
    """

    def __init__(self, default_length: float) -> None:
        self._default = default_length
        self._lengths: dict[str, float] = {}

    def expected(self, prompt: Prompt) -> float:
        """Tokens that a response to this prompt is expected to have."""
        return self._lengths.get(prompt.source, self._default)

    def update(self, prompts: Iterable[Prompt], table: SampleTable) -> None:
        """Takes in the lengths of a step's samples."""
        by_uid: dict[int, list[float]] = {}
        for uid, length in zip(table["uid"].tolist(), table["response_len"].tolist(), strict=True):
            by_uid.setdefault(int(uid), []).append(length)
        for prompt in prompts:
            lengths = by_uid.get(prompt.uid)
            if lengths:
                self._lengths.pop(prompt.source, None)
                self._lengths[prompt.source] = sum(lengths) / len(lengths)
        if by_uid:
            self._default = sum(map(sum, by_uid.values())) / sum(map(len, by_uid.values()))
        while len(self._lengths) > HISTORY_LIMIT:
            del self._lengths[next(iter(self._lengths))]

    def state_dict(self) -> dict[str, object]:
        """JSON-able state."""
        return {"default": self._default, "lengths": dict(self._lengths)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes back what `state_dict` gave."""
        self._default = float(state["default"])  # type: ignore[arg-type]
        self._lengths = dict(state["lengths"])  # type: ignore[call-overload]


def assign(prompts: Sequence[Prompt], num_replicas: int, samples: int, history: LengthHistory) -> list[list[Prompt]]:
    """Prompts of each replica: expected tokens are balanced, and within a replica the longest start first."""
    costs = [len(prompt.prompt_ids) + samples * history.expected(prompt) for prompt in prompts]
    bins = balance([round(cost) for cost in costs], num_replicas)
    return [[prompts[i] for i in sorted(rows, key=lambda i: (-costs[i], prompts[i].uid))] for rows in bins]


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    groups: ProcessGroups,
    history: LengthHistory,
) -> list[Rollout]:
    """Collective over the job: the rollouts of this rank's replica for its part of the prompts.

    All ranks pass the same prompts. The ranks of one replica get the same rollouts.
    """
    mine = assign(prompts, groups.grid.num_replicas, sampling.n, history)[groups.grid.replica(groups.rank)]
    return engine.generate(mine, sampling) if mine else []


def gather_table(rollouts: Sequence[Rollout], groups: ProcessGroups, reward_names: Sequence[str]) -> SampleTable:
    """Collective over the job: the facts of all samples; the first rank of each replica speaks for it.

    Args:
        rollouts: Scored, on the first rank of each replica; ignored on the others.
        groups: Who sits where.
        reward_names: Keys of `Rollout.reward_parts`, in the config's order.
    """
    rows = [
        [
            groups.rank,
            rollout.prompt.uid,
            rollout.sample_index,
            len(rollout.prompt.prompt_ids),
            len(rollout.response_ids),
            rollout.reward,
            float(is_correct(rollout)),
            float(rollout.reward_error is not None),
            float(rollout.finish_reason == "length"),
            float(zlib.crc32(array("q", rollout.response_ids))),
            *(rollout.reward_parts.get(name, math.nan) for name in reward_names),
        ]
        for rollout in (rollouts if groups.leads_replica else ())
    ]
    columns = (*SampleTable.FACTS, *(f"reward/{name}" for name in reward_names))
    local = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(columns))
    return SampleTable(columns, all_gather_ragged(local, everyone()))


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


def outcomes(table: SampleTable) -> Outcomes:
    """What algorithms see of the table."""
    return Outcomes(
        rewards_N=table["reward"],
        group_id_N=table["uid"].long(),
        response_lens_N=table["response_len"].long(),
        truncated_N=table["truncated"].bool(),
    )


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
    grid = groups.grid
    keys = [(int(uid), int(sample)) for uid, sample in torch.stack([table["uid"], table["sample_index"]], 1).tolist()]
    prompt_lens, response_lens = table["prompt_len"].long(), table["response_len"].long()
    seq_lens = prompt_lens + response_lens
    dp_rows = _rows_of_ranks(keys, seq_lens.tolist(), grid.dp, minibatch_size)
    mine = [row for minibatch in dp_rows for row in minibatch[groups.coords.dp]]

    held = {(rollout.prompt.uid, rollout.sample_index): rollout for rollout in rollouts if groups.leads_replica}
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    sent: list[list[Rollout]] = []
    for rank in range(grid.world_size):
        wanted = [row for minibatch in dp_rows for row in minibatch[grid.coords(rank).dp]]
        parts = [held[keys[row]] for row in wanted if keys[row] in held]
        ids = [i for part in parts for i in (*part.prompt.prompt_ids, *part.response_ids)]
        tokens.append(torch.tensor(ids, dtype=torch.int64))
        logprobs.append(torch.tensor([x for part in parts for x in part.rollout_logprobs], dtype=torch.float32))
        sent.append(parts)

    source = table["rank"].long().tolist()
    arrival = sorted(range(len(mine)), key=lambda i: source[mine[i]])  # stable: from each sender in the order of `mine`
    received_P = _exchange(tokens, [(source[mine[i]], int(seq_lens[mine[i]])) for i in arrival], grid.world_size)
    received_R = _exchange(logprobs, [(source[mine[i]], int(response_lens[mine[i]])) for i in arrival], grid.world_size)
    received_routed: list[Tensor] = []
    if routing is not None:
        with together():
            routed = [_concatenate([_routed_bytes(part, routing) for part in parts], torch.uint8) for parts in sent]
        width = 2 * math.prod(routing)
        extents = [(source[mine[i]], width * int(seq_lens[mine[i]])) for i in arrival]
        received_routed = _exchange(routed, extents, grid.world_size)
    back = sorted(range(len(mine)), key=lambda position: arrival[position])

    index = torch.tensor(mine, dtype=torch.int64)
    total_response = int(response_lens[index].sum())
    batch = RolloutBatch(
        tokens_P=_concatenate([received_P[i] for i in back], torch.int64),
        prompt_lens_B=prompt_lens[index],
        response_lens_B=response_lens[index],
        response_mask_R=torch.ones(total_response, dtype=torch.bool),
        rollout_logprobs_R=_concatenate([received_R[i] for i in back], torch.float32),
        group_id_B=table["uid"].long()[index],
        rewards_B=table["reward"][index].float(),
        truncated_B=table["truncated"].bool()[index],
        routed_experts_P=None
        if routing is None
        else _concatenate([received_routed[i] for i in back], torch.uint8).view(torch.int16).view(-1, *routing),
    )
    return StepBatch(batch, _local_rows(dp_rows, groups.coords.dp), index)


def _rows_of_ranks(
    keys: Sequence[tuple[int, int]], seq_lens: Sequence[int], dp: int, minibatch_size: int
) -> list[list[list[int]]]:
    """Table rows by [minibatch][data-parallel index], each ascending."""
    uids = sorted({uid for uid, _ in keys})
    minibatch_of = {uid: i // minibatch_size for i, uid in enumerate(uids)}
    members: list[list[int]] = [[] for _ in range(-(-len(uids) // minibatch_size))]
    for row, (uid, _) in enumerate(keys):
        members[minibatch_of[uid]].append(row)
    return [
        [sorted(rows[i] for i in part) for part in balance([seq_lens[row] for row in rows], dp)] for rows in members
    ]


def _local_rows(dp_rows: list[list[list[int]]], dp: int) -> list[list[int]]:
    """Rows of the local batch that make up each minibatch: the batch is their concatenation."""
    local: list[list[int]] = []
    start = 0
    for minibatch in dp_rows:
        local.append(list(range(start, start + len(minibatch[dp]))))
        start += len(minibatch[dp])
    return local


def _exchange(parts: list[Tensor], arriving: Sequence[tuple[int, int]], world_size: int) -> list[Tensor]:
    """Sends `parts[rank]` to each rank; returns what arrives, cut into the given (sender, length) sequences."""
    counts = [0] * world_size
    for sender, length in arriving:
        counts[sender] += length
    return list(torch.split(all_to_all_ragged(parts, counts), [length for _, length in arriving]))


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

"""Batches of supervised steps: the warm start, `algorithm.name=sft` and `algorithm.name=dpo`.

Every rank reads the same prompts and keeps its data-parallel share, so no communication is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config.config import Config, LearnsFrom
from mrl.data.packing import balance
from mrl.data.sft_examples import SftEncoder, SftExample
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.groups import ProcessGroups
from mrl.types import Prompt, RolloutBatch


def examples(
    prompts: list[Prompt],
    tokenizer: Tokenizer,
    config: Config,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    learns_from: LearnsFrom = "responses",
) -> list[tuple[SftExample, ...]]:
    """Encodes the responses of each prompt: one, or a (chosen, rejected) pair.

    Args:
        prompts: Prompts with the response columns of `data`.
        tokenizer: Encoder of the responses.
        config: Settings with the column names (`data`) and length limits (`rollout`).
        tools: Tool schemas that the prompts offer.
        learns_from: "responses" or "pairs".

    Raises:
        UserError: A prompt has no response, or one that is too long.
    """
    encoder = SftEncoder(tokenizer, config.data, config.rollout, tools)
    return [encoder.pair(prompt) if learns_from == "pairs" else (encoder.supervised(prompt),) for prompt in prompts]


def supervised_batch(
    prompts: list[Prompt],
    tokenizer: Tokenizer,
    groups: ProcessGroups,
    config: Config,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    learns_from: LearnsFrom = "responses",
) -> tuple[RolloutBatch, Tensor]:
    """Builds the batch of this data-parallel index; a pair becomes two sequences, chosen before rejected.

    Args:
        prompts: Prompts of the step, the same on every rank.
        tokenizer: Encoder of the responses.
        groups: Process groups and coordinates of this rank.
        config: Settings, see `examples`.
        tools: Tool schemas, see `examples`.
        learns_from: "responses" or "pairs".

    Returns:
        Batch, and the (prompt, response) lengths of all sequences of the step, int64 [N, 2].

    Raises:
        UserError: A prompt has no response, or one that is too long.
    """
    found = examples(prompts, tokenizer, config, tools, learns_from=learns_from)
    costs = [sum(len(example.prompt_ids) + len(example.response_ids) for example in each) for each in found]
    rows = sorted(balance(costs, groups.grid.dp)[groups.coords.dp])
    own = [(prompts[row].uid, index, example) for row in rows for index, example in enumerate(found[row])]
    sequences = [example for _, _, example in own]
    mask_R = torch.tensor([each for example in sequences for each in example.response_mask], dtype=torch.bool)
    batch = RolloutBatch(
        tokens_P=_ids([i for example in sequences for i in (*example.prompt_ids, *example.response_ids)]),
        prompt_lens_B=_ids([len(example.prompt_ids) for example in sequences]),
        response_lens_B=_ids([len(example.response_ids) for example in sequences]),
        response_mask_R=mask_R,
        rollout_logprobs_R=torch.zeros(mask_R.numel()),
        group_id_B=_ids([uid for uid, _, _ in own]),
        sample_index_B=_ids([index for _, index, _ in own]),
        rewards_B=torch.zeros(len(own)),
        truncated_B=torch.zeros(len(own), dtype=torch.bool),
    )
    lens = [(len(example.prompt_ids), len(example.response_ids)) for each in found for example in each]
    return batch, torch.tensor(lens, dtype=torch.int64)


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

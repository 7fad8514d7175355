"""Supervised steps on (prompt, answer): the warm start before reinforcement learning, and `algorithm.name=sft`.

Owns the batch of a supervised step. Every rank reads the same prompts and keeps its share, so nothing is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config import Config
from mrl.data.packing import balance
from mrl.data.prompts import supervised_example
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.types import Prompt, RolloutBatch


def examples(prompts: list[Prompt], tokenizer: Tokenizer, config: Config) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and response ids of each prompt.

    Args:
        prompts: Of the stream.
        tokenizer: Encodes the responses.
        config: `data.response_key` and `rollout.response_length` are read.

    Raises:
        UserError: A prompt has no response, or one that is too long.
    """
    limit = config.rollout.response_length
    pairs = [supervised_example(prompt, tokenizer, config.data.response_key) for prompt in prompts]
    for prompt, (_, response) in zip(prompts, pairs, strict=True):
        if len(response) > limit:
            raise UserError(
                f"{prompt.source}: the response to imitate has {len(response)} tokens with its end token, more than "
                f"rollout.response_length={limit}. Raise it, or shorten the response."
            )
    return pairs


def supervised_batch(
    prompts: list[Prompt], tokenizer: Tokenizer, groups: ProcessGroups, config: Config
) -> tuple[RolloutBatch, Tensor]:
    """This data-parallel index's share of the prompts, each with the response to imitate.

    Args:
        prompts: The same on every rank.
        tokenizer: Encodes the responses.
        groups: Who sits where.
        config: `data.response_key` and `rollout.response_length` are read.

    Returns:
        The share, and the (prompt, response) lengths of all examples, int64 [N, 2].

    Raises:
        UserError: A prompt has no response, or one that is too long.
    """
    pairs = examples(prompts, tokenizer, config)
    shares = balance([len(ids) + len(response) for ids, response in pairs], groups.grid.dp)
    rows = sorted(shares[groups.coords.dp])
    prompt_lens = torch.tensor([len(pairs[row][0]) for row in rows], dtype=torch.int64)
    response_lens = torch.tensor([len(pairs[row][1]) for row in rows], dtype=torch.int64)
    num_response = int(response_lens.sum())
    batch = RolloutBatch(
        tokens_P=torch.tensor([i for row in rows for i in (*pairs[row][0], *pairs[row][1])], dtype=torch.int64),
        prompt_lens_B=prompt_lens,
        response_lens_B=response_lens,
        response_mask_R=torch.ones(num_response, dtype=torch.bool),
        rollout_logprobs_R=torch.zeros(num_response),
        group_id_B=torch.tensor([prompts[row].uid for row in rows], dtype=torch.int64),
        rewards_B=torch.zeros(len(rows)),
        truncated_B=torch.zeros(len(rows), dtype=torch.bool),
    )
    return batch, torch.tensor([[len(ids), len(response)] for ids, response in pairs], dtype=torch.int64)

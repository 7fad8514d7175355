"""Supervised steps on (prompt, answer): the warm start before reinforcement learning, and `algorithm.name=sft`.

Owns the batch of a supervised step. Every rank reads the same prompts and keeps its share, so nothing is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.config import Config
from mrl.data.examples import Encoder, Example
from mrl.data.packing import balance
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.groups import ProcessGroups
from mrl.types import Prompt, RolloutBatch


def examples(prompts: list[Prompt], tokenizer: Tokenizer, config: Config) -> list[Example]:
    """What a supervised step imitates of each prompt.

    Args:
        prompts: Of the stream.
        tokenizer: Encodes the responses.
        config: Columns of `data`, and lengths of `rollout`.

    Raises:
        UserError: A prompt has no response, or one that is too long.
    """
    encoder = Encoder(tokenizer, config.data, config.rollout)
    return [encoder.supervised(prompt) for prompt in prompts]


def supervised_batch(
    prompts: list[Prompt], tokenizer: Tokenizer, groups: ProcessGroups, config: Config
) -> tuple[RolloutBatch, Tensor]:
    """This data-parallel index's share of the prompts, each with the response to imitate.

    Args:
        prompts: The same on every rank.
        tokenizer: Encodes the responses.
        groups: Who sits where.
        config: As for `examples`.

    Returns:
        The share, and the (prompt, response) lengths of all examples, int64 [N, 2].

    Raises:
        UserError: A prompt has no response, or one that is too long.
    """
    found = examples(prompts, tokenizer, config)
    lens = [(len(example.prompt_ids), len(example.response_ids)) for example in found]
    rows = sorted(balance([sum(both) for both in lens], groups.grid.dp)[groups.coords.dp])
    own = [found[row] for row in rows]
    mask_R = torch.tensor([each for example in own for each in example.trained], dtype=torch.bool)
    batch = RolloutBatch(
        tokens_P=_ids([i for example in own for i in (*example.prompt_ids, *example.response_ids)]),
        prompt_lens_B=_ids([lens[row][0] for row in rows]),
        response_lens_B=_ids([lens[row][1] for row in rows]),
        response_mask_R=mask_R,
        rollout_logprobs_R=torch.zeros(mask_R.numel()),
        group_id_B=_ids([prompts[row].uid for row in rows]),
        rewards_B=torch.zeros(len(rows)),
        truncated_B=torch.zeros(len(rows), dtype=torch.bool),
    )
    return batch, torch.tensor(lens, dtype=torch.int64)


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

"""Log-probabilities, entropies and gradients of a batch by a causal model of transformers, one sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.types import RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # the ranks of tests need none


def scores_and_gradients(model: PreTrainedModel, batch: RolloutBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns log-probabilities and entropies of the response tokens, [R], and gradients of the loss by name."""
    logprobs_R, entropies_R, loss = [], [], torch.zeros((), dtype=model.dtype)
    weights = batch.weights_R.split(batch.response_lens_B.tolist())
    sequences = batch.tokens_P.split(batch.seq_lens_B.tolist())
    for tokens, prompt_len, weight in zip(sequences, batch.prompt_lens_B.tolist(), weights, strict=True):
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)[prompt_len - 1 : -1]
        chosen = logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1)
        logprobs_R.append(chosen.detach())
        entropies_R.append(-(logprobs.exp() * logprobs).sum(1).detach())
        loss = loss - (chosen * weight).sum()
    loss.backward()
    return torch.cat(logprobs_R), torch.cat(entropies_R), {key: value.grad for key, value in model.named_parameters()}

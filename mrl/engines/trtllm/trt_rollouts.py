"""Conversion of the built engine's output rows to rollouts.

Checks that the runtime ended each row by an end token or at its length, with tokens of the vocabulary and finite
log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.engines._stop_strings import length_to_stop_string
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.runner import NO_TOKEN
from mrl.errors import UserError
from mrl.types import FinishReason, Prompt, Rollout

End = tuple[int, FinishReason]
"""Length of the response in tokens, and its finish reason."""


@dataclass(frozen=True)
class BatchRow:
    """A row of a batch: a prompt and a sample index."""

    prompt: Prompt
    index: int

    @property
    def where(self) -> str:
        """Name of the sample in error messages."""
        return f"response {self.index} to prompt {self.prompt.source or self.prompt.uid}"


def end_rows(
    samples: Sequence[BatchRow],
    rows: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    vocab_size: int,
    decode: Callable[[Sequence[int]], str],
) -> list[End]:
    """Returns the length and finish reason of each row, cut after its first stop string (the runtime ignores those).

    Args:
        samples: BatchRow of each row.
        rows: Sampled tokens of each row.
        sampling: End tokens, stop strings and length.
        vocab_size: Number of valid token ids.
        decode: Converts tokens to text.

    Raises:
        RuntimeError: The runtime ended a row without an end token, or sampled an invalid token; the prompt is named.
    """
    stops = () if sampling.ignore_eos else sampling.stop_token_ids
    strings = () if sampling.ignore_eos else tuple(text for text in sampling.stop if text)
    found: list[End] = []
    for sample, tokens in zip(samples, rows, strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        strange = [token for token in tokens[:end] if not 0 <= token < vocab_size]
        if strange:
            what = "ended without an end token" if strange[0] == NO_TOKEN else f"has a token {strange[0]}"
            raise RuntimeError(f"TensorRT-LLM's {sample.where} {what}; the vocabulary has {vocab_size}")
        cut = length_to_stop_string(tokens[:end], strings, decode)
        if cut is not None:
            found.append((cut, "stop"))
        else:
            found.append((end, "stop" if tokens[end - 1] in stops else "length"))
    return found


def to_rollouts(
    samples: Sequence[BatchRow],
    rows: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    ends: Sequence[End],
    policy_version: int,
) -> list[Rollout]:
    """Converts rows to rollouts.

    Raises:
        UserError: A token's log-probability is not finite; the prompt is named.
    """
    rollouts = []
    for sample, tokens, scores, (end, reason) in zip(samples, rows, logprobs, ends, strict=True):
        if not all(map(math.isfinite, scores[:end])):
            raise UserError(
                f"log-probabilities of {sample.where} are not finite; the weights are broken. Look at "
                "actor/grad_norm in metrics.jsonl: lower actor.lr, or resume from an earlier checkpoint."
            )
        rollouts.append(
            Rollout(
                prompt=sample.prompt,
                sample_index=sample.index,
                response_ids=list(tokens[:end]),
                rollout_logprobs=list(scores[:end]),
                finish_reason=reason,
                policy_version=policy_version,
            )
        )
    return rollouts

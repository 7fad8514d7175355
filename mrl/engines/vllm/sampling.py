"""Converts `SamplingConfig` to vLLM's `SamplingParams`, and its outputs to `Rollout`, with checks.

Log-probabilities are vLLM's `processed_logprobs`: of the distribution that it samples from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mrl.algorithms.functional.sampling import stream_key
from mrl.engines._stop_strings import length_to_stop_string
from mrl.engines.base import SamplingConfig
from mrl.types import FinishReason, Prompt, Rollout


def arguments(sampling: SamplingConfig, prompt: Prompt, sample_index: int) -> dict[str, Any]:
    """Returns the arguments of `SamplingParams` for one sample, whose seed does not depend on the batch."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": max(0, sampling.top_k) if not sampling.greedy else 0,
        "top_p": sampling.top_p if not sampling.greedy else 1.0,
        "min_p": sampling.min_p if not sampling.greedy else 0.0,
        "seed": stream_key(sampling.seed, prompt.uid, sample_index),
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "ignore_eos": True,  # end tokens come from SamplingConfig, not from the model folder
        "logprobs": 0,  # only that of the sampled token
        "detokenize": False,
    }


def logprobs_of(output: Any) -> list[float]:
    """Returns the log-probability of each token of a response.

    Raises:
        RuntimeError: One is missing or not finite.
    """
    found = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or (), strict=True)]
    for position, value in enumerate(found):
        if not math.isfinite(value):
            raise RuntimeError(f"vLLM returned log-probability {value} for response token {position}")
    return found


def length_to_stop(
    tokens: Sequence[int], sampling: SamplingConfig, decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Returns the number of tokens up to the end of a stop string; None if there is none."""
    return length_to_stop_string(tokens, () if sampling.ignore_eos else sampling.stop, decode)


def finish_reason(tokens: Sequence[int], said: str | None, sampling: SamplingConfig) -> FinishReason:
    """Returns the finish reason, from the tokens; vLLM's own must be consistent with it.

    Raises:
        RuntimeError: vLLM stopped for another reason, or the end token is missing.
    """
    if not tokens:
        raise RuntimeError("vLLM returned a response without tokens")
    if not sampling.ignore_eos and tokens[-1] in sampling.stop_token_ids:
        return "stop"
    if said != "length" or len(tokens) != sampling.max_tokens:
        raise RuntimeError(
            f"vLLM ended the response for the reason '{said}' at {len(tokens)} of {sampling.max_tokens} tokens, but "
            f"its last token {tokens[-1]} is not an end token"
        )
    return "length"


def to_rollout(
    prompt: Prompt, sample_index: int, output: Any, cut: int | None, sampling: SamplingConfig, version: int
) -> Rollout:
    """Converts a finished sample to a rollout; `cut` is its length if a stop string ended it."""
    tokens, logprobs = list(output.token_ids), logprobs_of(output)
    reason: FinishReason = "stop" if cut is not None else finish_reason(tokens, output.finish_reason, sampling)
    return Rollout(
        prompt=prompt,
        sample_index=sample_index,
        response_ids=tokens[:cut],
        rollout_logprobs=logprobs[:cut],
        finish_reason=reason,
        policy_version=version,
    )

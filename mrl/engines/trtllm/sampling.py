"""Conversion between mrl and the LLM API: `SamplingConfig` to `SamplingParams`, and completions to `Rollout`.

Checks every completion: each token needs its own log-probability, the end token stays in the response, and any finish
reason other than an end token or the length limit is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.engines._stop_strings import length_to_stop_string
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.features import Features
from mrl.engines.trtllm.routing import REQUEST_ARGUMENT
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import expert_index_dtype
from mrl.types import FinishReason, Prompt, Rollout

NO_TOKEN = -1
"""Invalid token id used as `end_id`, so that end tokens come from `stop_token_ids` and stay in the response; verl does
the same with 1.2.0rc6.
"""


def arguments(
    sampling: SamplingConfig, key: int, features: Features, *, with_logits: bool, routed: bool = False
) -> dict[str, Any]:
    """Returns the arguments of `SamplingParams` for one sample.

    Args:
        sampling: Sampling settings of the run.
        key: Seed of the sample's random numbers, from `stream_key`.
        features: Features of the installed package.
        with_logits: True to request logits instead of log-probabilities.
        routed: True to request the experts of each token.
    """
    ends = () if sampling.ignore_eos else sampling.stop_token_ids
    asked: dict[str, Any] = {"return_generation_logits": True} if with_logits else {"logprobs": 1}
    if not with_logits:
        asked |= features.processed_logprobs
    if routed:
        asked[REQUEST_ARGUMENT] = True
    if sampling.min_p > 0.0:
        asked["min_p"] = sampling.min_p
    return {
        "end_id": NO_TOKEN,
        "pad_id": 0,  # unused: TensorRT-LLM packs requests without padding
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": 1 if sampling.greedy else max(0, sampling.top_k),
        "top_p": sampling.top_p,
        "seed": key % (1 << 64),
        "stop_token_ids": list(ends) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        **asked,
    }


def logprobs_of(output: Any) -> list[float] | None:
    """Returns the log-probability of each token of a completion, by token id; None where one is missing."""
    found: list[float] = []
    reported = list(output.logprobs or [])
    if len(reported) != len(output.token_ids):
        return None
    for token, entry in zip(output.token_ids, reported, strict=True):
        value = entry.get(token) if isinstance(entry, dict) else entry
        value = getattr(value, "logprob", value)
        if value is None:
            return None
        found.append(float(value))
    return found


def logits_of(output: Any, vocab_size: int) -> Tensor | None:
    """Returns the logits of each token of a completion, [tokens, V]; None where they are missing or too few."""
    logits: Tensor | None = output.generation_logits
    if logits is None:
        return None
    if logits.dim() == 3 and logits.size(0) == 1:  # one beam
        logits = logits[0]
    if logits.dim() != 2 or logits.size(0) < len(output.token_ids) or logits.size(1) < vocab_size:
        return None
    return logits[: len(output.token_ids), :vocab_size]


def experts_of(output: Any, num_tokens: int, arch: ArchSpec) -> Tensor:
    """Returns the experts of a completion in the format of `Rollout.routed_experts`.

    Args:
        output: Completion with one row per prompt and response token. The overlap scheduler may add a row for the last
            token, and some versions omit the row of the last processed one. Tokens whose cached prefix lost its experts
            have -1.
        num_tokens: Prompt and response tokens that mrl keeps.
        arch: Architecture of the MoE model.

    Raises:
        RuntimeError: The experts have the wrong shape or range, or rows are missing.
    """
    moe, found = arch.moe, output.routed_experts
    if moe is None or found is None:
        raise RuntimeError("TensorRT-LLM did not return the chosen experts")
    wanted = (arch.num_layers, moe.top_k)
    if found.dim() != 3 or tuple(found.shape[1:]) != wanted:
        raise RuntimeError(
            f"TensorRT-LLM returned experts {list(found.shape)}, expected [tokens, {wanted[0]}, {wanted[1]}]"
        )
    if found.size(0) < num_tokens - 2:
        raise RuntimeError(f"TensorRT-LLM returned the experts of {found.size(0)} of {num_tokens - 1} tokens")
    known = found[: num_tokens - 1]
    if known.numel() and not (int(known.min()) >= -1 and int(known.max()) < moe.num_experts):
        raise RuntimeError(f"TensorRT-LLM returned expert {int(known.max())} of {moe.num_experts}")
    routed = torch.full((num_tokens, *wanted), -1, dtype=expert_index_dtype(moe.num_experts))
    routed[: known.size(0)] = known.to(routed.dtype)
    return routed


def finish_reason(output: Any, sampling: SamplingConfig) -> FinishReason:
    """Returns why a completion ended, from its tokens; the engine's own reason must agree.

    Raises:
        RuntimeError: The completion ended for another reason, or its end token is missing.
    """
    tokens = output.token_ids
    ends = () if sampling.ignore_eos else sampling.stop_token_ids
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"TensorRT-LLM ended the response for the reason '{output.finish_reason}'")
    if not tokens:
        raise RuntimeError("TensorRT-LLM returned a response without tokens")
    if tokens[-1] in ends:
        return "stop"
    if output.finish_reason == "stop":
        raise RuntimeError(
            f"TensorRT-LLM reports the finish reason 'stop', but the last token {tokens[-1]} is not an end token"
        )
    if len(tokens) != sampling.max_tokens:
        raise RuntimeError(f"TensorRT-LLM cut the response at {len(tokens)} of {sampling.max_tokens} tokens")
    return "length"


def to_rollout(
    prompt: Prompt,
    sample_index: int,
    output: Any,
    logprobs: list[float],
    sampling: SamplingConfig,
    version: int,
    decode: Callable[[Sequence[int]], str],
) -> Rollout:
    """Returns a completion as a rollout, cut after its first stop string."""
    reason = finish_reason(output, sampling)
    tokens = list(output.token_ids)
    cut = length_to_stop_string(tokens, () if sampling.ignore_eos else sampling.stop, decode)
    if cut is not None:
        tokens, logprobs, reason = tokens[:cut], logprobs[:cut], "stop"
    return Rollout(
        prompt=prompt,
        sample_index=sample_index,
        response_ids=tokens,
        rollout_logprobs=logprobs,
        finish_reason=reason,
        policy_version=version,
    )

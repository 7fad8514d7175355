"""Between the sampling contract and the LLM API: `SamplingConfig` -> `SamplingParams`, results -> `Rollout`.

Owns that translation and every check of what comes back: the end token stays part of a response, each token has its own
log-probability, and a request that ended for another reason than its end or its length is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.engines._stop_strings import shortest_with
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.features import Features
from mrl.engines.trtllm.routing import REQUEST_ARGUMENT
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import choice_dtype
from mrl.types import FinishReason, Prompt, Rollout

NO_TOKEN = -1
"""`end_id` that no token has, so that end tokens are found by `stop_token_ids` and stay part of the response, as verl
runs it with 1.2.0rc6."""


def arguments(
    sampling: SamplingConfig, key: int, features: Features, *, with_logits: bool, routed: bool = False
) -> dict[str, Any]:
    """Arguments of `SamplingParams` for one sample.

    Args:
        sampling: The contract.
        key: Of the sample's random numbers, `stream_key`; TensorRT-LLM draws its own numbers from it.
        features: Of the installed package.
        with_logits: Ask for the logits of each token instead of its log-probability.
        routed: Ask for the experts that tokens go to.
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
        "pad_id": 0,  # requests are never padded with it: TensorRT-LLM packs them
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
    """Log-probability of each token of a completion, looked up by the token's id; None: one of them is not there."""
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
    """Logits of each token of a completion over the true vocabulary, [tokens, V]; None: there are none, or too few."""
    logits: Tensor | None = output.generation_logits
    if logits is None:
        return None
    if logits.dim() == 3 and logits.size(0) == 1:  # one beam
        logits = logits[0]
    if logits.dim() != 2 or logits.size(0) < len(output.token_ids) or logits.size(1) < vocab_size:
        return None
    return logits[: len(output.token_ids), :vocab_size]


def experts_of(output: Any, num_tokens: int, arch: ArchSpec) -> Tensor:
    """The experts of a completion as `Rollout.routed_experts` has them.

    Args:
        output: The completion; its rows are of the prompt's tokens and then the response's. The overlap scheduler may
            run the last token too, and a version leaves out the row of the last one that was read; a token whose
            prefix came from a cache that has forgotten its experts has -1.
        num_tokens: Of prompt and response, as far as mrl keeps it.
        arch: A mixture of experts.

    Raises:
        RuntimeError: They are of another model, or tokens are missing.
    """
    moe, found = arch.moe, output.routed_experts
    if moe is None or found is None:
        raise RuntimeError("TensorRT-LLM did not tell which experts it chose")
    wanted = (arch.num_layers, moe.top_k)
    if found.dim() != 3 or tuple(found.shape[1:]) != wanted:
        raise RuntimeError(
            f"TensorRT-LLM told experts {list(found.shape)}, expected [tokens, {wanted[0]}, {wanted[1]}]"
        )
    if found.size(0) < num_tokens - 2:
        raise RuntimeError(f"TensorRT-LLM told the experts of {found.size(0)} of {num_tokens - 1} tokens")
    known = found[: num_tokens - 1]
    if known.numel() and not (int(known.min()) >= -1 and int(known.max()) < moe.num_experts):
        raise RuntimeError(f"TensorRT-LLM told expert {int(known.max())} of {moe.num_experts}")
    routed = torch.full((num_tokens, *wanted), -1, dtype=choice_dtype(moe.num_experts))
    routed[: known.size(0)] = known.to(routed.dtype)
    return routed


def finish_reason(output: Any, sampling: SamplingConfig) -> FinishReason:
    """Why a completion ended, by its tokens; what the engine says must fit.

    Raises:
        RuntimeError: It ended for another reason, or its end token is missing.
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
            f"TensorRT-LLM says that the response ended, but its last token {tokens[-1]} is no end token"
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
    """One finished request as mrl knows it; a stop string cuts it, and stays part of it."""
    reason = finish_reason(output, sampling)
    tokens = list(output.token_ids)
    cut = shortest_with(tokens, () if sampling.ignore_eos else sampling.stop, decode)
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

"""Checks that an engine can answer a prompt: not empty, not too long, and only token ids of the model."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.engines.base import EngineSpec, SamplingConfig
from mrl.errors import UserError
from mrl.types import Prompt


def check_prompts(
    prompts: Sequence[Prompt],
    spec: EngineSpec,
    sampling: SamplingConfig,
    *,
    longest: int | None = None,
    chunked_prefill: bool = True,
) -> None:
    """Checks that each prompt leaves room for a response.

    Args:
        prompts: Prompts of one call.
        spec: Constructor argument of the engine.
        sampling: Supplies the response length.
        longest: Longest prompt that the engine was built for, tokens; None: limited only by the sequence length.
        chunked_prefill: Whether the engine supports chunked prefill (`rollout.enable_chunked_prefill`).

    Raises:
        UserError: A prompt is empty, too long, or has a token id outside the vocabulary; the message names the prompt.
    """
    for prompt in prompts:
        name = f"prompt {prompt.source or prompt.uid}"
        if not prompt.prompt_ids:
            raise UserError(f"{name} has no tokens.")
        _check_length(name, len(prompt.prompt_ids), spec, sampling.max_tokens, longest, chunked_prefill)
        if not 0 <= min(prompt.prompt_ids) <= max(prompt.prompt_ids) < spec.arch.vocab_size:
            raise UserError(
                f"{name} has a token id outside the model's vocabulary of {spec.arch.vocab_size}. The tokenizer does "
                "not match the model."
            )


def _check_length(name: str, length: int, spec: EngineSpec, response: int, longest: int | None, in_parts: bool) -> None:
    has, config = f"{name} has {length} tokens", spec.config
    if longest is not None and length > longest:
        raise UserError(f"{has}; the engine's limit is {longest}. Raise rollout.prompt_length, or shorten the prompt.")
    if length + response > spec.max_len:
        raise UserError(
            f"{has}; with a response of {response} it exceeds the engine's limit of {spec.max_len}. Raise "
            "rollout.max_model_len or rollout.prompt_length, or shorten the prompt."
        )
    if length > config.max_num_batched_tokens and not (in_parts and config.enable_chunked_prefill):
        besides = " or set rollout.enable_chunked_prefill=true" if in_parts else " or shorten the prompt"
        raise UserError(
            f"{has}, more than rollout.max_num_batched_tokens={config.max_num_batched_tokens}, and chunked prefill is "
            f"off. Raise it,{besides}."
        )

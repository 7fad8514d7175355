"""What vLLM does with each field of `rollout`, and what it refuses. `trainer/validation/` asks; it imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import RolloutConfig
from mrl.engines._config_support import (
    ANOTHERS,
    ENGINE_DIR,
    WHOLE_RESPONSES,
    Fields,
    Refusal,
    Use,
    no_drafts,
    not_on_policy,
    passed,
    refusals,
    refused,
)

NAME = "vllm"
LEAST_TEMPERATURE = 0.01
"""vLLM takes it for any that is smaller."""

_COOLER = f"vLLM would sample at {LEAST_TEMPERATURE}"
_ORDER = "with `top_p` vLLM drops by `min_p` first, mrl's other engines last: vLLM may keep fewer tokens"

FIELDS: Fields = {
    **WHOLE_RESPONSES,
    **no_drafts(
        "vLLM accepts drafts by random numbers of its own, so that tokens would change; and on a CPU vLLM 0.32 scores "
        "drafted tokens at a temperature that nobody wrote",
        "Use rollout.name=native, or leave it out.",
    ),
    "engine_dir": ENGINE_DIR,
    "n": Use("each sample is a request of its own"),
    "temperature": passed(
        "SamplingParams.temperature",
        refuses=(
            Refusal(
                f"below {LEAST_TEMPERATURE}",
                _COOLER,
                lambda r: 0.0 < r.temperature < LEAST_TEMPERATURE,
                "Raise it to that, or set rollout.do_sample=false.",
            ),
        ),
    ),
    "top_k": passed("SamplingParams.top_k", does="-1 becomes 0"),
    "top_p": passed("SamplingParams.top_p"),
    "min_p": passed("SamplingParams.min_p", does=_ORDER),
    "do_sample": Use(
        "false: `SamplingParams.temperature=0`",
        refuses=(
            Refusal(
                "where false and something is cut",
                "greedy responses are scored by vLLM without temperature and truncation",
                lambda r: not r.do_sample and (r.temperature, r.top_k, r.top_p, r.min_p) != (1.0, -1, 1.0, 0.0),
                "Set rollout.temperature=1, top_k=-1, top_p=1 and min_p=0.",
            ),
        ),
    ),
    "ignore_eos": Use("true: no `SamplingParams.stop_token_ids`, and no stop strings"),
    "stop": Use("looked for after each step; the response ends with the token that completes the string"),
    "prompt_length": Use("with `response_length`, the longest sequence"),
    "response_length": passed("SamplingParams.max_tokens"),
    "max_model_len": passed("max_model_len", does="null: `prompt_length + response_length`"),
    "dtype": passed("dtype", does="null: `model.dtype`"),
    "quantization": Use(
        "`fp8`: `quantization_config` of config.json, with Triton's kernels, on GPUs from Ada and Hopper on",
        refuses=(
            Refusal(
                "`fp8_per_tensor`",
                "vLLM has one scale for a fused matrix, mrl one for each of its parts",
                lambda r: r.quantization == "fp8_per_tensor",
                "Set rollout.quantization=fp8.",
            ),
            Refusal(
                "`fp8`",
                "vLLM's kernels for FP8 there pack what a refit writes into",
                lambda r: r.quantization == "fp8",
                "Leave it out, or use rollout.name=native.",
                on_a_cpu=True,
            ),
        ),
    ),
    "tensor_model_parallel_size": passed("tensor_parallel_size", does="by any launcher"),
    "pipeline_model_parallel_size": refused(
        "only built TensorRT-LLM engines have a pipeline",
        lambda r: r.pipeline_model_parallel_size != 1,
        "Raise rollout.tensor_model_parallel_size instead, or use rollout.name=trtllm_engine.",
    ),
    "expert_parallel_size": passed(
        "enable_expert_parallel",
        refuses=(
            Refusal(
                "between 1 and the replica's ranks",
                "vLLM either cuts every expert over the ranks of a replica or spreads whole ones over all of them",
                lambda r: r.expert_parallel_size not in (1, r.tensor_model_parallel_size),
                "Set it to 1, or to rollout.tensor_model_parallel_size.",
            ),
            Refusal(
                "above 1",
                "vLLM 0.32 crashes there",
                lambda r: r.expert_parallel_size > 1,
                "Set it to 1: the ranks then cut each expert.",
                on_a_cpu=True,
            ),
        ),
    ),
    "moe_tensor_parallel_size": Use("must be what `expert_parallel_size` leaves of the replica"),
    "max_num_seqs": passed("max_num_seqs"),
    "max_num_batched_tokens": passed(
        "max_num_batched_tokens",
        refuses=(
            Refusal(
                "below `max_num_seqs`",
                "vLLM wants room for a token of each of rollout.max_num_seqs sequences in a forward",
                lambda r: r.max_num_batched_tokens < r.max_num_seqs,
                "Raise it, or lower rollout.max_num_seqs.",
            ),
        ),
    ),
    "enable_chunked_prefill": passed(
        "enable_chunked_prefill",
        refuses=(
            Refusal(
                "where false and `max_num_batched_tokens` is below the longest sequence",
                "vLLM wants a whole sequence to fit in a forward then",
                lambda r: not r.enable_chunked_prefill and r.max_num_batched_tokens < r.longest,
                "Raise rollout.max_num_batched_tokens to rollout.max_model_len, or to prompt_length + response_length.",
            ),
        ),
    ),
    "enable_prefix_caching": passed("enable_prefix_caching", does="the cache is dropped at every refit"),
    "gpu_memory_utilization": passed(
        "kv_cache_memory_bytes",
        does="of the memory that is free when the engine starts, less its weights, and never more than `max_num_seqs` "
        "of the longest sequences take",
    ),
    "free_cache_engine": passed(
        "enable_sleep_mode",
        does="true: KV cache and weights leave a GPU between rollouts, the weights into pinned host memory; on a CPU "
        "vLLM frees nothing",
    ),
    "enforce_eager": passed("enforce_eager", does="always on a CPU"),
    "true_on_policy": not_on_policy(
        "its kernels are not the actor's; `VLLM_BATCH_INVARIANT`, on GPUs, makes them independent of the batch only"
    ),
    "enable_rollout_routing_replay": Use("vLLM's own hooks on its routers (`RoutedExpertsCapturer`)"),
    "engine_kwargs": Use(
        "arguments of `LLM` by their own names, under `vllm`: [which](vllm.md#arguments-of-its-own)",
        refuses=(ANOTHERS,),
    ),
    "val_kwargs.temperature": Use(
        "as `temperature`, in evaluations; 0: greedy",
        refuses=(
            Refusal(
                f"below {LEAST_TEMPERATURE}",
                _COOLER,
                lambda r: 0.0 < r.val_kwargs.temperature < LEAST_TEMPERATURE,
                "Raise it to that, or set rollout.val_kwargs.do_sample=false.",
            ),
        ),
    ),
    "val_kwargs.min_p": Use(f"as `min_p`, in evaluations: {_ORDER}"),
    "checkpoint_engine.canary": Use("null: yes; refits twice at start and compares answers"),
}


def refusals_on_a_cpu(rollout: RolloutConfig) -> Iterator[str]:
    """A message for what vLLM can do on GPUs alone."""
    anywhere = set(refusals(FIELDS, rollout, on_a_cpu=False))
    return (message for message in refusals(FIELDS, rollout, on_a_cpu=True) if message not in anywhere)

"""Effect of each field of `rollout` in vLLM, and its refusals. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import RolloutConfig
from mrl.engines._field_support import (
    ENGINE_DIR,
    NO_PARTIAL_ROLLOUTS,
    OTHER_ENGINE,
    Fields,
    FieldSupport,
    Refusal,
    no_speculation,
    no_true_on_policy,
    passed,
    refusals,
    refused,
)

NAME = "vllm"
LEAST_TEMPERATURE = 0.01
"""Smallest temperature of vLLM; it replaces smaller ones."""

_COOLER = f"vLLM would sample at {LEAST_TEMPERATURE}"
_ORDER = "vLLM applies it before `top_p`, mrl's other engines after it: vLLM may keep fewer tokens"

FIELDS: Fields = {
    **NO_PARTIAL_ROLLOUTS,
    **no_speculation(
        "vLLM accepts drafts by its own random numbers, so that tokens would change; and on a CPU vLLM 0.32 scores "
        "drafted tokens at a wrong temperature",
        "Use rollout.name=native, or remove it.",
    ),
    "engine_dir": ENGINE_DIR,
    "n": FieldSupport("each sample is a separate request"),
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
    "do_sample": FieldSupport(
        "false: `SamplingParams.temperature=0`",
        refuses=(
            Refusal(
                "if false with temperature or truncation",
                "vLLM scores greedy responses without temperature and truncation",
                lambda r: not r.do_sample and (r.temperature, r.top_k, r.top_p, r.min_p) != (1.0, -1, 1.0, 0.0),
                "Set rollout.temperature=1, top_k=-1, top_p=1 and min_p=0.",
            ),
        ),
    ),
    "ignore_eos": FieldSupport("true: no `SamplingParams.stop_token_ids`, and no stop strings"),
    "stop": FieldSupport("checked after each step; the response ends with the token that completes the string"),
    "prompt_length": FieldSupport("with `response_length`, the longest sequence"),
    "response_length": passed("SamplingParams.max_tokens"),
    "max_model_len": passed("max_model_len", does="null: `prompt_length + response_length`"),
    "dtype": passed("dtype", does="null: `model.dtype`"),
    "quantization": FieldSupport(
        "`fp8`: `quantization_config` of config.json, with Triton's kernels, on GPUs from Ada and Hopper on",
        refuses=(
            Refusal(
                "`fp8_per_tensor`",
                "vLLM has one scale per fused matrix, mrl one for each of its parts",
                lambda r: r.quantization == "fp8_per_tensor",
                "Set rollout.quantization=fp8.",
            ),
            Refusal(
                "`fp8`",
                "vLLM's FP8 kernels for CPUs repack the weights that weight sync writes",
                lambda r: r.quantization == "fp8",
                "Remove it, or use rollout.name=native.",
                cpu_only=True,
            ),
        ),
    ),
    "tensor_model_parallel_size": passed("tensor_parallel_size", does="with any launcher"),
    "pipeline_model_parallel_size": refused(
        "only built TensorRT-LLM engines support pipeline parallelism",
        lambda r: r.pipeline_model_parallel_size != 1,
        "Raise rollout.tensor_model_parallel_size instead, or use rollout.name=trtllm_engine.",
    ),
    "expert_parallel_size": passed(
        "enable_expert_parallel",
        refuses=(
            Refusal(
                "between 1 and the replica size",
                "vLLM either shards every expert over the ranks of a replica or distributes complete experts over them",
                lambda r: r.expert_parallel_size not in (1, r.tensor_model_parallel_size),
                "Set it to 1, or to rollout.tensor_model_parallel_size.",
            ),
            Refusal(
                "above 1",
                "vLLM 0.32 crashes there",
                lambda r: r.expert_parallel_size > 1,
                "Set it to 1: the ranks then shard each expert.",
                cpu_only=True,
            ),
        ),
    ),
    "moe_tensor_parallel_size": FieldSupport("must be replica size / `expert_parallel_size`"),
    "max_num_seqs": passed("max_num_seqs"),
    "max_num_batched_tokens": passed(
        "max_num_batched_tokens",
        refuses=(
            Refusal(
                "below `max_num_seqs`",
                "vLLM needs room for a token of each of rollout.max_num_seqs sequences in a forward",
                lambda r: r.max_num_batched_tokens < r.max_num_seqs,
                "Raise it, or lower rollout.max_num_seqs.",
            ),
        ),
    ),
    "enable_chunked_prefill": passed(
        "enable_chunked_prefill",
        refuses=(
            Refusal(
                "if false and `max_num_batched_tokens` is below the longest sequence",
                "a complete sequence must then fit into a forward of vLLM",
                lambda r: not r.enable_chunked_prefill and r.max_num_batched_tokens < r.max_sequence_length,
                "Raise rollout.max_num_batched_tokens to rollout.max_model_len, or to prompt_length + response_length.",
            ),
        ),
    ),
    "enable_prefix_caching": passed("enable_prefix_caching", does="the cache is dropped in every weight sync"),
    "gpu_memory_utilization": passed(
        "kv_cache_memory_bytes",
        does="fraction of the free memory at start, less the weights, and at most the size of `max_num_seqs` sequences "
        "of full length",
    ),
    "free_cache_engine": passed(
        "enable_sleep_mode",
        does="true: KV cache and weights leave a GPU between rollouts, the weights into pinned host memory; on a CPU "
        "vLLM frees nothing",
    ),
    "enforce_eager": passed("enforce_eager", does="always on a CPU"),
    "true_on_policy": no_true_on_policy(
        "its kernels differ from the actor's; `VLLM_BATCH_INVARIANT`, on GPUs, only makes them batch-invariant"
    ),
    "enable_rollout_routing_replay": FieldSupport("vLLM's own hooks on its routers (`RoutedExpertsCapturer`)"),
    "engine_kwargs": FieldSupport(
        "arguments of `LLM` by their own names, under `vllm`: [which](vllm.md#arguments-of-its-own)",
        refuses=(OTHER_ENGINE,),
    ),
    "val_kwargs.temperature": FieldSupport(
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
    "val_kwargs.min_p": FieldSupport(f"as `min_p`, in evaluations: {_ORDER}"),
    "checkpoint_engine.canary": FieldSupport("null: yes; syncs weights twice at start and compares responses"),
}


def refusals_on_a_cpu(rollout: RolloutConfig) -> Iterator[str]:
    """Yields a message for each value that vLLM supports only on GPUs."""
    anywhere = set(refusals(FIELDS, rollout, on_a_cpu=False))
    return (message for message in refusals(FIELDS, rollout, on_a_cpu=True) if message not in anywhere)

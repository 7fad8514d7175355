"""Arguments of TensorRT-LLM's `LLM`: which ones `rollout.engine_kwargs.trtllm` may set, and why not the others.

Classifies the fields of 1.2.1's `TorchLlmArgs`, and of the four nested classes in which mrl sets fields
(`llmapi/llm_args.py`), as free, derived (determined by another key or by mrl) or refused (it would break an assumption
of mrl, or have no effect). Fields of the installed version are checked when the engine starts (`engine_kwargs.py`).
Imports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VERSION = "1.2"
"""Release line that has these fields."""

SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
}
"""Nested config class of a field. Its own fields are listed as section.field; those not listed are reserved for mrl."""

MAPPING = "mapping"
"""Type of a free field whose keys only TensorRT-LLM validates."""


@dataclass(frozen=True)
class FieldRule:
    """Rule for one argument.

    Attributes:
        kind: "free", "derived" or "refused".
        why: Reason a field is not free, and what to set instead.
        takes: Type annotation of a free field's value, or MAPPING.
    """

    kind: Literal["free", "derived", "refused"]
    why: str = ""
    takes: str = ""


Rows = dict[str, str]

FREE: Rows = {
    "bool": "disable_flashinfer_sampling enable_autotuner enable_layerwise_nvtx_marker "
    "fail_fast_on_attention_window_too_large print_iter_log sampler_force_async_worker "
    "kv_cache_config.onboard_blocks kv_cache_config.enable_partial_reuse kv_cache_config.copy_on_partial_reuse "
    "cuda_graph_config.enable_padding moe_config.disable_finalize_fusion",
    "int": "batch_wait_timeout_iters garbage_collection_gen0_threshold cuda_graph_config.max_batch_size "
    "kv_cache_config.tokens_per_block kv_cache_config.max_gpu_total_bytes",
    "Optional[int]": "kv_cache_config.max_tokens kv_cache_config.host_cache_size "
    "kv_cache_config.secondary_offload_min_priority moe_config.max_num_tokens",
    "float": "batch_wait_timeout_ms batch_wait_max_tokens_ratio",
    "Literal['TRTLLM', 'FLASHINFER', 'VANILLA']": "attn_backend",
    "Literal['auto', 'fp8', 'nvfp4']": "kv_cache_config.dtype",
    "Literal['AUTO', 'CUTLASS', 'CUTEDSL', 'WIDEEP', 'TRTLLM', 'DEEPGEMM', 'DENSEGEMM', 'VANILLA', 'TRITON', 'MARLIN', "
    "'MEGAMOE_DEEPGEMM']": "moe_config.backend",
    "List[int]": "cuda_graph_config.batch_sizes",
    "Literal['MAX_UTILIZATION', 'GUARANTEED_NO_EVICT', 'STATIC_BATCH']": "scheduler_config.capacity_scheduler_policy",
    "Literal['FIRST_COME_FIRST_SERVED', 'EQUAL_PROGRESS']": "scheduler_config.context_chunking_policy",
    MAPPING: "speculative_config torch_compile_config",
}
"""Free fields by type annotation, separated by spaces.

The literals are those of 1.2 or 1.3: of `get_attention_backend`, which falls back to TRTLLM for any other value and
also has star attention, which is not full attention; of `_VALID_KV_CACHE_DTYPES`; of `MoeConfig.backend`.
"""

AT_LEAST_ONE = (
    "kv_cache_config.tokens_per_block", "kv_cache_config.max_tokens", "moe_config.max_num_tokens",
    "garbage_collection_gen0_threshold",
)  # fmt: skip
"""Numeric fields that must be at least 1; all other numbers must be at least 0."""

DERIVED: Rows = {
    "set model.path": "model",
    "set model.tokenizer: the engine is given token ids and has no tokenizer": "tokenizer tokenizer_mode "
    "custom_tokenizer skip_tokenizer_init tokenizer_revision revision postprocess_tokenizer_dir",
    "no code of a model folder is run": "trust_remote_code",
    "set rollout.tensor_model_parallel_size": "tensor_parallel_size",
    "set rollout.pipeline_model_parallel_size, which must be 1": "pipeline_parallel_size pp_partition",
    "set rollout.expert_parallel_size": "moe_expert_parallel_size",
    "set rollout.moe_tensor_parallel_size": "moe_tensor_parallel_size",
    "it is the number of devices visible to a rank, which are all of its host": "gpus_per_node",
    "set rollout.dtype": "dtype",
    "set rollout.max_num_seqs": "max_batch_size",
    "set rollout.max_num_batched_tokens": "max_num_tokens",
    "set rollout.max_model_len, or rollout.prompt_length and rollout.response_length": "max_seq_len max_input_len",
    "set rollout.enable_chunked_prefill": "enable_chunked_prefill",
    "set rollout.enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "set rollout.gpu_memory_utilization": "kv_cache_config.free_gpu_memory_fraction",
    "set rollout.free_cache_engine": "enable_sleep sleep_config",
    "set rollout.enable_rollout_routing_replay": "enable_return_routed_experts",
    "it is `dummy`: the first weight sync fills the weights, through the name mapper of this format":
        "load_format checkpoint_loader checkpoint_format",
    "it follows from the sampling settings and the features of the installed samplers": "sampler_type "
    "disable_overlap_scheduler",
    "it is NCCL, since TensorRT-LLM's own kernels give wrong results with several engines at a time":
        "allreduce_strategy",
    "the executor runs in the ranks' own processes": "backend mpi_session _mpi_session executor_cls orchestrator_type "
    "ray_worker_extension_cls ray_placement_config",
    "set it in the environment of the job": "env_overrides",
}  # fmt: skip
"""Derived fields by what determines them."""

_TEXT = "it would have no effect: mrl requests token ids, not text"
_METRICS = "it would have no effect: nothing reads TensorRT-LLM's own statistics; mrl's are perf/rollout/*"

REFUSED: Rows = {
    "every rank of a replica answers the same requests; raise the number of replicas instead": "enable_attention_dp "
    "enable_lm_head_tp_in_adp attention_dp_config",
    "a replica has no context parallelism, and rollout.expert_parallel_size shards its experts":
        "context_parallel_size cp_config moe_cluster_parallel_size",
    "a weight sync sends each expert to the ranks that have it at the start": "moe_config.load_balancer",
    "the actor computes with full attention, and its log-probabilities would be those of another model":
        "sparse_attention_config kv_cache_config.max_attention_window kv_cache_config.sink_token_length",
    "mrl merges the adapters of actor.lora into the weights that it sends": "enable_lora lora_config peft_cache_config",
    "a weight sync sends weights of rollout.dtype": "force_dynamic_quantization",
    "it would change the sampling distribution unknown to training": "batched_logits_processor max_beam_width",
    "it would have no effect: no request uses it": "guided_decoding_backend gather_generation_logits "
    "stream_interval",
    "prefill and decoding share the ranks": "cache_transceiver_config kv_connector_config",
    "memory of the cache must leave the device between rollouts": "kv_cache_config.use_uvm",
    "no images: the model reads text": "mm_encoder_only",
    _TEXT: "num_postprocess_workers reasoning_parser",
    _METRICS: "iter_stats_max_iterations request_stats_max_iterations enable_iter_perf_stats enable_iter_req_stats "
    "perf_metrics_max_requests return_perf_metrics otlp_traces_endpoint max_stats_len "
    "kv_cache_config.event_buffer_max_size kv_cache_config.attention_dp_events_gather_period_ms",
    "it would have no effect: it is read for other models only, Llama 4, Mamba, those with an encoder":
        "enable_min_latency kv_cache_config.mamba_ssm_cache_dtype kv_cache_config.cross_kv_cache_fraction",
    "it would have no effect: it is read by the TensorRT backend only": "decoding_config "
    "scheduler_config.dynamic_batch_config",
    "it would have no effect: no weights are in NVFP4": "nvfp4_gemm_config moe_config.use_low_precision_moe_combine",
}  # fmt: skip
"""Refused fields by reason."""


def _table() -> dict[str, FieldRule]:
    free = {name: FieldRule("free", takes=takes) for takes, names in FREE.items() for name in names.split()}
    derived = {name: FieldRule("derived", why) for why, names in DERIVED.items() for name in names.split()}
    refused = {name: FieldRule("refused", why) for why, names in REFUSED.items() for name in names.split()}
    return free | derived | refused


TABLE = _table()
"""Rules by field, or by section.field."""


def markdown() -> str:
    """Returns the table for the documentation."""
    free = [f"| {_names(names)} | {_words(takes)} |" for takes, names in FREE.items()]
    others = [f"| {_names(names)} | {why} |" for rows in (DERIVED, REFUSED) for why, names in rows.items()]
    heads = ("| Passed on | Takes |", "| Refused | Because |")
    return "\n\n".join("\n".join([head, "|---|---|", *rows]) for head, rows in zip(heads, (free, others), strict=True))


def _names(names: str) -> str:
    return " ".join(f"`{name}`" for name in names.split())


def _words(takes: str) -> str:
    return "a mapping of TensorRT-LLM's own keys" if takes == MAPPING else f"`{takes}`"


if __name__ == "__main__":
    print(markdown())  # noqa: T201 -- output of the command

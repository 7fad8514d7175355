"""Classification of vLLM's engine arguments for `rollout.engine_kwargs.vllm`: passed on, or refused and why.

The fields of `EngineArgs` of vLLM 0.32 are passed on (`FREE`), set by mrl or in conflict with it (`DERIVED`), or
without effect here (`IDLE`). So a mistake is found even where vLLM is not installed; where it is, its own fields count
too.
"""

from __future__ import annotations

from collections.abc import Iterable

VERSION = "0.32"
INSTALL = f"mrl was written for vLLM {VERSION}. Install that version, or use rollout.name=native."
"""Advice if vLLM's internals differ from those of `VERSION`."""

MODEL = "engine and actor would not be the same model"
DRAWS = "it would change the sampling distribution"
HOST = "weight sync writes into weights on the device"
KERNEL = "some kernels reorder experts, which weight sync would scramble; mrl sets triton"
SEVERAL = "one engine is one replica of rollout.tensor_model_parallel_size ranks; the job creates the replicas"
TEXT = "mrl exchanges token ids with the engine"
QUANTIZED = "set rollout.quantization"
SAMPLING = "the keys of rollout set the sampling"
DRAFTS = "on a CPU vLLM 0.32 accepts and scores drafted tokens at a wrong temperature; it was not tried on GPUs"
OUTLIVES = "keys and values that it stores elsewhere would be used with newer weights"
LOADED = "the weights come from the actor in every weight sync"

KEYS = {
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "enable_expert_parallel": "rollout.expert_parallel_size",
    "dtype": "rollout.dtype",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
    "distributed_timeout_seconds": "run.collective_timeout_s",
    "cpu_distributed_timeout_seconds": "run.collective_timeout_s",
}
"""Arguments that a key of mrl sets."""

DERIVED = {
    **{name: f"set {key}" for name, key in KEYS.items()},
    "model": "model.path and model.preset name the model",
    "tokenizer": TEXT,
    "tokenizer_mode": TEXT,
    "skip_tokenizer_init": TEXT,
    "load_format": LOADED,
    "model_weights": LOADED,
    "quantization": QUANTIZED,
    "quantization_config": QUANTIZED,
    "cpu_offload_gb": HOST,
    "cpu_offload_params": HOST,
    "offload_backend": HOST,
    "offload_group_size": HOST,
    "offload_num_in_group": HOST,
    "offload_prefetch_step": HOST,
    "offload_params": HOST,
    "moe_backend": KERNEL,
    "kernel_config": KERNEL,
    "linear_backend": "it follows from rollout.quantization",
    "hf_overrides": MODEL,
    "hf_config_path": MODEL,
    "model_class_overrides": MODEL,
    "model_impl": MODEL,
    "enable_lora": "it follows from actor.lora",
    "kv_sharing_fast_prefill": MODEL,
    "trust_remote_code": "mrl runs no code of a model's folder",
    "watermark": DRAWS,
    "watermark_config": DRAWS,
    "logits_processors": DRAWS,
    "enable_trace_replay": DRAWS,
    "distributed_executor_backend": "the engine runs in the training ranks",
    "pipeline_parallel_size": SEVERAL,
    "data_parallel_size": SEVERAL,
    "data_parallel_rank": SEVERAL,
    "prefill_context_parallel_size": SEVERAL,
    "decode_context_parallel_size": SEVERAL,
    "nnodes": SEVERAL,
    "node_rank": SEVERAL,
    "enable_eplb": "weight sync would not follow experts that move",
    "kv_cache_memory_bytes": "it follows from rollout.gpu_memory_utilization and the longest sequences",
    "logprobs_mode": "mrl needs log-probabilities of the distribution that is sampled from",
    "max_logprobs": "mrl requests that of the sampled token only",
    "return_sampling_mask": "nothing reads it",
    "generation_config": SAMPLING,
    "override_generation_config": SAMPLING,
    "async_scheduling": "the ranks of a replica must schedule alike without communication",
    "seed": "each sample has its own, from run.seed",
    "speculative_config": DRAFTS,
    "spec_method": DRAFTS,
    "spec_model": DRAFTS,
    "spec_tokens": DRAFTS,
    "kv_transfer_config": OUTLIVES,
    "kv_offloading_size": OUTLIVES,
    "kv_offloading_backend": OUTLIVES,
    "ec_transfer_config": OUTLIVES,
    "device_ids": "each rank's engine is on the rank's device",
    "worker_cls": "mrl uses internals of vLLM's default",
    "worker_extension_cls": "mrl uses internals of vLLM's default",
    "disable_log_stats": "the run's metrics include those of the engine",
}
"""Arguments that mrl sets -> key to set instead, or the reason."""

FREE = {
    "attention": "attention_backend attention_config disable_cascade_attn",
    "KV cache": "kv_cache_dtype kv_cache_dtype_skip_layers block_size prefix_caching_hash_algo prefix_match_unit",
    "CUDA graphs, compilation": "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size "
    "optimization_level performance_mode ir_op_priority enable_flashinfer_autotune jit_monitor_mode "
    "jit_monitor_verbose",
    "scheduling": "max_num_active_seqs max_num_scheduled_tokens long_prefill_token_threshold "
    "long_prefill_token_threshold_adaptive prefill_schedule_interval scheduler_reserve_full_isl",
    "between the ranks of a replica": "disable_custom_all_reduce",
    "memory while the engine sleeps": "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
    "random numbers": "use_fp64_gumbel",
    "debugging": "enable_layerwise_nvtx_tracing fail_on_environ_validation",
}
"""Subject -> arguments that are passed on."""

IDLE = {
    LOADED: "download_dir safetensors_load_strategy "
    "safetensors_prefetch_block_size safetensors_prefetch_num_threads ignore_patterns model_loader_extra_config "
    "pt_load_map_location use_tqdm_on_load max_parallel_loading_workers enable_ep_weight_filter "
    "weight_transfer_config sleep_preserve_parameter_names allow_deprecated_quantization",
    "mrl writes the model's config.json, and exchanges token ids with the engine": "config_format hf_token revision "
    "code_revision tokenizer_revision renderer_num_workers tokens_only",
    "the engine generates with the actor's model": "runner convert pooler_config disable_sliding_window "
    "diffusion_config",
    "it is only for models that mrl does not support: multimodal, state-space, sparse attention, some windows":
        "allowed_local_media_path allowed_media_domains default_mm_loras disable_chunked_mm_input ec_manager_config "
        "enable_mm_embeds enable_mm_processor_stats enable_tower_connector_lora interleave_mm_strings "
        "io_processor_plugin language_model_only limit_mm_per_prompt media_io_kwargs mm_device_do_normalize "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin "
        "mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb "
        "mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method video_pruning_rate "
        "enable_shm_tensor_arena enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
        "mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config "
        "mamba_ssm_cache_dtype mamba_ssu_algorithm use_replayssm replayssm_buffer_len gdn_prefill_backend "
        "kda_decode_backend kda_prefill_backend additional_config engram_config enable_hc_sp "
        "sparse_indexer_topk_backend swa_bounded_replay prefix_cache_retention_interval "
        "disable_hybrid_kv_cache_manager",
    DERIVED["enable_lora"]: "enable_mixed_moe_lora_format enable_moe_shared_loras fully_sharded_loras "
    "lora_dtype lora_target_modules max_cpu_loras max_lora_cls_labels max_lora_rank max_loras specialize_active_lora",
    DERIVED["gpu_memory_utilization"]: "num_gpu_blocks_override",
    DERIVED["enable_return_routed_experts"]: "aux_output_config",
    SEVERAL: "all2all_backend cp_kv_cache_interleave_size data_parallel_address data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
        "data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate "
        "disable_nccl_for_dp_synchronization dp_sync_interval elastic_ep_max_dp_size enable_dbo enable_elastic_ep "
        "ubatch_size",
    "weight sync assumes that experts are distributed in order":
        "expert_placement_strategy eplb_config",
    "the launcher starts and connects the ranks": "master_addr master_port numa_bind numa_bind_cpus "
    "numa_bind_nodes ray_workers_use_nsight",
    "there is no server": "served_model_name max_num_queued_reqs max_num_queued_tokens kv_events_config "
    "enable_fault_tolerance fault_tolerance_config shutdown_timeout",
    "no request uses it": "structured_outputs_config reasoning_config reasoning_parser reasoning_parser_plugin "
    "enable_prompt_embeds scheduling_policy profiler_config",
    "stop strings would be found late": "stream_interval",
    DERIVED["worker_cls"]: "scheduler_cls",
    "only vLLM's newer runner supports it": "enable_batch_sharded_sampling",
    "set VLLM_LOGGING_LEVEL in the environment of the job": "log_config_file log_level logging_config "
    "enable_logging_iteration_details",
    DERIVED["disable_log_stats"]: "aggregate_engine_logging collect_detailed_traces cudagraph_metrics "
    "custom_histogram_buckets enable_mfu_metrics kv_cache_metrics kv_cache_metrics_sample otlp_traces_endpoint "
    "per_request_spec_decode_metrics show_hidden_metrics_for_version",
}  # fmt: skip
"""Reason -> arguments that have no effect here, or another effect than in a standalone vLLM."""

REFUSED = DERIVED | {name: why for why, names in IDLE.items() for name in names.split()}
"""Argument -> reason for the refusal."""

NAMES = REFUSED.keys() | {name for names in FREE.values() for name in names.split()}
"""Names of all arguments."""


def markdown() -> str:
    """Returns the tables of the documentation: passed-on arguments by subject, refused ones by reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in REFUSED.items():
        reasons.setdefault(why, []).append(name)
    free = [f"| {_ticked(names.split())} | {about} |" for about, names in FREE.items()]
    refused = [f"| {_ticked(names)} | {why} |" for why, names in reasons.items()]
    heads = ("| Passed on | For |", "| Refused | Because |")
    rows = zip(heads, (free, refused), strict=True)
    return "\n\n".join("\n".join([head, "|---|---|", *lines]) for head, lines in rows)


def _ticked(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(markdown())  # noqa: T201 -- the output of this command

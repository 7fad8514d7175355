# Written by tests/engines/trtllm/stubs.py from signatures.json.
from enum import Enum
from enum import StrEnum
from typing import Any
class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = 'MAX_UTILIZATION'
    GUARANTEED_NO_EVICT = 'GUARANTEED_NO_EVICT'
    STATIC_BATCH = 'STATIC_BATCH'
class ContextChunkingPolicy(StrEnum):
    FIRST_COME_FIRST_SERVED = 'FIRST_COME_FIRST_SERVED'
    EQUAL_PROGRESS = 'EQUAL_PROGRESS'
class CudaGraphConfig:
    batch_sizes: list[int] | None
    max_batch_size: int
    enable_padding: bool
    def __init__(self, *, batch_sizes: list[int] | None = ..., max_batch_size: int = ..., enable_padding: bool = ...) -> None: ...
    model_fields: dict[str, Any]
class DecodingBaseConfig:
    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any: ...
class ExecutorMemoryType(StrEnum):
    SAMPLER = 'sampler'
    DRAFTER = 'drafter'
    GUIDED_DECODER = 'guided_decoder'
    SPEC_RESOURCES = 'spec_resource_manager'
    INIT_KV_CACHE = '_no_capture_init_kv_cache'
    INIT_EXTRA_RESOURCES = '_no_capture_init_extra_resources'
    MODEL_EXTRA = 'model_extra'
    EXTRA_RESOURCES = 'executor_extra'
    KV_CACHE = 'kv_cache'
    MODEL_ENGINE_MAIN = 'model'
    MODEL_ENGINE_DRAFT = 'draft_model'
    MODEL_WEIGHTS_MAIN = 'model_weights'
    MODEL_WEIGHTS_DRAFT = 'draft_model_weights'
class KvCacheConfig:
    enable_block_reuse: bool
    max_tokens: int | None
    max_attention_window: Any
    sink_token_length: Any
    free_gpu_memory_fraction: float
    host_cache_size: int | None
    onboard_blocks: bool
    cross_kv_cache_fraction: Any
    secondary_offload_min_priority: Any
    event_buffer_max_size: int
    attention_dp_events_gather_period_ms: int
    enable_partial_reuse: bool
    copy_on_partial_reuse: bool
    use_uvm: bool
    max_gpu_total_bytes: int
    dtype: str
    mamba_ssm_cache_dtype: str
    tokens_per_block: int
    def __init__(self, *, enable_block_reuse: bool = ..., max_tokens: int | None = ..., max_attention_window: Any = ..., sink_token_length: Any = ..., free_gpu_memory_fraction: float = ..., host_cache_size: int | None = ..., onboard_blocks: bool = ..., cross_kv_cache_fraction: Any = ..., secondary_offload_min_priority: Any = ..., event_buffer_max_size: int = ..., attention_dp_events_gather_period_ms: int = ..., enable_partial_reuse: bool = ..., copy_on_partial_reuse: bool = ..., use_uvm: bool = ..., max_gpu_total_bytes: int = ..., dtype: str = ..., mamba_ssm_cache_dtype: str = ..., tokens_per_block: int = ...) -> None: ...
    model_fields: dict[str, Any]
class LoadFormat(Enum):
    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2
class MoeConfig:
    backend: str
    max_num_tokens: int | None
    load_balancer: Any
    disable_finalize_fusion: bool
    use_low_precision_moe_combine: bool
    def __init__(self, *, backend: str = ..., max_num_tokens: int | None = ..., load_balancer: Any = ..., disable_finalize_fusion: bool = ..., use_low_precision_moe_combine: bool = ...) -> None: ...
    model_fields: dict[str, Any]
class NGramDecodingConfig:
    max_draft_len: int | None
    max_concurrency: int | None
    max_matching_ngram_size: int
    is_keep_all: bool
    is_use_oldest: bool
    is_public_pool: bool
    def __init__(self, *, max_draft_len: int | None = ..., max_concurrency: int | None = ..., max_matching_ngram_size: int = ..., is_keep_all: bool = ..., is_use_oldest: bool = ..., is_public_pool: bool = ...) -> None: ...
class SamplerType(StrEnum):
    TRTLLMSampler = 'TRTLLMSampler'
    TorchSampler = 'TorchSampler'
    auto = 'auto'
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy
    context_chunking_policy: ContextChunkingPolicy | None
    dynamic_batch_config: Any
    def __init__(self, *, capacity_scheduler_policy: CapacitySchedulerPolicy = ..., context_chunking_policy: ContextChunkingPolicy | None = ..., dynamic_batch_config: Any = ...) -> None: ...
    model_fields: dict[str, Any]
class SleepConfig:
    restore_modes: dict[Any, str]
    def __init__(self, *, restore_modes: dict[Any, str] = ...) -> None: ...
class TorchLlmArgs:
    model: str
    tokenizer: str | None
    tokenizer_mode: str
    custom_tokenizer: Any
    skip_tokenizer_init: bool
    trust_remote_code: bool
    tensor_parallel_size: int
    dtype: str
    revision: str | None
    tokenizer_revision: str | None
    pipeline_parallel_size: int
    context_parallel_size: int
    gpus_per_node: int | None
    moe_cluster_parallel_size: Any
    moe_tensor_parallel_size: int | None
    moe_expert_parallel_size: int | None
    enable_attention_dp: bool
    enable_lm_head_tp_in_adp: bool
    pp_partition: Any
    cp_config: Any
    load_format: str
    fail_fast_on_attention_window_too_large: bool
    enable_lora: bool
    lora_config: Any
    kv_cache_config: KvCacheConfig
    enable_chunked_prefill: bool
    guided_decoding_backend: Any
    batched_logits_processor: Any
    iter_stats_max_iterations: Any
    request_stats_max_iterations: Any
    peft_cache_config: Any
    scheduler_config: SchedulerConfig
    cache_transceiver_config: Any
    sparse_attention_config: Any
    speculative_config: Any
    max_batch_size: int | None
    max_input_len: int | None
    max_seq_len: int | None
    max_beam_width: int | None
    max_num_tokens: int | None
    gather_generation_logits: bool
    num_postprocess_workers: int
    postprocess_tokenizer_dir: Any
    reasoning_parser: Any
    decoding_config: Any
    mpi_session: object | None
    otlp_traces_endpoint: Any
    backend: Any
    return_perf_metrics: bool
    orchestrator_type: str | None
    env_overrides: Any
    garbage_collection_gen0_threshold: int
    cuda_graph_config: CudaGraphConfig | None
    attention_dp_config: Any
    disable_overlap_scheduler: bool
    moe_config: MoeConfig | None
    nvfp4_gemm_config: Any
    attn_backend: str
    sampler_type: str
    sampler_force_async_worker: bool
    enable_iter_perf_stats: bool
    enable_iter_req_stats: bool
    print_iter_log: bool
    perf_metrics_max_requests: int
    batch_wait_timeout_ms: float
    batch_wait_timeout_iters: int
    batch_wait_max_tokens_ratio: float
    torch_compile_config: Any
    enable_autotuner: bool
    enable_layerwise_nvtx_marker: bool
    enable_min_latency: bool
    stream_interval: int
    force_dynamic_quantization: bool
    allreduce_strategy: str
    checkpoint_loader: Any
    checkpoint_format: Any
    kv_connector_config: Any
    mm_encoder_only: bool
    ray_worker_extension_cls: Any
    ray_placement_config: Any
    enable_sleep: bool
    sleep_config: SleepConfig | None
    enable_return_routed_experts: bool
    disable_flashinfer_sampling: bool
    max_stats_len: int
    def __init__(self, *, model: str, tokenizer: str | None = ..., tokenizer_mode: str = ..., custom_tokenizer: Any = ..., skip_tokenizer_init: bool = ..., trust_remote_code: bool = ..., tensor_parallel_size: int = ..., dtype: str = ..., revision: str | None = ..., tokenizer_revision: str | None = ..., pipeline_parallel_size: int = ..., context_parallel_size: int = ..., gpus_per_node: int | None = ..., moe_cluster_parallel_size: Any = ..., moe_tensor_parallel_size: int | None = ..., moe_expert_parallel_size: int | None = ..., enable_attention_dp: bool = ..., enable_lm_head_tp_in_adp: bool = ..., pp_partition: Any = ..., cp_config: Any = ..., load_format: str = ..., fail_fast_on_attention_window_too_large: bool = ..., enable_lora: bool = ..., lora_config: Any = ..., kv_cache_config: KvCacheConfig = ..., enable_chunked_prefill: bool = ..., guided_decoding_backend: Any = ..., batched_logits_processor: Any = ..., iter_stats_max_iterations: Any = ..., request_stats_max_iterations: Any = ..., peft_cache_config: Any = ..., scheduler_config: SchedulerConfig = ..., cache_transceiver_config: Any = ..., sparse_attention_config: Any = ..., speculative_config: Any = ..., max_batch_size: int | None = ..., max_input_len: int | None = ..., max_seq_len: int | None = ..., max_beam_width: int | None = ..., max_num_tokens: int | None = ..., gather_generation_logits: bool = ..., num_postprocess_workers: int = ..., postprocess_tokenizer_dir: Any = ..., reasoning_parser: Any = ..., decoding_config: Any = ..., _mpi_session: object | None = ..., otlp_traces_endpoint: Any = ..., backend: Any = ..., return_perf_metrics: bool = ..., orchestrator_type: str | None = ..., env_overrides: Any = ..., garbage_collection_gen0_threshold: int = ..., cuda_graph_config: CudaGraphConfig | None = ..., attention_dp_config: Any = ..., disable_overlap_scheduler: bool = ..., moe_config: MoeConfig | None = ..., nvfp4_gemm_config: Any = ..., attn_backend: str = ..., sampler_type: str = ..., sampler_force_async_worker: bool = ..., enable_iter_perf_stats: bool = ..., enable_iter_req_stats: bool = ..., print_iter_log: bool = ..., perf_metrics_max_requests: int = ..., batch_wait_timeout_ms: float = ..., batch_wait_timeout_iters: int = ..., batch_wait_max_tokens_ratio: float = ..., torch_compile_config: Any = ..., enable_autotuner: bool = ..., enable_layerwise_nvtx_marker: bool = ..., enable_min_latency: bool = ..., stream_interval: int = ..., force_dynamic_quantization: bool = ..., allreduce_strategy: str = ..., checkpoint_loader: Any = ..., checkpoint_format: Any = ..., kv_connector_config: Any = ..., mm_encoder_only: bool = ..., ray_worker_extension_cls: Any = ..., ray_placement_config: Any = ..., enable_sleep: bool = ..., sleep_config: SleepConfig | None = ..., enable_return_routed_experts: bool = ..., disable_flashinfer_sampling: bool = ..., max_stats_len: int = ...) -> None: ...
    model_fields: dict[str, Any]

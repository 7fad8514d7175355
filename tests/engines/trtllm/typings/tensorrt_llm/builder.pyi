# Written by tests/engines/trtllm/stubs.py from signatures.json.
from tensorrt_llm.models import PretrainedModel
from typing import Any
class BuildConfig:
    max_input_len: int
    max_seq_len: int | None
    opt_batch_size: int
    max_batch_size: int
    max_beam_width: int
    max_num_tokens: int
    opt_num_tokens: int | None
    max_prompt_embedding_table_size: int
    kv_cache_type: Any
    gather_context_logits: bool
    gather_generation_logits: bool
    strongly_typed: bool
    force_num_profiles: int | None
    profiling_verbosity: str
    enable_debug_output: bool
    max_draft_len: int
    speculative_decoding_mode: Any
    use_refit: bool
    input_timing_cache: str | None
    output_timing_cache: str
    lora_config: Any
    weight_sparsity: bool
    weight_streaming: bool
    plugin_config: Any
    use_strip_plan: bool
    max_encoder_input_len: int
    dry_run: bool
    visualize_network: str | None
    monitor_memory: bool
    use_mrope: bool
    def __init__(self, *, max_input_len: int = ..., max_seq_len: int | None = ..., opt_batch_size: int = ..., max_batch_size: int = ..., max_beam_width: int = ..., max_num_tokens: int = ..., opt_num_tokens: int | None = ..., max_prompt_embedding_table_size: int = ..., kv_cache_type: Any = ..., gather_context_logits: bool = ..., gather_generation_logits: bool = ..., strongly_typed: bool = ..., force_num_profiles: int | None = ..., profiling_verbosity: str = ..., enable_debug_output: bool = ..., max_draft_len: int = ..., speculative_decoding_mode: Any = ..., use_refit: bool = ..., input_timing_cache: str | None = ..., output_timing_cache: str = ..., lora_config: Any = ..., weight_sparsity: bool = ..., weight_streaming: bool = ..., plugin_config: Any = ..., use_strip_plan: bool = ..., max_encoder_input_len: int = ..., dry_run: bool = ..., visualize_network: str | None = ..., monitor_memory: bool = ..., use_mrope: bool = ...) -> None: ...
class Engine:
    def save(self, engine_dir: str) -> None: ...
def build(model: PretrainedModel, build_config: BuildConfig) -> Engine | None: ...

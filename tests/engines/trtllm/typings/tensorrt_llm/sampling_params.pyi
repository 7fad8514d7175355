# Written by tests/engines/trtllm/stubs.py from signatures.json.
from enum import StrEnum
from typing import Any
class LogprobMode(StrEnum):
    RAW = 'raw'
    PROCESSED = 'processed'
class SamplingParams:
    end_id: int | None
    pad_id: int | None
    max_tokens: int
    bad: str | list[str] | None
    bad_token_ids: list[int] | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    embedding_bias: Any
    logits_processor: Any
    apply_batched_logits_processor: bool
    n: int
    best_of: int | None
    use_beam_search: bool
    top_k: int | None
    top_p: float | None
    top_p_min: Any
    top_p_reset_ids: Any
    top_p_decay: Any
    seed: int | None
    temperature: float | None
    min_tokens: int | None
    beam_search_diversity_rate: Any
    repetition_penalty: float | None
    presence_penalty: Any
    frequency_penalty: Any
    prompt_ignore_length: Any
    length_penalty: Any
    early_stopping: Any
    no_repeat_ngram_size: Any
    min_p: float | None
    beam_width_array: Any
    logprobs: int | None
    prompt_logprobs: int | None
    return_context_logits: bool
    return_generation_logits: bool
    exclude_input_from_output: bool
    return_encoder_output: bool
    return_perf_metrics: bool
    additional_model_outputs: Any
    lookahead_config: Any
    guided_decoding: Any
    ignore_eos: bool
    detokenize: bool
    add_special_tokens: bool
    truncate_prompt_tokens: Any
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    logprobs_mode: LogprobMode
    return_routed_experts: bool
    def __init__(self, *, end_id: int | None = ..., pad_id: int | None = ..., max_tokens: int = ..., bad: str | list[str] | None = ..., bad_token_ids: list[int] | None = ..., stop: str | list[str] | None = ..., stop_token_ids: list[int] | None = ..., include_stop_str_in_output: bool = ..., embedding_bias: Any = ..., logits_processor: Any = ..., apply_batched_logits_processor: bool = ..., n: int = ..., best_of: int | None = ..., use_beam_search: bool = ..., top_k: int | None = ..., top_p: float | None = ..., top_p_min: Any = ..., top_p_reset_ids: Any = ..., top_p_decay: Any = ..., seed: int | None = ..., temperature: float | None = ..., min_tokens: int | None = ..., beam_search_diversity_rate: Any = ..., repetition_penalty: float | None = ..., presence_penalty: Any = ..., frequency_penalty: Any = ..., prompt_ignore_length: Any = ..., length_penalty: Any = ..., early_stopping: Any = ..., no_repeat_ngram_size: Any = ..., min_p: float | None = ..., beam_width_array: Any = ..., logprobs: int | None = ..., prompt_logprobs: int | None = ..., return_context_logits: bool = ..., return_generation_logits: bool = ..., exclude_input_from_output: bool = ..., return_encoder_output: bool = ..., return_perf_metrics: bool = ..., additional_model_outputs: Any = ..., lookahead_config: Any = ..., guided_decoding: Any = ..., ignore_eos: bool = ..., detokenize: bool = ..., add_special_tokens: bool = ..., truncate_prompt_tokens: Any = ..., skip_special_tokens: bool = ..., spaces_between_special_tokens: bool = ..., logprobs_mode: LogprobMode = ..., return_routed_experts: bool = ...) -> None: ...

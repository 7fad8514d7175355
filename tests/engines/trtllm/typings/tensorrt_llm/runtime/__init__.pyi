# Written by tests/engines/trtllm/stubs.py from signatures.json.
from numpy import ndarray
from tensorrt_llm.runtime.generation import _Runtime
from torch import Tensor
from torch.cuda import Stream
from typing import Any
class GenerationSession:
    buffer: dict[str, Tensor] | None
    buffer_allocated: bool
    log_probs: Tensor
    runtime: _Runtime
class ModelRunner:
    @classmethod
    def from_dir(cls, engine_dir: str, *, max_output_len: int | None = ..., lora_dir: list[str] | None = ..., rank: int = ..., debug_mode: bool = ..., lora_ckpt_source: str = ..., medusa_choices: list[list[int]] | None = ..., stream: Stream | None = ..., gpu_weights_percent: float = ..., enable_context_fmha_fp32_acc: bool | None = ..., multi_block_mode: bool | None = ...) -> ModelRunner: ...
    def generate(self, batch_input_ids: list[Tensor], position_ids: list[Tensor] | None = ..., sampling_config: SamplingConfig | None = ..., prompt_table: str | Tensor | None = ..., prompt_tasks: str | None = ..., lora_uids: list[str] | None = ..., streaming: bool = ..., output_generation_logits: bool = ..., stopping_criteria: Any = ..., logits_processor: Any = ..., medusa_choices: list[list[int]] | None = ..., encoder_max_input_length: int | None = ..., encoder_input_features: list[Tensor] | None = ..., encoder_output_lengths: list[Tensor] | None = ..., cross_attention_masks: list[Tensor] | None = ..., **kwargs: Any) -> Any: ...
    session: GenerationSession
class SamplingConfig:
    end_id: int
    pad_id: int
    max_new_tokens: int
    num_beams: int
    num_return_sequences: int | None
    max_attention_window_size: int | None
    sink_token_length: int | None
    output_sequence_lengths: bool
    return_dict: bool
    stop_words_list: list[Any] | ndarray | Tensor | None
    bad_words_list: list[Any] | ndarray | Tensor | None
    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    top_p_decay: Tensor | None
    top_p_min: Tensor | None
    top_p_reset_ids: Tensor | None
    random_seed: int | Tensor | None
    length_penalty: float | Tensor
    early_stopping: int | Tensor
    repetition_penalty: float | Tensor
    min_length: int | Tensor
    presence_penalty: float | Tensor
    frequency_penalty: float | Tensor
    use_beam_hyps: bool
    min_p: float | Tensor
    def __init__(self, *, end_id: int, pad_id: int, max_new_tokens: int = ..., num_beams: int = ..., num_return_sequences: int | None = ..., max_attention_window_size: int | None = ..., sink_token_length: int | None = ..., output_sequence_lengths: bool = ..., return_dict: bool = ..., stop_words_list: list[Any] | ndarray | Tensor | None = ..., bad_words_list: list[Any] | ndarray | Tensor | None = ..., temperature: float | Tensor = ..., top_k: int | Tensor = ..., top_p: float | Tensor = ..., top_p_decay: Tensor | None = ..., top_p_min: Tensor | None = ..., top_p_reset_ids: Tensor | None = ..., random_seed: int | Tensor | None = ..., length_penalty: float | Tensor = ..., early_stopping: int | Tensor = ..., repetition_penalty: float | Tensor = ..., min_length: int | Tensor = ..., presence_penalty: float | Tensor = ..., frequency_penalty: float | Tensor = ..., use_beam_hyps: bool = ..., min_p: float | Tensor = ...) -> None: ...
    output_log_probs: bool

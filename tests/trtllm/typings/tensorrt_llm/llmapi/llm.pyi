# Written by tests/trtllm/stubs.py from signatures.json.
from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.executor.worker import GenerationExecutorWorker
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams
from typing import Any

class BaseLLM:
    def __init__(
        self,
        model: str,
        tokenizer: str | None = ...,
        tokenizer_mode: str = ...,
        skip_tokenizer_init: bool = ...,
        trust_remote_code: bool = ...,
        tensor_parallel_size: int = ...,
        dtype: str = ...,
        revision: str | None = ...,
        tokenizer_revision: str | None = ...,
        **kwargs: Any,
    ) -> None: ...
    _executor: GenerationExecutorWorker
    args: TorchLlmArgs
    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None = ...,
        use_tqdm: bool = ...,
        lora_request: Any = ...,
        prompt_adapter_request: Any = ...,
        kv_cache_retention_config: Any = ...,
        disaggregated_params: Any = ...,
        scheduling_params: Any = ...,
        cache_salt: Any = ...,
    ) -> Any: ...
    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = ...,
        lora_request: Any = ...,
        prompt_adapter_request: Any = ...,
        streaming: bool = ...,
        kv_cache_retention_config: Any = ...,
        disaggregated_params: Any = ...,
        trace_headers: Any = ...,
        _postproc_params: Any = ...,
        scheduling_params: Any = ...,
        cache_salt: Any = ...,
    ) -> GenerationResult: ...
    def shutdown(self) -> None: ...

class LLM(BaseLLM): ...

# Written by tests/engines/trtllm/stubs.py from signatures.json.
from queue import Queue
from torch import Tensor
from typing import Any
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: Any
    logprobs: list[dict[int, Logprob]] | list[float]
    prompt_logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None
    generation_logits: Tensor | None
    additional_context_outputs: Any
    additional_generation_outputs: Any
    disaggregated_params: Any
    request_perf_metrics: Any
    def __init__(self, *, index: int, text: str = ..., token_ids: list[int] = ..., cumulative_logprob: Any = ..., logprobs: list[dict[int, Logprob]] | list[float] = ..., prompt_logprobs: Any = ..., finish_reason: str | None = ..., stop_reason: int | str | None = ..., generation_logits: Tensor | None = ..., additional_context_outputs: Any = ..., additional_generation_outputs: Any = ..., disaggregated_params: Any = ..., request_perf_metrics: Any = ...) -> None: ...
    routed_experts: Tensor | None
class GenerationResult:
    def abort(self) -> None: ...
    queue: Queue[Any]
    outputs: list[CompletionOutput]
    def result(self, timeout: float | None = ...) -> GenerationResult: ...
class Logprob:
    logprob: float
    rank: int | None
    def __init__(self, *, logprob: float, rank: int | None = ...) -> None: ...

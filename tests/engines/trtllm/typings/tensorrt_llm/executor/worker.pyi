# Written by tests/engines/trtllm/stubs.py from signatures.json.
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.executor.executor import GenerationExecutor
from typing import Any
class GenerationExecutorWorker(GenerationExecutor):
    def __init__(self, engine: Any, executor_config: Any = ..., batched_logits_processor: Any = ..., postproc_worker_config: Any = ..., is_llm_executor: bool | None = ..., hf_model_dir: Any = ..., tokenizer: Any = ..., llm_args: Any = ...) -> None: ...
    engine: PyExecutor
    def shutdown(self) -> None: ...

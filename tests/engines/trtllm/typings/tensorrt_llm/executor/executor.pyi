# Written by tests/engines/trtllm/stubs.py from signatures.json.
from tensorrt_llm.executor.worker import GenerationExecutorWorker
from typing import Any
class GenerationExecutor:
    @staticmethod
    def create(engine: Any, executor_config: Any = ..., batched_logits_processor: Any = ..., model_world_size: int = ..., world_size: int = ..., mpi_session: object | None = ..., reuse_mpi_comm: bool = ..., return_logits: bool = ..., postproc_worker_config: Any = ..., is_llm_executor: Any = ..., hf_model_dir: Any = ..., tokenizer: Any = ..., llm_args: Any = ..., **args: Any) -> GenerationExecutorWorker: ...

from tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tensorrt_llm.executor.executor import GenerationExecutor
from tensorrt_llm.executor.result import GenerationResult
from tests.engines.trtllm.signature import signed

HOME = "tensorrt_llm.executor.worker.GenerationExecutorWorker."


class GenerationExecutorWorker(GenerationExecutor):
    @signed(HOME + "__init__")
    def __init__(
        self, engine, executor_config=None, batched_logits_processor=None, postproc_worker_config=None,
        is_llm_executor=None, hf_model_dir=None, tokenizer=None, llm_args=None,
    ):  # fmt: skip
        self.engine = create_py_executor(llm_args, hf_model_dir)

    def submit(self, request):
        result = GenerationResult(request)
        self.engine.enqueue(result)
        return result

    @signed(HOME + "shutdown")
    def shutdown(self):
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None

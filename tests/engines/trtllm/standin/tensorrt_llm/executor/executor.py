import os

from tensorrt_llm import _utils
from tensorrt_llm.faults import StandInError
from tests.engines.trtllm.signature import signed


class GenerationExecutor:
    @staticmethod
    @signed("tensorrt_llm.executor.executor.GenerationExecutor.create")
    def create(engine, **given):
        from tensorrt_llm.executor.worker import GenerationExecutorWorker

        if _utils.mpi_comm().Get_size() != 1:
            raise StandInError("in MPI's world of several ranks this would be no executor of one process")
        if os.environ.get("TLLM_WORKER_USE_SINGLE_PROCESS") != "1":
            raise StandInError("the executor would be in another process: TLLM_WORKER_USE_SINGLE_PROCESS is not set")
        names = ("hf_model_dir", "tokenizer", "llm_args", "is_llm_executor", "postproc_worker_config")
        return GenerationExecutorWorker(engine, **{name: given[name] for name in names})

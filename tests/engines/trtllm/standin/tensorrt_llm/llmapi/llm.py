import math
import os
from pathlib import Path

from tensorrt_llm import _utils, usage
from tensorrt_llm.executor.executor import GenerationExecutor
from tensorrt_llm.executor.result import GenerationRequest
from tensorrt_llm.faults import StandInError, fault
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tests.engines.trtllm.signature import signed

HOME = "tensorrt_llm.llmapi.llm.BaseLLM."
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TLLM_DISABLE_MPI")
"""Variables that a trainer's launcher leaves and that must be hidden from the engine's start."""


class LLM:
    @signed(HOME + "__init__")
    def __init__(self, model, tokenizer=None, **kwargs):
        left = [name for name in FOREIGN if name in os.environ]
        if left:
            raise StandInError(f"the environment has {left}")
        if os.environ.get("TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL") != "1":
            raise StandInError("TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL is not set")
        usage.report_usage()
        executor_cls = kwargs.pop("executor_cls", GenerationExecutor)
        known = {item.get("alias", name) for name, item in TorchLlmArgs.model_fields.items()} | {"backend"}
        for key in kwargs:
            if key not in known:
                raise ValueError(f"LLM got invalid argument: {key}")
        self.args = TorchLlmArgs(model=model, tokenizer=tokenizer, **kwargs)
        self._check(self.args)
        self._executor = executor_cls.create(
            None,
            model_world_size=self.args.tensor_parallel_size,
            mpi_session=self.args.mpi_session,
            reuse_mpi_comm=_utils.mpi_comm().Get_size() == self.args.tensor_parallel_size > 1,
            postproc_worker_config=None,
            is_llm_executor=True,
            hf_model_dir=Path(model),
            tokenizer=None,
            llm_args=self.args,
        )

    @staticmethod
    def _check(args):
        if not (Path(args.model) / "config.json").is_file():
            raise OSError(f"{args.model} has no config.json")
        cut, spread = args.moe_tensor_parallel_size, args.moe_expert_parallel_size
        if cut is not None and spread is not None and cut * spread != args.tensor_parallel_size:
            raise ValueError(f"moe_tp_size {cut} x moe_ep_size {spread} != tp_size {args.tensor_parallel_size}")
        if args.tensor_parallel_size > 1 and args.mpi_session is None:
            raise StandInError("LLM would start MPI workers in processes of their own")
        gpus_per_node = int(fault("devices") or args.tensor_parallel_size)
        num_hosts = math.ceil(args.tensor_parallel_size / gpus_per_node)
        if gpus_per_node < args.tensor_parallel_size // num_hosts:
            raise RuntimeError(f"only {gpus_per_node} GPUs available")
        if not 0 < args.kv_cache_config.free_gpu_memory_fraction <= 1:
            raise ValueError(f"free_gpu_memory_fraction={args.kv_cache_config.free_gpu_memory_fraction}")
        if args.load_format.upper() not in ("AUTO", "DUMMY", "VISION_ONLY"):
            raise ValueError(f"load_format={args.load_format}")

    @signed(HOME + "generate_async")
    def generate_async(self, inputs, sampling_params=None, **others):
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        if sampling_params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None, or pass end_id")
        return self._executor.submit(GenerationRequest(inputs["prompt_token_ids"], sampling_params))

    @signed(HOME + "shutdown")
    def shutdown(self):
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

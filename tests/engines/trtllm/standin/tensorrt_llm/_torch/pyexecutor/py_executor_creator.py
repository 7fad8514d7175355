"""The making of the executor, with what it leaves behind in the process.

As `_torch/pyexecutor/py_executor_creator.py: create_py_executor`: the KV cache's size is estimated by requests of
random tokens of Python's own generator, and the last step before the event loop starts caps torch's allocator
(`_torch/pyexecutor/_util.py: _adjust_torch_mem_fraction`) to what is free beside the cache.
"""

import random

import torch

from tensorrt_llm import _utils
from tensorrt_llm._torch import virtual_memory
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

SAFETY_MARGIN = 32 * 1024**2


def create_py_executor(llm_args, folder):
    if torch.cuda.is_available():
        torch.cuda.set_device(_utils.global_mpi_rank() % torch.cuda.device_count())
    py_executor = PyExecutor(llm_args, folder)
    random.randint(0, py_executor.arch.vocab_size - 1)
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        virtual_memory.sizes["kv_cache"] = int(free * llm_args.kv_cache_config.free_gpu_memory_fraction)
        _adjust_torch_mem_fraction()
    py_executor.start_worker()
    return py_executor


def _adjust_torch_mem_fraction():
    torch.cuda.set_per_process_memory_fraction(1.0)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((free + torch.cuda.memory_reserved() - SAFETY_MARGIN) / total)

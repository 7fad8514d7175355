"""Imports what a rank with vLLM needs; the server that has it forks such ranks in no time.

vLLM freezes what it finds when it starts and lets go of all of it when it ends, so that each engine after the first
looks through all that was imported six times. In these ranks what was imported stays frozen. vLLM also compiles its
count of ranks, for seconds of every process; here that runs as it is written.
"""

import gc
import importlib

import torch
import torch._dynamo

from mrl.engines.vllm.process_state import process_state_restored

MODULES = (
    "vllm.entrypoints.llm", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.qwen3_moe", "vllm.model_executor.models.qwen2_moe",
    "vllm.model_executor.models.mixtral", "vllm.model_executor.models.phi3",
)  # fmt: skip

gc.disable()  # what is imported is no garbage, and much to look through
with process_state_restored(torch.device("cpu")):
    for module in MODULES:
        importlib.import_module(module)

torch._dynamo.config.disable = True
gc.enable()
FREEZES = {name: getattr(gc, name) for name in ("freeze", "unfreeze", "get_freeze_count")}
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
gc.get_freeze_count = lambda: 1  # it counts by walking through all of them

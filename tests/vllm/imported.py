"""Imports what a rank with vLLM needs; the server that has it forks such ranks in no time."""

import importlib

import torch

from mrl.engines.vllm.process import kept

MODULES = (
    "vllm.entrypoints.llm", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.qwen3_moe", "vllm.model_executor.models.qwen2_moe",
    "vllm.model_executor.models.mixtral", "vllm.model_executor.models.phi3",
)  # fmt: skip

with kept(torch.device("cpu")):
    for module in MODULES:
        importlib.import_module(module)

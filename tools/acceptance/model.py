"""The small model of an acceptance run: its config, and a folder with random weights."""

from __future__ import annotations

from pathlib import Path

from mrl.checkpoint.formats.hf import HfTarget
from mrl.config.config import Config
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from mrl.trainer.run_plan import load_arch_and_tokenizer

SPREAD = 4.0
"""Factor on random matrices. Without it the output would be almost uniform, and a wrong distribution would look right.
"""

CONFIG = """
run: {seed: 1}
model:
  preset: qwen2_tiny
  overrides:
    hidden_size: 1024
    intermediate_size: 2816
    num_hidden_layers: 4
    num_attention_heads: 8
    num_key_value_heads: 2
    vocab_size: 32000
  tokenizer: "char:0123456789<>+#"
  dtype: bfloat16
data: {task: addition, task_kwargs: {min_terms: 4, max_terms: 4, max_value: 9, num_val: 0}}
train: {batch_size: 8}
actor: {param_offload: true, grad_offload: true}
rollout:
  n: 4
  prompt_length: 64
  response_length: 64
  max_num_seqs: 32
  max_num_batched_tokens: 2048
  gpu_memory_utilization: 0.3
  enable_prefix_caching: false
  checkpoint_engine: {canary: false}
reward: {functions: [{name: exact_match}]}
observe: {console: plain, tensorboard: false, report: false}
"""
"""Config of a model small enough for minutes, with the head size of 128 that real kernels expect."""


def write_random(config: Config, folder: Path) -> list[str]:
    """Writes the config's model with random weights as a Hugging Face folder; returns the overrides that select it."""
    arch, tokenizer = load_arch_and_tokenizer(config)
    layout = hf_layout(arch, config.model.dtype)
    tensors = allocate(layout)
    random_init(arch, layout, tensors, config.run.seed)
    for tensor in tensors.values():
        tensor.mul_(SPREAD if tensor.dim() > 1 else 1.0)
    folder.mkdir()
    target, records = HfTarget(arch, config.model.dtype), {}
    for file in target.files:
        records[file.name] = target.write(folder / file.name, file, ((name, tensors[name]) for name in file.layout))
    target.finish(folder, records)
    tokenizer.save(folder)
    return from_folder(folder)


def from_folder(folder: Path) -> list[str]:
    """Returns the overrides that select a Hugging Face folder."""
    return [f"model.path={folder.resolve()}", "model.preset=null", "~model.overrides", "model.tokenizer=null"]

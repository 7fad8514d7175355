"""`rollout.quantization=fp8` on the LLM API: which models and replicas it can hold.

Owns the rules that follow from TensorRT-LLM's loaders. They cut the scales of a
matrix by rank as evenly as the matrix, put those of q, k and v, and of gate and up, one below the other, and count in
whole blocks (1.3: `_torch/modules/linear.py`, `_torch/modules/fused_moe/quantization.py`); key/value heads that several
ranks hold are copied with their scales by one family's loader (`_torch/models/checkpoints/hf/`). It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.engines._fp8_support import DTYPE, QUANTIZATION, SIDE, broken_sizes
from mrl.models.base import ArchSpec

ENGINE = "trtllm"

COPIES_SCALES = ("qwen3_moe",)
"""Families whose loader copies the scales of key/value heads to the ranks that share them; others copy weights only."""

LOSES_SCALES = ("phi3",)
"""Families whose loader hands the fused matrices on without scales of blocks (`_torch/models/modeling_phi3.py`)."""


def refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """A message for each rule of FP8 blocks that a run on the LLM API breaks."""
    rollout, tp = config.rollout, config.rollout.tensor_model_parallel_size
    if (rollout.name, rollout.quantization) != (ENGINE, QUANTIZATION):
        return
    asked = f"rollout.quantization={QUANTIZATION} with rollout.name={ENGINE}"
    if arch.family in LOSES_SCALES:
        yield (
            f"{asked}: TensorRT-LLM's loader of {arch.family} cuts the matrices that its files have in one, and leaves "
            "their scales out. Leave rollout.quantization out, or use rollout.name=native."
        )
    dtype = rollout.dtype or config.model.dtype
    if dtype != DTYPE:
        key = "model.dtype" if rollout.dtype is None else "rollout.dtype"
        yield (
            f"{asked} and {key}={dtype}: TensorRT-LLM multiplies FP8 weights with {DTYPE} only. Set "
            f"rollout.dtype={DTYPE}."
        )
    if broken := broken_sizes(rollout, arch):
        yield (
            f"{asked}: each rank's part of a matrix must be whole blocks of {SIDE} x {SIDE}, since TensorRT-LLM cuts "
            f"and fuses their scales by the block; {broken}. Choose another "
            "rollout.tensor_model_parallel_size where that helps, leave rollout.quantization out, or use "
            "rollout.name=native."
        )
    if tp > arch.num_kv_heads and arch.family not in COPIES_SCALES:
        yield (
            f"{asked} and rollout.tensor_model_parallel_size={tp} above the model's {arch.num_kv_heads} key/value "
            f"heads: TensorRT-LLM's loader of {arch.family} gives several ranks the same heads, but not their scales. "
            f"Set rollout.tensor_model_parallel_size to at most {arch.num_kv_heads}."
        )

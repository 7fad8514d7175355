"""Checks whether `rollout.quantization=fp8` works with a model and replica on the LLM API. Imports no torch.

The rules follow from TensorRT-LLM's loaders. They split the scales of a matrix across ranks like the matrix,
concatenate those of q, k and v and of gate and up, and need complete blocks (1.3: `_torch/modules/linear.py`,
`_torch/modules/fused_moe/quantization.py`). Only one family's loader copies key/value heads that several ranks share
together with their scales (`_torch/models/checkpoints/hf/`).
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.engines._fp8_support import DTYPE, QUANTIZATION, SIDE, unaligned_sizes
from mrl.models.base import ArchSpec

ENGINE = "trtllm"

COPIES_SCALES = ("qwen3_moe",)
"""Families whose loader copies the scales of key/value heads to the ranks that share them; others copy only weights."""

LOSES_SCALES = ("phi3",)
"""Families whose loader drops the block scales of fused matrices (`_torch/models/modeling_phi3.py`)."""


def refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each rule of block-wise FP8 that a run on the LLM API breaks."""
    rollout, tp = config.rollout, config.rollout.tensor_model_parallel_size
    if (rollout.name, rollout.quantization) != (ENGINE, QUANTIZATION):
        return
    asked = f"rollout.quantization={QUANTIZATION} with rollout.name={ENGINE}"
    if arch.family in LOSES_SCALES:
        yield (
            f"{asked}: TensorRT-LLM's loader of {arch.family} splits fused matrices without their scales. Leave "
            "rollout.quantization out, or use rollout.name=native."
        )
    dtype = rollout.dtype or config.model.dtype
    if dtype != DTYPE:
        key = "model.dtype" if rollout.dtype is None else "rollout.dtype"
        yield (
            f"{asked} and {key}={dtype}: TensorRT-LLM multiplies FP8 weights with {DTYPE} only. Set "
            f"rollout.dtype={DTYPE}."
        )
    if broken := unaligned_sizes(rollout, arch):
        yield (
            f"{asked}: each rank's shard of a matrix must consist of complete {SIDE} x {SIDE} blocks, since "
            f"TensorRT-LLM splits and fuses scales by block; {broken}. Choose another "
            "rollout.tensor_model_parallel_size where that helps, leave rollout.quantization out, or use "
            "rollout.name=native."
        )
    if tp > arch.num_kv_heads and arch.family not in COPIES_SCALES:
        yield (
            f"{asked} and rollout.tensor_model_parallel_size={tp} above the model's {arch.num_kv_heads} key/value "
            f"heads: TensorRT-LLM's loader of {arch.family} gives several ranks the same heads, but not their scales. "
            f"Set rollout.tensor_model_parallel_size to at most {arch.num_kv_heads}."
        )

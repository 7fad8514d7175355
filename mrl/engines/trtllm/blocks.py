"""`rollout.quantization=fp8` on the LLM API: what its start is told, and which models and replicas it can hold.

Owns the quantisation in config.json and the rules that follow from TensorRT-LLM's loaders. They cut the scales of a
matrix by rank as evenly as the matrix, put those of q, k and v, and of gate and up, one below the other, and count in
whole blocks (1.3: `_torch/modules/linear.py`, `_torch/modules/fused_moe/quantization.py`); key/value heads that several
ranks hold are copied with their scales by one family's loader (`_torch/models/checkpoints/hf/`). It imports no torch.

    refusals(config, arch)              # before anything starts
    config_keys(rollout)                # into the config.json that the engine starts with
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.config import Config, RolloutConfig
from mrl.models.base import ArchSpec

ENGINE, QUANTIZATION, DTYPE = "trtllm", "fp8", "bfloat16"
SIDE = 128
"""Rows and columns of a block; FP8_BLOCK_SCALES has no other."""

COPIES_SCALES = ("qwen3_moe",)
"""Families whose loader copies the scales of key/value heads to the ranks that share them; others copy weights only."""

LOSES_SCALES = ("phi3",)
"""Families whose loader hands the fused matrices on without scales of blocks (`_torch/models/modeling_phi3.py`)."""


def config_keys(rollout: RolloutConfig) -> dict[str, Any]:
    """Keys of config.json by which TensorRT-LLM makes its linear layers in FP8; {} where they are not quantised.

    They are those of DeepSeek's checkpoints, of TensorRT-LLM's own tests of FP8 refits and of verl. `model_kwargs` says
    the same, but not in 1.2.
    """
    if rollout.quantization is None:
        return {}
    return {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [SIDE, SIDE],
        }
    }


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
    broken = [f"{what} = {size}" for what, size in _sizes(rollout, arch) if size % SIDE]
    if broken:
        yield (
            f"{asked}: each rank's part of a matrix must be whole blocks of {SIDE} x {SIDE}, since TensorRT-LLM cuts "
            f"and fuses their scales by the block; {'; '.join(broken)}. Choose another "
            "rollout.tensor_model_parallel_size where that helps, leave rollout.quantization out, or use "
            "rollout.name=native."
        )
    if tp > arch.num_kv_heads and arch.family not in COPIES_SCALES:
        yield (
            f"{asked} and rollout.tensor_model_parallel_size={tp} above the model's {arch.num_kv_heads} key/value "
            f"heads: TensorRT-LLM's loader of {arch.family} gives several ranks the same heads, but not their scales. "
            f"Set rollout.tensor_model_parallel_size to at most {arch.num_kv_heads}."
        )


def _sizes(rollout: RolloutConfig, arch: ArchSpec) -> Iterator[tuple[str, int]]:
    """What is cut or fused: how it comes about, and a rank's elements."""
    tp, key = rollout.tensor_model_parallel_size, "rollout.tensor_model_parallel_size"
    yield "hidden_size", arch.hidden_size
    heads, kv_heads = arch.num_heads * arch.head_dim, max(arch.num_kv_heads, tp) * arch.head_dim
    yield _cut("num_attention_heads x head_dim", heads, key, tp)
    yield _cut("num_key_value_heads x head_dim", kv_heads, key, tp)
    if arch.moe is None:
        yield _cut("intermediate_size", arch.intermediate_size, key, tp)
        return
    shared, width, spread = arch.moe.shared_intermediate_size, arch.moe.intermediate_size, rollout.expert_parallel_size
    yield _cut("an expert's width", width, f"({key} / rollout.expert_parallel_size)", tp // spread)
    if shared:
        yield _cut("the shared expert's width", shared, key, tp)


def _cut(what: str, size: int, key: str, parts: int) -> tuple[str, int]:
    return (f"{what} / {key} = {size} / {parts}" if parts > 1 else what), size // parts

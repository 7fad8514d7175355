"""`rollout.quantization=fp8` where an engine of others makes its linear layers in FP8 by the word of config.json.

Owns that word, and the sizes that must be whole blocks where an engine cuts and fuses scales by the block. It imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.models.base import ArchSpec

QUANTIZATION, DTYPE = "fp8", "bfloat16"
SIDE = 128
"""Rows and columns of a block."""


def config_keys(rollout: RolloutConfig, *, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Keys of config.json by which linear layers are made in FP8; {} where they are not quantised.

    They are those of DeepSeek's checkpoints, of TensorRT-LLM's own tests of FP8 refits and of verl.

    Args:
        rollout: The section.
        left_out: Modules that stay as they are, where the engine would quantise them.
    """
    if rollout.quantization is None:
        return {}
    found: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
    }
    return {"quantization_config": {**found, **({"modules_to_not_convert": list(left_out)} if left_out else {})}}


def broken_sizes(rollout: RolloutConfig, arch: ArchSpec) -> str:
    """Of a rank's parts those that are no whole blocks, in words; "" where all are."""
    return "; ".join(f"{what} = {size}" for what, size in _sizes(rollout, arch) if size % SIDE)


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

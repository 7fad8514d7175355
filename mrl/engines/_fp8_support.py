"""`rollout.quantization=fp8` in vLLM and TensorRT-LLM, which read it from config.json of the model folder.

Also checks that the sizes which these engines cut or fuse are multiples of a quantization block. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.models.base import ArchSpec

QUANTIZATION, DTYPE = "fp8", "bfloat16"
SIDE = 128
"""Rows and columns of a quantization block."""


def quantization_config_keys(rollout: RolloutConfig, *, unquantized_modules: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the keys of config.json that make the engine quantize linear layers to FP8; {} without quantization.

    DeepSeek's checkpoints, TensorRT-LLM's FP8 refit tests and verl use the same keys.

    Args:
        rollout: `rollout` section.
        unquantized_modules: Names of modules that stay in bfloat16.
    """
    if rollout.quantization is None:
        return {}
    found: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
    }
    return {
        "quantization_config": {
            **found,
            **({"modules_to_not_convert": list(unquantized_modules)} if unquantized_modules else {}),
        }
    }


def unaligned_sizes(rollout: RolloutConfig, arch: ArchSpec) -> str:
    """Returns the per-rank sizes that are no multiple of the quantization block, as text; "" if there are none."""
    return "; ".join(f"{what} = {size}" for what, size in _sizes(rollout, arch) if size % SIDE)


def _sizes(rollout: RolloutConfig, arch: ArchSpec) -> Iterator[tuple[str, int]]:
    """Yields (description, elements per rank) of each dimension that is sharded or fused."""
    tp, key = rollout.tensor_model_parallel_size, "rollout.tensor_model_parallel_size"
    yield "hidden_size", arch.hidden_size
    heads, kv_heads = arch.num_heads * arch.head_dim, max(arch.num_kv_heads, tp) * arch.head_dim
    yield _cut("num_attention_heads x head_dim", heads, key, tp)
    yield _cut("num_key_value_heads x head_dim", kv_heads, key, tp)
    if arch.has_dense_layers:
        yield _cut("intermediate_size", arch.intermediate_size, key, tp)
    if arch.moe is None:
        return
    shared, width, spread = arch.moe.shared_intermediate_size, arch.moe.intermediate_size, rollout.expert_parallel_size
    yield _cut("an expert's width", width, f"({key} / rollout.expert_parallel_size)", tp // spread)
    if shared:
        yield _cut("the shared expert's width", shared, key, tp)


def _cut(what: str, size: int, key: str, parts: int) -> tuple[str, int]:
    return (f"{what} / {key} = {size} / {parts}" if parts > 1 else what), size // parts

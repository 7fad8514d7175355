"""`rollout.quantization=fp8` on vLLM: which models and replicas it supports, and which modules stay unquantized.

The rules follow from `Fp8LinearMethod` and `Fp8MoEMethod` of vLLM 0.32. They shard the scales of a matrix over ranks
like the matrix, and stack those of q, k and v, and of gate and up, in complete blocks (`validate_fp8_block_shape`;
experts whose sizes are not multiples of a block get smaller ones). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.engines._fp8_support import DTYPE, QUANTIZATION, SIDE, unaligned_sizes
from mrl.engines.vllm.fields import NAME
from mrl.errors import UserError
from mrl.models.base import ArchSpec

LEAST_CAPABILITY = (8, 9)
"""Lowest compute capability with kernels for float8_e4m3fn (Ada, Hopper); on older GPUs vLLM packs the weights."""


def refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each FP8 rule that a run on vLLM breaks."""
    rollout = config.rollout
    if (rollout.name, rollout.quantization) != (NAME, QUANTIZATION):
        return
    asked = f"rollout.quantization={QUANTIZATION} with rollout.name={NAME}"
    dtype = rollout.dtype or config.model.dtype
    if dtype != DTYPE:
        key = "model.dtype" if rollout.dtype is None else "rollout.dtype"
        yield f"{asked} and {key}={dtype}: vLLM multiplies FP8 weights with {DTYPE} only. Set rollout.dtype={DTYPE}."
    if broken := unaligned_sizes(rollout, arch):
        yield (
            f"{asked}: the sizes of each rank's shard must be multiples of {SIDE}, since vLLM shards and fuses scales "
            f"by blocks of {SIDE} x {SIDE}; {broken}. Change rollout.tensor_model_parallel_size if that helps, remove "
            "rollout.quantization, or use rollout.name=native."
        )


def check_gpu(capability: tuple[int, int]) -> None:
    """Raises UserError on a GPU on which vLLM would pack FP8 weights for other kernels (Marlin)."""
    if capability < LEAST_CAPABILITY:
        raise UserError(
            f"rollout.quantization={QUANTIZATION} with rollout.name={NAME} on a GPU of compute capability "
            f"{'.'.join(map(str, capability))}: vLLM's plain kernels for FP8 need "
            f"{'.'.join(map(str, LEAST_CAPABILITY))}. Remove rollout.quantization."
        )


def unquantized_modules(arch: ArchSpec) -> list[str]:
    """Returns the modules that vLLM would quantize but the actor does not: the routers."""
    if arch.moe is None:
        return []
    return [f"model.layers.{layer}.{place}.gate" for layer in range(arch.num_layers) for place in ROUTED]


ROUTED = ("mlp", "block_sparse_moe")
"""Names of a layer's MoE module in the model families."""

"""`rollout.quantization=fp8` on vLLM: which models and replicas it can hold, and which modules stay as they are.

Owns the rules that follow from vLLM's `Fp8LinearMethod` and `Fp8MoEMethod`. They cut the scales of a matrix by rank as
evenly as the matrix, and put those of q, k and v, and of gate and up, one below the other, in whole blocks
(`validate_fp8_block_shape`; experts that are no whole blocks get finer ones). Read in vLLM 0.32. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.engines._fp8_support import DTYPE, QUANTIZATION, SIDE, broken_sizes
from mrl.engines.vllm.fields import NAME
from mrl.errors import UserError
from mrl.models.base import ArchSpec

LEAST_CAPABILITY = (8, 9)
"""Of a GPU whose kernels multiply float8_e4m3fn (Ada, Hopper); on older ones vLLM would pack the weights."""


def refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """A message for each rule of FP8 blocks that a run on vLLM breaks."""
    rollout = config.rollout
    if (rollout.name, rollout.quantization) != (NAME, QUANTIZATION):
        return
    asked = f"rollout.quantization={QUANTIZATION} with rollout.name={NAME}"
    dtype = rollout.dtype or config.model.dtype
    if dtype != DTYPE:
        key = "model.dtype" if rollout.dtype is None else "rollout.dtype"
        yield f"{asked} and {key}={dtype}: vLLM multiplies FP8 weights with {DTYPE} only. Set rollout.dtype={DTYPE}."
    if broken := broken_sizes(rollout, arch):
        yield (
            f"{asked}: each rank's part of a matrix must be whole blocks of {SIDE} x {SIDE}, since vLLM cuts and fuses "
            f"their scales by the block; {broken}. Choose another rollout.tensor_model_parallel_size where that helps, "
            "leave rollout.quantization out, or use rollout.name=native."
        )


def check_gpu(capability: tuple[int, int]) -> None:
    """Raises UserError for a GPU on which vLLM would pack FP8 weights for other kernels (Marlin)."""
    if capability < LEAST_CAPABILITY:
        raise UserError(
            f"rollout.quantization={QUANTIZATION} with rollout.name={NAME} on a GPU of compute capability "
            f"{'.'.join(map(str, capability))}: vLLM's plain kernels for FP8 need "
            f"{'.'.join(map(str, LEAST_CAPABILITY))}. Leave rollout.quantization out."
        )


def left_out(arch: ArchSpec) -> list[str]:
    """Modules that vLLM would quantise, and the actor does not: the routers."""
    if arch.moe is None:
        return []
    return [f"model.layers.{layer}.{place}.gate" for layer in range(arch.num_layers) for place in ROUTED]


ROUTED = ("mlp", "block_sparse_moe")
"""Where a layer has its experts, by the families' names."""

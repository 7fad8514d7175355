"""FP8 weights in the LLM API's engine: checks of the started model, and extra scales for a weight sync.

Rules that need neither the package nor the model are in `fp8_support.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from mrl.engines.base import EngineSpec
from mrl.engines.trtllm.features import Features
from mrl.errors import UserError
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8 import DTYPE, block_grids, fp8_layout
from mrl.resharding.native import native_layout
from mrl.resharding.trtllm_reads import activation_scale_of


def check_features(features: Features) -> None:
    """Raises UserError where the installed version cannot load FP8 weights after its start."""
    if not features.fp8_in_parts:
        raise UserError(
            f"rollout.quantization=fp8: TensorRT-LLM {features.version} loads FP8 weights at its start only "
            "(FP8BlockScalesLinearMethod.load_weights_vanilla has no allow_partial_loading). Install 1.3, leave "
            "rollout.quantization out, or use rollout.name=native."
        )


def check_started(model: Any, spec: EngineSpec, tp_rank: int, *, graphs: bool) -> None:
    """Checks that the started model stores the expected tensors in FP8 and supports repeated weight syncs.

    TensorRT-LLM would silently cast an FP8 tensor without its scales if it stores that tensor in another dtype
    (`_torch/modules/linear.py: copy_weight`).

    Args:
        model: TensorRT-LLM's model with dummy weights.
        spec: Specification of the replica.
        tp_rank: Tensor-parallel rank of this process.
        graphs: True if the engine captures CUDA graphs.

    Raises:
        UserError: The model stores other tensors in FP8, or moves its tensors under CUDA graphs.
    """
    found = sum(tensor.numel() for _, tensor in model.named_parameters() if tensor.dtype == DTYPES[DTYPE])
    expected = _num_fp8_elements(spec, tp_rank)
    if found != expected:
        raise UserError(
            f"rollout.quantization={spec.config.quantization}: TensorRT-LLM started with {found} elements in FP8 on "
            f"rank {tp_rank} of its replica, but a weight sync sends {expected}: it quantises other matrices than mrl. "
            "Leave rollout.quantization out, or use rollout.name=native."
        )
    if graphs and any(_reallocates(module) for module in model.modules()):
        raise UserError(
            "rollout.quantization=fp8 with CUDA graphs: on this GPU TensorRT-LLM repacks FP8 weights after each weight "
            "sync, and this version moves them to another address, which captured graphs do not see. Set "
            "rollout.enforce_eager=true, or install a newer 1.3."
        )


def _num_fp8_elements(spec: EngineSpec, tp_rank: int) -> int:
    """Returns the number of FP8 elements of this rank's shards; the native engine's layout shards them the same way."""
    config = spec.config
    layout = native_layout(
        spec.arch,
        config.tensor_model_parallel_size,
        tp_rank,
        spec.dtype_name,
        ep_size=config.expert_parallel_size,
    )
    stored = fp8_layout(layout, block_grids(spec.arch, config.quantization))
    return sum(prod(each.shape) for each in stored.values() if each.dtype == DTYPE)


def _reallocates(module: Any) -> bool:
    """Returns whether a weight sync reallocates tensors of a module; newer versions keep the addresses."""
    kept = getattr(module, "rebuild_tensor_metadata", None) or {}
    return any(not isinstance(each, Mapping) for each in kept.values())


def unit_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an activation scale of 1 for each FP8 attention output matrix among the tensors.

    TensorRT-LLM uses this scale where attention's output is FP8, for example with an FP8 KV cache, and defaults to 1;
    but a start with dummy weights leaves a random number there in some 1.3 versions.
    """
    return {
        scale: torch.ones((), device=tensor.device)
        for name, tensor in tensors.items()
        if tensor.dtype == DTYPES[DTYPE] and (scale := activation_scale_of(name)) is not None
    }

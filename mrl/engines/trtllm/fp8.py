"""FP8 weights in the LLM API's engine: whether it started with them, and what a refit gives beside weights and scales.

Owns what is asked of the installed package and of the started model. The rules that need neither are in
`fp8_support.py`.
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
from mrl.resharding.fp8 import DTYPE, grids_of, in_fp8
from mrl.resharding.native import native_layout
from mrl.resharding.trtllm_reads import activation_scale_of


def check_features(features: Features) -> None:
    """Raises UserError where the installed version cannot be given FP8 weights after its start."""
    if not features.fp8_in_parts:
        raise UserError(
            f"rollout.quantization=fp8: TensorRT-LLM {features.version} loads FP8 weights at its start only "
            "(FP8BlockScalesLinearMethod.load_weights_vanilla has no allow_partial_loading). Install 1.3, leave "
            "rollout.quantization out, or use rollout.name=native."
        )


def check_started(model: Any, spec: EngineSpec, tp_rank: int, *, graphs: bool) -> None:
    """Returns where the started model holds in FP8 what a refit will bring so, and can be refitted as often as asked.

    A tensor that came in FP8 for one that is not would be cast without its scales, and nothing would say so
    (`_torch/modules/linear.py: copy_weight`).

    Args:
        model: TensorRT-LLM's, with dummy weights.
        spec: The replica's.
        tp_rank: Of this rank.
        graphs: The engine captures CUDA graphs.

    Raises:
        UserError: It does not.
    """
    found = sum(tensor.numel() for _, tensor in model.named_parameters() if tensor.dtype == DTYPES[DTYPE])
    expected = _elements(spec, tp_rank)
    if found != expected:
        raise UserError(
            f"rollout.quantization={spec.config.quantization}: TensorRT-LLM started with {found} elements in FP8 on "
            f"rank {tp_rank} of its replica, and a refit brings {expected}: it quantises other matrices than mrl does. "
            "Leave rollout.quantization out, or use rollout.name=native."
        )
    if graphs and any(_moves(module) for module in model.modules()):
        raise UserError(
            "rollout.quantization=fp8 with CUDA graphs: on this GPU TensorRT-LLM stores FP8 weights in another form "
            "after each refit, and this version does so at another address, which the graphs would not see. Set "
            "rollout.enforce_eager=true, or install a newer 1.3."
        )


def _elements(spec: EngineSpec, tp_rank: int) -> int:
    """Of the matrices that this rank holds a part of, where they are quantised; the native engine cuts them alike."""
    config = spec.config
    layout = native_layout(
        spec.arch,
        config.tensor_model_parallel_size,
        tp_rank,
        spec.dtype_name,
        ep_size=config.expert_parallel_size,
    )
    stored = in_fp8(layout, grids_of(spec.arch, config.quantization))
    return sum(prod(each.shape) for each in stored.values() if each.dtype == DTYPE)


def _moves(module: Any) -> bool:
    """Whether a refit makes tensors of a module anew; a version that keeps their addresses notes them in a mapping."""
    kept = getattr(module, "rebuild_tensor_metadata", None) or {}
    return any(not isinstance(each, Mapping) for each in kept.values())


def unit_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The activation scale 1 for each of these that is an attention's output matrix in FP8.

    TensorRT-LLM multiplies with it where attention's output is in FP8, as with a KV cache in FP8, and calls 1 its
    default; a start with dummy weights of some 1.3 leaves a random number there.
    """
    return {
        scale: torch.ones((), device=tensor.device)
        for name, tensor in tensors.items()
        if tensor.dtype == DTYPES[DTYPE] and (scale := activation_scale_of(name)) is not None
    }

"""Positions of a run: the longest sequence of a model, the choice between longrope's factors, the attention factor.

Formulas and defaults are those of transformers' modeling_rope_utils.py. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mrl.models._rope import write_rope
from mrl.models.base import ArchSpec, MlaSpec, RopeScaling

_EXTENDED = ("gemma3_text",)
"""Families with linear scaling whose `max_position_embeddings` is the extended length."""


def position_limit(arch: ArchSpec) -> int:
    """Returns the number of positions that a model has, tokens.

    With linear and yarn scaling config.json may have the original length as `max_position_embeddings`; the limit is
    then the extended length, as in vLLM. The families of `_EXTENDED` always have the extended length.
    """
    scaling, limit = arch.rope_scaling, arch.max_position_embeddings
    if scaling is None or scaling.factor is None:
        return limit
    if scaling.rope_type == "linear" and arch.family not in _EXTENDED:
        return max(limit, int(limit * scaling.factor))
    if scaling.rope_type == "yarn":
        return max(limit, int(scaling.factor * original_length(scaling)))
    return limit


def original_length(scaling: RopeScaling) -> int:
    """Returns the context length before scaling, of a type that has one."""
    if scaling.original_max_position_embeddings is None:
        raise ValueError(f"rope_type {scaling.rope_type} has no original_max_position_embeddings")
    return scaling.original_max_position_embeddings


def is_longrope(arch: ArchSpec) -> bool:
    """Returns whether the model has two lists of frequencies."""
    return arch.rope_scaling is not None and arch.rope_scaling.rope_type == "longrope"


def for_run(arch: ArchSpec, longest: int) -> ArchSpec:
    """Returns the model as a run computes it: with one of longrope's lists for every position; others are unchanged.

    Transformers changes the list in the forward pass in which the longest sequence exceeds the original length, so that
    a token's log-probability would depend on tokens after it. vLLM chooses once, by `max_model_len`, and so does mrl.

    Args:
        arch: The model.
        longest: Longest sequence of the run, prompt and response, tokens.
    """
    scaling = arch.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return arch
    return replace(arch, rope_scaling=replace(scaling, uses_long_factor=longest > original_length(scaling)))


def notes(arch: ArchSpec, longest: int) -> list[str]:
    """Returns a log line about the choice of `for_run`, if there is one."""
    scaling = arch.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return []
    original = original_length(scaling)
    chosen = "long_factor" if scaling.uses_long_factor else "short_factor"
    relation = "more than" if scaling.uses_long_factor else "not more than"
    return [
        f"longrope: all positions use {chosen}, as sequences can have {longest} tokens, {relation} "
        f"original_max_position_embeddings={original}; transformers chooses in each forward pass"
    ]


def attention_factor(arch: ArchSpec) -> float:
    """Returns the factor of cosine and sine; 1 for types without one."""
    scaling = arch.rope_scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    original, factor = original_length(scaling), scaling.factor
    if factor is None:
        factor = arch.max_position_embeddings / original
    if scaling.rope_type == "longrope":
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_scale(factor, scaling.mscale) / _yarn_scale(factor, scaling.mscale_all_dim)
    return _yarn_scale(factor, 1)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def engine_rope(arch: ArchSpec) -> dict[str, Any]:
    """Returns keys of config.json that make an engine compute the positions as the run does; {} for most models.

    `max_position_embeddings` becomes the longest sequence with the scaling, as vLLM assumes for yarn; TensorRT-LLM's
    tables have that length. Both lists of longrope become the chosen one, so that it does not matter when an engine
    changes them, and the attention factor gets vLLM's names. "dynamic" becomes "default", which it is up to
    `max_position_embeddings`; vLLM and TensorRT-LLM would use the frequencies of the longest possible sequence at all
    lengths.
    """
    scaling, limit = arch.rope_scaling, position_limit(arch)
    if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
        return {} if limit == arch.max_position_embeddings else {"max_position_embeddings": limit}
    if scaling.rope_type == "dynamic":
        return write_rope(replace(arch, rope_scaling=None))
    chosen = chosen_factor(scaling)
    keys = write_rope(replace(arch, rope_scaling=replace(scaling, short_factor=chosen, long_factor=chosen)))
    own, plain = attention_factor(arch), replace(scaling, factor=None, attention_factor=None)
    if own != attention_factor(replace(arch, rope_scaling=plain)):  # which engines compute
        for spelling in ("rope_parameters", "rope_scaling"):
            keys[spelling] = {**keys[spelling], "short_mscale": own, "long_mscale": own}
    return keys


def chosen_factor(scaling: RopeScaling) -> tuple[float, ...]:
    """Returns the list of longrope that a run uses.

    Raises:
        ValueError: `for_run` was not called.
    """
    if scaling.uses_long_factor is None or scaling.short_factor is None or scaling.long_factor is None:
        raise ValueError("longrope: call for_run(arch, longest sequence) first, which chooses one of the two lists")
    return scaling.long_factor if scaling.uses_long_factor else scaling.short_factor


def score_scale(scaling: RopeScaling | None, head_dim: int) -> float | None:
    """Returns `ArchSpec.attention_scale` of latent attention, which yarn's `mscale_all_dim` changes; None: it does not.

    Args:
        scaling: Rotary scaling of the model.
        head_dim: Dimensions of a head's query.
    """
    if scaling is None or not scaling.mscale_all_dim or scaling.factor is None or scaling.factor <= 1:
        return None
    return float(head_dim**-0.5 * _yarn_scale(scaling.factor, scaling.mscale_all_dim) ** 2)


def resized(arch: ArchSpec, head_dim: int) -> ArchSpec:
    """Returns the model with heads of `head_dim` dimensions and rotary settings that fit them.

    In latent attention these are the dimensions of keys; the other sizes keep their order.
    """
    if arch.mla is not None:
        scale = score_scale(arch.rope_scaling, head_dim)
        return replace(arch, head_dim=head_dim, mla=_resized_mla(arch.mla, head_dim), attention_scale=scale)
    rotary = max(2, int(head_dim * arch.partial_rotary_factor) // 2 * 2)
    partial = 1.0 if arch.partial_rotary_factor == 1.0 else rotary / head_dim
    scaling, half = arch.rope_scaling, rotary // 2
    if scaling is not None and scaling.short_factor is not None and scaling.long_factor is not None:
        short, long = (
            tuple(factors[index * len(factors) // half] for index in range(half))
            for factors in (scaling.short_factor, scaling.long_factor)
        )
        scaling = replace(scaling, short_factor=short, long_factor=long)
    return replace(arch, head_dim=head_dim, partial_rotary_factor=partial, rope_scaling=scaling)


def _resized_mla(mla: MlaSpec, head_dim: int) -> MlaSpec:
    """Returns smaller sizes of latent attention for keys of `head_dim` dimensions."""
    rotary = max(2, head_dim * mla.qk_rope_head_dim // mla.qk_head_dim // 2 * 2)
    fixed = head_dim - rotary
    return replace(
        mla,
        q_lora_rank=None if mla.q_lora_rank is None else 3 * fixed,
        kv_lora_rank=2 * fixed,
        qk_nope_head_dim=fixed,
        qk_rope_head_dim=rotary,
        v_head_dim=fixed if mla.v_head_dim == mla.qk_nope_head_dim else max(2, fixed - 2),
    )

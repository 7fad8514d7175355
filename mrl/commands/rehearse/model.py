"""Reduces a model to the smallest one of the same structure that a layout allows.

A size that a parallel size divides in the real model is divided in the reduced one too, and one that it does not divide
is not (key/value heads by TP, experts per rank, layers per stage, padding of the vocabulary). A size of one stays one,
larger sizes stay larger than one. Family, biases, norms, rotary settings, tied embeddings, and whether queries and keys
have latent vectors are unchanged.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from typing import Any

from mrl.commands.rehearse.engine import RehearsalEngine
from mrl.commands.rehearse.layout import compare
from mrl.models._positions import resized
from mrl.models.base import ArchSpec, LinearAttentionSpec, MoeSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import chunk_layers

SMALLEST = RehearsalEngine()
MAX_KV_HEADS = 16
WINDOW = 16
"""Sliding window of a reduced model that has one, tokens."""
LINEAR_HEAD_DIM = 16
"""Largest dimensions of a head of a reduced model's linear attention."""
MAX_SMALL_HEADS = 8
"""Largest odd number of query heads per key/value head that is reduced to 3 instead of 2."""


def shrunk_model(
    arch: ArchSpec, real: ParallelLayout, reduced: ParallelLayout, *, tokens: int, engine: RehearsalEngine = SMALLEST
) -> tuple[ArchSpec, ParallelLayout]:
    """Returns the reduced model for a tokenizer of `tokens` ids, and `reduced` with uneven stages if `real` has any."""
    reduced, num_layers = _depth(arch, real, reduced)
    kv_heads = _kv_heads(arch, real, reduced)
    heads = kv_heads * _group(arch, kv_heads, reduced)
    sizes = engine.sizes
    # in latent attention a key has a rotated part that is half as wide as the rest
    head_dim = sizes.head_dim if arch.mla is None else sizes.head_dim * 3 // 2
    attention_width = arch.num_heads * arch.head_dim
    hidden = _multiple(heads * head_dim * min(2.0, arch.hidden_size / attention_width), sizes.width_multiple)
    widths = math.lcm(reduced.tp, reduced.rollout_tp) * sizes.width_multiple
    moe = None if arch.moe is None else _experts(arch.moe, real, reduced, hidden, sizes.width_multiple)
    if moe is not None:
        moe = replace(moe, dense_layers=_shrunk_dense_layers(arch, num_layers))
    small = replace(
        shrunk_heads(arch, head_dim),
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_multiple(2 * hidden, widths),
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=_vocabulary(arch, real, reduced, tokens),
        moe=moe,
        linear_attention=_linear_attention(arch, num_layers, reduced),
        **shrunk_windows(arch, num_layers),
    )
    if moe is not None and arch.moe is not None and arch.moe.intermediate_size == arch.intermediate_size:
        small = replace(small, intermediate_size=moe.intermediate_size)  # Mixtral has one config key for both
    return small, reduced


def shrunk_heads(arch: ArchSpec, head_dim: int) -> ArchSpec:
    """Returns a model with smaller heads, and with the list of longrope that it had."""
    small = resized(arch, head_dim)
    scaling = small.rope_scaling
    if scaling is not None and scaling.uses_long_factor:  # so do the shorter sequences of the reduced run
        small = replace(small, rope_scaling=replace(scaling, original_max_position_embeddings=2))
    return small


def shrunk_windows(arch: ArchSpec, num_layers: int) -> dict[str, Any]:
    """Returns the fields of a reduced model's sliding window, which is shorter than the reduced sequences."""
    if arch.sliding_window is None:
        return {}
    real = _sampled(arch, num_layers)
    windowed = tuple(layer for layer in range(num_layers) if real[layer] in arch.windowed_layers)
    return {"sliding_window": WINDOW, "windowed_layers": windowed or (0,)}


def _linear_attention(arch: ArchSpec, num_layers: int, reduced: ParallelLayout) -> LinearAttentionSpec | None:
    """Returns the reduced linear attention: in some layers, if the model has several, and not in all."""
    linear = arch.linear_attention
    if linear is None or num_layers == 1:
        return None
    real = _sampled(arch, num_layers)
    layers = [layer for layer in range(num_layers) if real[layer] in linear.layers] or [0]
    heads = math.lcm(reduced.tp, reduced.rollout_tp) * min(2, linear.num_key_heads)
    return replace(
        linear,
        layers=tuple(layers[: num_layers - 1]),
        num_key_heads=heads,
        num_value_heads=heads * min(2, linear.num_value_heads // linear.num_key_heads),
        key_head_dim=min(LINEAR_HEAD_DIM, linear.key_head_dim),
        value_head_dim=min(LINEAR_HEAD_DIM, linear.value_head_dim),
    )


def _multiple(size: float, of: int) -> int:
    return max(1, math.ceil(size / of)) * of


def _depth(arch: ArchSpec, real: ParallelLayout, reduced: ParallelLayout) -> tuple[ParallelLayout, int]:
    """Returns the reduced layout with its uneven stages, and the number of layers."""
    if reduced.pp == 1:
        return replace(reduced, first_stage_layers=None, last_stage_layers=None), min(2, arch.num_layers)
    if real.first_stage_layers is None and real.last_stage_layers is None:
        return reduced, reduced.pp * reduced.vpp
    layers = chunk_layers(arch, real)
    stages = [sum(len(layers[stage, chunk]) for chunk in range(real.vpp)) for stage in range(real.pp)]
    middle = stages[1] if real.pp > 2 else stages[0] if real.first_stage_layers is None else stages[-1]
    ends = {}
    for end, wanted in ((0, real.first_stage_layers), (real.pp - 1, real.last_stage_layers)):
        if wanted is not None:
            ends[end] = reduced.vpp * (2 + compare(stages[end], middle))
    first, last = ends.get(0), ends.get(real.pp - 1)
    if reduced.pp == 2 and first is not None and first == last and len(set(stages)) > 1:
        last += reduced.vpp  # with no stage in between, make the two differ from each other
    others = reduced.pp - sum(end is not None for end in (first, last))
    return replace(reduced, first_stage_layers=first, last_stage_layers=last), (
        (first or 0) + (last or 0) + others * 2 * reduced.vpp
    )


def _kv_heads(arch: ArchSpec, real: ParallelLayout, reduced: ParallelLayout) -> int:
    """Returns the fewest key/value heads whose order relative to both TP sizes is that of the real model."""
    pairs = ((real.tp, reduced.tp), (real.rollout_tp, reduced.rollout_tp))

    def distance(heads: int) -> tuple[int, int]:
        changed = sum(compare(arch.num_kv_heads, full) != compare(heads, small) for full, small in pairs)
        return 4 * ((heads > 1) != (arch.num_kv_heads > 1)) + changed, heads

    fitting = [
        heads
        for heads in range(1, min(MAX_KV_HEADS, max(arch.num_kv_heads, reduced.tp, reduced.rollout_tp)) + 1)
        if all(heads % small == 0 or small % heads == 0 for _, small in pairs)
    ]
    return min(fitting, key=distance)


def _group(arch: ArchSpec, kv_heads: int, reduced: ParallelLayout) -> int:
    """Returns the query heads per key/value head: one if the real model has one, otherwise two or three."""
    group = arch.num_heads // arch.num_kv_heads
    first = 1 if group == 1 else 3 if group % 2 and group <= MAX_SMALL_HEADS else 2
    return next(
        size for size in count(first) if all(kv_heads * size % tp == 0 for tp in (reduced.tp, reduced.rollout_tp))
    )


def _experts(moe: MoeSpec, real: ParallelLayout, reduced: ParallelLayout, hidden: int, width_multiple: int) -> MoeSpec:
    experts_per_rank = min(moe.num_experts // real.ep, moe.num_experts // real.rollout_ep)
    ep_multiple = math.lcm(reduced.ep, reduced.rollout_ep)
    top_k = min(moe.top_k, 2)
    groups = min(moe.num_groups, 2)
    num_experts = ep_multiple * min(experts_per_rank, 2)
    while (num_experts <= top_k and moe.num_experts > moe.top_k) or (
        groups > 1 and (num_experts % groups or num_experts < 2 * groups)
    ):
        num_experts += ep_multiple
    expert_multiple = math.lcm(reduced.expert_tp, reduced.rollout_moe_tp) * width_multiple
    shared_multiple = math.lcm(reduced.tp, reduced.rollout_tp) * width_multiple
    if not moe.shared_gate:  # such a shared expert is as wide as a number of experts
        expert_multiple = math.lcm(expert_multiple, shared_multiple)
    width = _multiple(hidden / 2, expert_multiple)
    shared = _multiple(hidden, shared_multiple) if moe.shared_gate else width * min(2, _num_shared(moe))
    return replace(
        moe,
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
        intermediate_size=width,
        shared_intermediate_size=shared if moe.shared_intermediate_size else 0,
        num_groups=groups,
        top_groups=groups if moe.top_groups == moe.num_groups else 1,
    )


def _num_shared(moe: MoeSpec) -> int:
    return moe.shared_intermediate_size // moe.intermediate_size


def _shrunk_dense_layers(arch: ArchSpec, num_layers: int) -> tuple[int, ...]:
    """Returns the layers of the reduced MoE model with a dense MLP: some, if the real model has some, and not all."""
    if arch.moe is None or not arch.moe.dense_layers or num_layers == 1:
        return ()
    found = [layer for layer, like in enumerate(_sampled(arch, num_layers)) if like in arch.moe.dense_layers] or [0]
    return tuple(found[: num_layers - 1])


def _sampled(arch: ArchSpec, num_layers: int) -> list[int]:
    """Returns layers of the real model that are spread evenly, the first and the last among them."""
    return [round(layer * (arch.num_layers - 1) / max(1, num_layers - 1)) for layer in range(num_layers)]


def _vocabulary(arch: ArchSpec, real: ParallelLayout, reduced: ParallelLayout, tokens: int) -> int:
    """Returns the smallest vocabulary for the tokenizer, padded for TP only if the real one is."""
    pairs = [
        (full, small) for full, small in ((real.tp, reduced.tp), (real.rollout_tp, reduced.rollout_tp)) if small > 1
    ]
    spare = min(arch.vocab_size - tokens, 1)  # keeps one id without a token, if the real model has some
    return next(
        size
        for size in count(tokens + spare)
        if size >= arch.vocab_size or all((arch.vocab_size % full == 0) == (size % small == 0) for full, small in pairs)
    )

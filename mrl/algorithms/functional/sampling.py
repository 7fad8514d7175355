"""Token sampling: truncation, counter-based random numbers, and inverse-CDF sampling.

Every function treats each row independently, so that a token does not depend on the rest of the batch. The trainer does
not truncate: it scores over the tokens that the engine kept (`types.SamplingMask`).

Shapes: N rows (one next token each), V true vocabulary, K candidates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CANDIDATES = 1024
"""Number of largest logits that top-p looks at before it sorts the full row; affects speed only."""

BLOCK = 256
"""Number of tokens per partial sum; the cumulative sum runs over block sums, then inside one block."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def truncates(top_k: int, top_p: float, min_p: float) -> bool:
    """Returns whether these settings may drop tokens."""
    return top_k >= 0 or top_p < 1.0 or min_p > 0.0


def keep_threshold(logits_NV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Returns the smallest logit that truncation keeps in each row; tokens with at least this logit are kept.

    top_k is applied first, then top_p over the remaining tokens, then min_p; tokens equal to the threshold are all
    kept.

    Args:
        logits_NV: Logits after temperature, fp32, true vocabulary only.
        top_k: Number of largest logits to keep; -1: all.
        top_p: Probability mass to keep, (0, 1]: the fewest most likely tokens that reach it.
        min_p: Smallest probability to keep, relative to the most likely token, [0, 1).

    Returns:
        [N] fp32, or None if nothing is truncated.
    """
    size = logits_NV.size(1)
    limit = size if top_k < 0 else min(top_k, size)
    if limit == size and top_p >= 1.0 and min_p <= 0.0:
        return None
    if top_p < 1.0:
        num = min(limit, CANDIDATES)
        threshold, reached = _nucleus(logits_NV, num, limit, top_p)
        if num < limit and not bool(reached.all()):
            threshold, _ = _nucleus(logits_NV, limit, limit, top_p)
    elif limit < size:
        threshold = logits_NV.topk(limit, dim=1).values[:, -1]
    else:
        threshold = torch.full_like(logits_NV[:, 0], -math.inf)
    if min_p > 0.0:
        threshold = torch.maximum(threshold, logits_NV.amax(1) + math.log(min_p))
    return threshold


def _nucleus(logits_NV: Tensor, num: int, limit: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Returns the top_p threshold over the `limit` largest logits from the `num` largest, and whether they sufficed."""
    values_NK = logits_NV.topk(num, dim=1).values
    total = torch.logsumexp(values_NK if limit == num else logits_NV, 1, keepdim=True)
    cumulative_NK = (values_NK - total).double().exp().cumsum(1)
    # a token is kept while the sum before it is below top_p; the largest always is
    kept_N = (cumulative_NK[:, :-1] < top_p).sum(1, keepdim=True)
    return values_NK.gather(1, kept_N).squeeze(1), cumulative_NK[:, -1] >= top_p


def stream_key(seed: int, uid: int, sample_index: int) -> int:
    """Returns the 64-bit key of one sample's random numbers, as a signed integer.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), chained over the parts.
    """
    state = 0
    for part in (seed, uid, sample_index):
        state = _mix((state ^ (part & _MASK)) + _GOLDEN & _MASK)
    return state - (1 << 64) if state >> 63 else state


def _mix(state: int) -> int:
    state = (state ^ state >> 30) * _MIX_1 & _MASK
    state = (state ^ state >> 27) * _MIX_2 & _MASK
    return state ^ state >> 31


def uniforms(keys_N: Tensor, positions_N: Tensor) -> Tensor:
    """Returns one uniform number in [0, 1) per (stream key, position): SplitMix64 with the position as counter.

    Args:
        keys_N: Keys from `stream_key`, int64.
        positions_N: Positions in the response, int64.

    Returns:
        fp64 [N], multiples of 2^-53.
    """
    state = keys_N + (positions_N + 1) * _signed(_GOLDEN)
    state = (state ^ _shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(_MIX_2)
    state = state ^ _shift(state, 31)
    return _shift(state, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(state: Tensor, bits: int) -> Tensor:
    """Returns the logical right shift of int64."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def draw(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Samples by inverse CDF: token t with probability weight[t] / sum(weights), one uniform number per row.

    The cumulative sum runs in fp64 over sums of BLOCK tokens, then inside the chosen block. A token of weight zero is
    never drawn, for any uniform number.

    Args:
        weights_NV: Unnormalised probabilities, fp32, at least 0, with one above 0 in each row.
        uniform_N: Uniform numbers in [0, 1), fp64.

    Returns:
        tokens_N, int64; an arbitrary token where a weight is not finite.
    """
    rows, size = weights_NV.shape
    full_blocks = size // BLOCK * BLOCK
    sums = weights_NV[:, :full_blocks].view(rows, -1, BLOCK).sum(2)
    if full_blocks < size:
        sums = torch.cat([sums, weights_NV[:, full_blocks:].sum(1, keepdim=True)], 1)
    sums = sums.double()
    cumulative = sums.cumsum(1)
    target = uniform_N[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    rest = target - (cumulative.gather(1, block) - sums.gather(1, block))
    tokens = block * BLOCK + torch.arange(min(BLOCK, size), device=weights_NV.device)
    inside = weights_NV.gather(1, tokens.clamp(max=size - 1)).double()
    inside = inside.masked_fill_(tokens >= size, 0.0).cumsum(1)
    offset = _first_above(inside, rest)
    return (block * BLOCK + offset).view(rows).clamp_(max=size - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Returns the first column whose cumulative sum exceeds the target [N, 1].

    A target at or above the end maps to the last column with a weight above zero.
    """
    below_end = torch.nextafter(cumulative[:, -1:], torch.zeros_like(cumulative[:, -1:]))
    found = torch.searchsorted(cumulative, torch.minimum(target, below_end), right=True)
    return found.clamp_(max=cumulative.size(1) - 1)

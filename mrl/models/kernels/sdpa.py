"""Attention with torch's scaled_dot_product_attention, arranged so that no CUDA kernel materializes the scores.

Shapes: B sequences, N query heads, K key/value heads, Q queries, T keys, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256
"""Largest head dimension of flash attention on CUDA."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention of queries [B, N, Q, D] to keys and values [B, K, T, D]; N is a multiple of K.

    Args:
        query: [B, N, Q, D].
        key: [B, K, T, D].
        value: [B, K, T, D]; may be `key` itself.
        mask: Boolean mask (True: attend) or additive mask, broadcastable to [B, N, Q, T]; None: causal.
        scale: Factor of the scores; None: D ** -0.5.
        sinks: Logit of each query head, [N], that joins the softmax and has no value; None: none.
    """
    if sinks is not None:
        return _attend_with_sinks(query, key, value, mask, scale, sinks)
    groups = query.size(1) // key.size(1)
    if groups > 1 and not takes_groups(query.device.type, query.dtype, query.size(3), masked=mask is not None):
        repeated = key.repeat_interleave(groups, 1)
        key, value = repeated, repeated if value is key else value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor
) -> Tensor:
    """Computes attention with sinks as a first key, with value 0 and further dimensions that only it uses.

    Query head g of a key head's G has a 1 in the g-th further dimension, and the sink's key has there the head's sink
    divided by the scale. So any kernel computes the scores and their gradients. A first query, which is dropped, keeps
    a causal mask causal.
    """
    size, dim, groups = query.size(0), query.size(3), query.size(1) // key.size(1)
    scale = dim**-0.5 if scale is None else scale
    marks = torch.eye(groups, dtype=query.dtype, device=query.device).repeat(key.size(1), 1)
    query = torch.cat([query, marks[:, None].expand(size, -1, query.size(2), -1)], -1)
    key, value = (F.pad(x, (0, groups)) for x in (key, value))
    sink = F.pad((sinks.to(key.dtype) / scale).view(1, -1, 1, groups), (dim, 0)).expand(size, -1, -1, -1)
    key, value = torch.cat([sink, key], 2), F.pad(value, (0, 0, 1, 0))
    if mask is None:
        return attend(F.pad(query, (0, 0, 1, 0)), key, value, None, scale)[:, :, 1:, :dim]
    seen = torch.ones_like(mask[..., :1]) if mask.dtype == torch.bool else torch.zeros_like(mask[..., :1])
    return attend(query, key, value, torch.cat([seen, mask], -1), scale)[..., :dim]


def takes_groups(device: str, dtype: torch.dtype, head_dim: int, *, masked: bool) -> bool:
    """Returns whether a memory-efficient kernel supports fewer key heads than query heads (GQA).

    On CUDA only flash attention does, which has neither masks nor float32 nor large heads. The memory-efficient kernel
    has all three and requires as many key heads as query heads; otherwise torch falls back to a product that
    materializes the scores (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13). cuDNN's kernel is
    disabled in `distributed/launch.py`. Not yet run on a GPU.

    Args:
        device: "cpu" or "cuda".
        dtype: Dtype of queries, keys and values.
        head_dim: D.
        masked: True if a mask is given.
    """
    return device != "cuda" or (dtype in FLASH_DTYPES and head_dim <= FLASH_HEAD_DIM and not masked)

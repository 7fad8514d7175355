"""Attention by torch's scaled_dot_product_attention, so that on a GPU no kernel keeps all scores.

Shapes: B sequences, N query heads, K key/value heads, Q queries, T keys, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_DTYPES = (torch.bfloat16, torch.float16)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Returns attention of queries [B, N, Q, D] to keys and values [B, K, T, D]; N is a multiple of K.

    Args:
        query: [B, N, Q, D].
        key: [B, K, T, D].
        value: [B, K, T, D].
        mask: Which keys each query sees (bool), or what is added to its scores; broadcasts to [B, N, Q, T]. None: query
            i sees the keys up to i.
        scale: Factor of the scores; None: D ** -0.5.
    """
    groups = query.size(1) // key.size(1)
    if groups > 1 and not takes_groups(query.device.type, query.dtype, masked=mask is not None):
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )


def takes_groups(device: str, dtype: torch.dtype, *, masked: bool) -> bool:
    """Returns whether a kernel that keeps no scores takes fewer key heads than query heads.

    On CUDA that is flash attention alone, which has neither masks nor float32. The memory-efficient kernel has both and
    wants as many key heads as query heads; given fewer, torch falls back to a product that keeps all scores
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13). cuDNN's kernel is switched off in
    `distributed/launch.py`. Not yet run on a GPU.

    Args:
        device: "cpu" or "cuda".
        dtype: Dtype of queries, keys and values.
        masked: Whether there is a mask.
    """
    return device != "cuda" or (dtype in FLASH_DTYPES and not masked)

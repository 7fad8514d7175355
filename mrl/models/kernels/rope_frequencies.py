"""RoPE frequencies and their Llama-3 scaling.

The convention is transformers': the head dimension is two halves (x1, x2), rotated to
(x1 cos - x2 sin, x2 cos + x1 sin).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Returns theta^(-2i / head_dim) for i = 0 .. head_dim / 2 - 1, fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / theta**exponents


def scale_llama3(
    inv_freq: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Applies Llama-3 scaling: divides low frequencies by `factor`, keeps high ones and interpolates between them.

    Args:
        inv_freq: Unscaled inverse frequencies, [head_dim / 2].
        factor: Ratio of the extended to the original context length.
        low_freq_factor: Wavelengths above original / low_freq_factor are divided by `factor`.
        high_freq_factor: Wavelengths below original / high_freq_factor are kept.
        original_max_position_embeddings: Context length before scaling, tokens.

    Source: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    wavelength = 2 * math.pi / inv_freq
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original_max_position_embeddings / low_freq_factor, inv_freq / factor, between)
    return torch.where(wavelength < original_max_position_embeddings / high_freq_factor, inv_freq, scaled)

"""RoPE tables, one row per position, so that all users of the tables rotate by the same bits.

Shapes: P positions, R rotated dimensions of a head, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.models.base import ArchSpec
from mrl.models.kernels.rope_frequencies import rotary_frequencies


def rotary_tables(
    arch: ArchSpec, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin) of the angles at each position, both [P, R]; the first half of sin is negated.

    Both are multiplied by the model's attention factor.

    Args:
        arch: Structure of the model.
        num_positions: Number of positions, from 0.
        dtype: Dtype of the tables; the angles are computed in float32.
        device: Device of the tables.
    """
    inv_freq, factor = rotary_frequencies(arch)
    angles = torch.outer(torch.arange(num_positions).float(), inv_freq).to(device)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R dimensions of heads [..., D] by rows of `rotary_tables`; differentiable.

    Args:
        x: Heads.
        cos: Cosines [..., R], broadcast over heads.
        sin: Sines [..., R], their first half negated.
    """
    size = cos.size(-1)
    turned, kept = x[..., :size], x[..., size:]
    turned = turned * cos + turned.roll(size // 2, -1) * sin
    return torch.cat([turned, kept], -1) if kept.size(-1) else turned

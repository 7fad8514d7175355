"""RoPE tables, one row per position, so that all users of the tables rotate by the same bits."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from mrl.models.base import ArchSpec
from mrl.models.kernels.rope_frequencies import inverse_frequencies, scale_llama3


def rotary_tables(
    arch: ArchSpec, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin) of the angles at each position, both [num_positions, D]; the first half of sin is negated.

    Args:
        arch: Structure of the model.
        num_positions: Number of positions, from 0.
        dtype: Dtype of the tables; the angles are computed in float32.
        device: Device of the tables.
    """
    inv_freq = inverse_frequencies(arch.head_dim, arch.rope_theta)
    if arch.rope_scaling is not None:
        inv_freq = scale_llama3(inv_freq, **asdict(arch.rope_scaling))
    angles = torch.outer(torch.arange(num_positions).float(), inv_freq).to(device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)

"""Rotary angles as tables, one row for each position: the same bits for whoever turns by them.

Owns the tables; the frequencies are in `models/kernels/rope.py`.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from mrl.models.base import ArchSpec
from mrl.models.kernels.rope import inverse_frequencies, scale_llama3


def rotary_tables(
    arch: ArchSpec, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the angles at each position, both [num_positions, D]; the first half of sin is negated.

    Args:
        arch: The model.
        num_positions: Those from 0 on.
        dtype: Of the tables; the angles are float32.
        device: Of the tables.
    """
    inv_freq = inverse_frequencies(arch.head_dim, arch.rope_theta)
    if arch.rope_scaling is not None:
        inv_freq = scale_llama3(inv_freq, **asdict(arch.rope_scaling))
    angles = torch.outer(torch.arange(num_positions).float(), inv_freq).to(device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], 1).to(dtype), torch.cat([-sin, sin], 1).to(dtype)

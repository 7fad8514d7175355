"""An order-free checksum of weights: the sum of the elements' bit patterns, modulo 2^64.

Owns `bit_sum`. Sums of parts add up to the sum of the whole, in any order and any cut, so that a sender, a receiver and
an engine that stores its tensors differently arrive at the same number.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODULUS = 1 << 64

_BLOCK = 1 << 16
"""Elements that are widened to int64 at a time on a CPU; the copy stays in the cache."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> int:
    """Sum of the signed integers that have the elements' bits, modulo 2^64.

    Args:
        tensor: Any shape, dtype and strides.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    if bits.is_cuda:
        return int(bits.sum(dtype=torch.int64)) % MODULUS
    total = torch.zeros((), dtype=torch.int64)
    for block in torch.split(bits, _BLOCK):
        total += block.sum(dtype=torch.int64)
    return int(total) % MODULUS

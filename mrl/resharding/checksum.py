"""Checksums of weights.

Owns `bit_sum`, which does not depend on how a tensor is cut or ordered: sums of parts add up to the sum of the whole,
so that two who store the same weights differently arrive at the same number. `resharding/checked_copy.py` takes it in
the pass over memory in which a tensor is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODULUS = 1 << 64

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> int:
    """Sum of the elements' bit patterns modulo 2^w, where an element has w bits, in the upper bits of a 64-bit number.

    The sum wraps in the element's own width, because widening each element costs several times the reading. So sums of
    parts are added modulo 2^64. Any change of one element shows; unrelated values agree with a chance of 2^-w.

    Args:
        tensor: Any shape, dtype and strides.
    """
    return int(bits(tensor)) % MODULUS


def bits(tensor: Tensor) -> Tensor:
    """`bit_sum` as an int64 scalar on the tensor's device, which nobody need wait for."""
    return _upper(_sum(_as_integers(tensor)))


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _sum(integers: Tensor) -> Tensor:
    return integers.sum(dtype=integers.dtype)


def _upper(wrapped: Tensor) -> Tensor:
    """The sum in the upper bits of 64."""
    return wrapped.to(torch.int64) << 64 - 8 * wrapped.element_size()

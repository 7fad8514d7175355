"""Checksums of weights that run at the speed of memory.

Owns `bit_sum`, which does not depend on how a tensor is cut or ordered: sums of parts add up to the sum of the whole,
so that two who store the same weights differently arrive at the same number. And `word_sum`, for a buffer that both
sides hold in the same form.
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
    integer = _INTEGERS[tensor.element_size()]
    width = 8 * tensor.element_size()
    wrapped = int(tensor.detach().view(integer).sum(dtype=integer))
    return wrapped % (1 << width) << (64 - width)


def word_sum(buffer: Tensor) -> int:
    """Sum of the 64-bit words of a contiguous uint8 buffer, modulo 2^64; its length is a multiple of 8."""
    return int(buffer.view(torch.int64).sum()) % MODULUS

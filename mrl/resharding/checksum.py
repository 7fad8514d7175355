"""Checksums of weights that are additive: sums of parts add up to that of the tensor, however it is split or ordered.

So two ranks that shard the same weights differently compute the same number. `resharding/checked_copy.py` computes it
in the same pass over memory as a copy.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

MODULUS = 1 << 64

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> int:
    """Returns the sum of the elements' bit patterns modulo 2^w, shifted into the upper bits of a 64-bit number.

    w is the number of bits per element. The sum wraps in the element's own width, because widening each element costs
    several times as much as reading it. So sums of parts are added modulo 2^64. A change of one element is always
    detected; unrelated values collide with probability 2^-w.

    Args:
        tensor: Any shape, dtype and strides.
    """
    return int(bits(tensor)) % MODULUS


def bits(tensor: Tensor) -> Tensor:
    """Returns `bit_sum` as an int64 scalar on the tensor's device, without synchronizing with it."""
    return _upper(_sum(_as_integers(tensor)))


def model_checksum(sums: Tensor) -> str:
    """Returns a hash of a model's weights, 16 hex digits.

    Args:
        sums: `bits` of each Hugging Face tensor, in the order of `hf_layout`, int64 on the CPU.
    """
    return blake2b(sums.numpy().tobytes(), digest_size=8).hexdigest()


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _sum(integers: Tensor) -> Tensor:
    return integers.sum(dtype=integers.dtype)


def _upper(wrapped: Tensor) -> Tensor:
    return wrapped.to(torch.int64) << 64 - 8 * wrapped.element_size()

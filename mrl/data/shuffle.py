"""The shuffled order of an epoch: a permutation that is computed one element at a time.

It stores no table and uses no library's random generator (whose streams may change between versions), so the order is
the same on every rank and machine and after every resume.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


class Shuffle:
    """Keyed permutation of 0 .. size-1.

    A Feistel network over the smallest even number of bits that represents `size`; an image outside the range is mapped
    again until it falls inside (cycle walking, fewer than four times on average).

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4 and 5.
    """

    def __init__(self, size: int, *key: int) -> None:
        """Derives the round keys.

        Args:
            size: Number of elements, at least 1.
            key: Any integers, such as (seed, epoch).
        """
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * index : 8 * index + 8], "little") for index in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Returns the image of `index`; raises IndexError outside 0 .. size-1."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside 0 .. {self.size - 1}")
        mask = (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            index = left << self._half | right
            if index < self.size:
                return index


def _mix(value: int) -> int:
    """Applies the finaliser of splitmix64 (Steele, Lea, Flood 2014): every output bit depends on every input bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)

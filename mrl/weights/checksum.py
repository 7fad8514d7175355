"""Checksums of weights, taken where the bytes are in the processor's cache anyway.

Owns `bit_sum`, which does not depend on how a tensor is cut or ordered: sums of parts add up to the sum of the whole,
so that two who store the same weights differently arrive at the same number. And `copy_bits`, a copy that is read back
while it is in the cache, so that its checksum costs no further pass over memory: by `_copying.c`, or, where that was
not compiled or cannot do it (casts, GPUs), block by block with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

MODULUS = 1 << 64

BLOCK_BYTES = 1 << 20
"""What of a copy is read back at a time, for each thread: it is still in the processor's cache then, and large enough
that calls from Python cost little beside it."""

THREAD_BYTES = 4 << 20
"""From here on a copy is shared by threads."""

try:
    compiled: Any = import_module("mrl.weights._copying")
except ImportError:  # installed without a compiler
    compiled = None

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


def copy_bits(target: Tensor, source: Tensor, *, both: bool = False) -> tuple[Tensor, Tensor]:
    """Copies, and reads what was written back from where it then is; on a CPU while it is still in the cache.

    Args:
        target: Of the same shape.
        source: Where its dtype differs it is cast.
        both: Sum the source too; it has the target's dtype.

    Returns:
        (`bits` of the source, `bits` of the target); without `both` the latter twice.
    """
    if target.shape != source.shape:
        raise RuntimeError(f"{list(source.shape)} cannot be copied into {list(target.shape)}")
    rows = _rows(target, source)
    if rows is not None:
        return _copy_rows(target.data_ptr(), source.data_ptr(), *rows)
    return _copy_blocks(target, source, both=both)


def _copy_rows(
    target: int, source: int, rows: int, count: int, target_step: int, source_step: int, width: int
) -> tuple[Tensor, Tensor]:
    """`copy_bits` with `_copying.c`, by as many threads as torch uses."""
    threads = torch.get_num_threads()
    if threads > 1 and rows * count * width >= THREAD_BYTES:
        if rows == 1:  # cut it, whatever it is, into as many rows, and what is left
            per = count // threads
            parts = [(target + i * per * width, source + i * per * width, 1, per, 0, 0, width) for i in range(threads)]
            done = per * threads
            parts.append((target + done * width, source + done * width, 1, count - done, 0, 0, width))
        else:
            per = -(-rows // threads)
            parts = [
                (
                    target + i * target_step,
                    source + i * source_step,
                    min(per, rows - i),
                    count,
                    target_step,
                    source_step,
                    width,
                )
                for i in range(0, rows, per)
            ]
        sums = list(_threads(threads).map(lambda part: compiled.copy(*part), parts))
    else:
        sums = [compiled.copy(target, source, rows, count, target_step, source_step, width)]
    given, stored = (sum(found) % MODULUS for found in zip(*sums, strict=True))
    return torch.tensor(_signed(given)), torch.tensor(_signed(stored))


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count)


def _signed(number: int) -> int:
    """As int64 has it."""
    return number - MODULUS if number >= MODULUS // 2 else number


def _rows(target: Tensor, source: Tensor) -> tuple[int, int, int, int, int] | None:
    """(rows, elements of each, bytes between those of the target, and of the source, bytes of an element).

    None where `_copying.c` cannot make the copy: it knows bytes that lie in rows in the host's memory.
    """
    if compiled is None or target.dtype != source.dtype or target.device.type != "cpu" or source.device.type != "cpu":
        return None
    width = target.element_size()
    if target.is_contiguous() and source.is_contiguous():
        return (1, target.numel(), 0, 0, width)
    if target.dim() != 2 or target.stride(1) != 1 or source.stride(1) != 1:
        return None
    return (target.size(0), target.size(1), target.stride(0) * width, source.stride(0) * width, width)


def _copy_blocks(target: Tensor, source: Tensor, *, both: bool) -> tuple[Tensor, Tensor]:
    """`copy_bits` with torch."""
    given = stored = None
    for into, values in _blocks(target, source):
        into.copy_(values)
        stored = _add(stored, _sum(_as_integers(into)))
        if both:
            given = _add(given, _sum(_as_integers(values)))
    if stored is None:
        stored = torch.zeros((), dtype=torch.int64, device=target.device)
    stored = _upper(stored)
    return (_upper(given) if given is not None else stored), stored


def _blocks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both; all of them on a device that copies at once."""
    target, source = target.detach(), source.detach()
    if target.numel() == 0:
        return
    room = BLOCK_BYTES * torch.get_num_threads()
    if target.device.type != "cpu" or target.nbytes <= room:
        yield target, source
        return
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    if target.nbytes // target.size(0) > room:  # a row is more than a block
        for into, values in zip(target.unbind(), source.unbind(), strict=True):
            yield from _blocks(into, values)
        return
    rows = room * target.size(0) // target.nbytes
    yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _sum(integers: Tensor) -> Tensor:
    return integers.sum(dtype=integers.dtype)


def _add(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


def _upper(wrapped: Tensor) -> Tensor:
    """The sum in the upper bits of 64."""
    return wrapped.to(torch.int64) << 64 - 8 * wrapped.element_size()

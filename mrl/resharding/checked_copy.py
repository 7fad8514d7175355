"""Copies that compute their checksum in the same pass over memory, and checksums alone (see `resharding/checksum.py`).

`checked_copy.c` copies CPU tensors of one dtype. PyTorch does casts, GPU copies, and everything if no C compiler is
available: block by block, reading each block back while it is in the CPU cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mrl.models.kernels import build
from mrl.resharding.checksum import MODULUS, bits

BLOCK_BYTES = 1 << 20
"""Block that PyTorch copies and reads back at a time, bytes per thread."""

THREAD_BYTES = 4 << 20
"""Smallest compiled copy that is split over PyTorch's number of threads, bytes."""

SOURCE = Path(__file__).with_name("checked_copy.c")

_Call = Callable[..., int]


@cache
def compiled() -> tuple[_Call | None, str]:
    """Returns (compiled function, its name), or (None, the reason why there is none)."""
    found, description = build.built([SOURCE])
    if found is None:
        return None, description
    call: _Call = found.copy_rows
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 5]  # type: ignore[attr-defined]
    call.restype = ctypes.c_uint64  # type: ignore[attr-defined]
    return call, description


def copy_bits(target: Tensor, source: Tensor, *, both: bool = False) -> tuple[Tensor, Tensor]:
    """Copies a tensor and sums the bits that it copies.

    Args:
        target: Tensor to fill; same shape as `source`.
        source: Tensor to copy; cast if its dtype differs.
        both: Sum the source separately; requires equal dtypes.

    Returns:
        (`bits` of the source, `bits` of the written values), int64; without `both` the latter twice.
    """
    if target.shape != source.shape:
        raise RuntimeError(f"cannot copy shape {list(source.shape)} into shape {list(target.shape)}")
    target, source = target.detach(), source.detach()
    if target.dtype == source.dtype and (total := _run_compiled(target, source)) is not None:
        return total, total
    return _copy_blocks(target, source, both=both)


def sum_bits(values: Tensor) -> Tensor:
    """Returns `checksum.bits`, computed by the compiled function if there is one."""
    values = values.detach()
    total = _run_compiled(None, values)
    return bits(values) if total is None else total


@dataclass(frozen=True)
class _Rows:
    """Rows of contiguous elements that several tensors of one shape have in common.

    Attributes:
        rows: Rows in each set of rows.
        count: Elements per row.
        steps: Stride between rows for each tensor, elements.
        starts: Offset of the first row for each set of rows and each tensor, elements.
    """

    rows: int
    count: int
    steps: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def _common_rows(shape: tuple[int, ...], *strides: tuple[int, ...]) -> _Rows | None:
    """Returns the rows of tensors with these strides; None where elements are not contiguous."""
    axes: list[tuple[int, tuple[int, ...]]] = []  # (extent, stride in each tensor) after merging contiguous axes
    for extent, *steps in zip(shape, *strides, strict=True):
        if extent == 1:
            continue
        if axes and all(last == extent * step for last, step in zip(axes[-1][1], steps, strict=True)):
            extent *= axes.pop()[0]
        axes.append((extent, tuple(steps)))
    if axes and axes[-1][1] != (1,) * len(strides):
        return None
    count = axes.pop()[0] if axes else 1
    rows, last_steps = axes.pop() if axes else (1, (0,) * len(strides))
    places = product(*([(i, steps) for i in range(extent)] for extent, steps in axes))
    starts = tuple(
        tuple(sum(i * steps[which] for i, steps in place) for which in range(len(strides))) for place in places
    )
    return _Rows(rows, count, last_steps, starts)


def _run_compiled(target: Tensor | None, source: Tensor) -> Tensor | None:
    """Runs the compiled copy, or the compiled sum without a target; None if it does not support the tensors."""
    tensors = [source] if target is None else [target, source]
    if any(tensor.device.type != "cpu" for tensor in tensors) or not source.numel():
        return None
    call, _ = compiled()
    rows = None if call is None else _common_rows(tuple(source.shape), *(tensor.stride() for tensor in tensors))
    if call is None or rows is None:
        return None
    width = source.element_size()
    first, into = source.data_ptr(), None if target is None else target.data_ptr()
    from_step, into_step = rows.steps[-1] * width, 0 if into is None else rows.steps[0] * width

    def part(start: tuple[int, ...], row: int, num_rows: int, at: int, count: int) -> int:
        from_ = first + (start[-1] + at) * width + row * from_step
        to = None if into is None else into + (start[0] + at) * width + row * into_step
        return call(to, from_, num_rows, count, into_step, from_step, width)

    threads = torch.get_num_threads()
    if threads == 1 or rows.rows * rows.count * width < THREAD_BYTES:
        total = sum(part(start, 0, rows.rows, 0, rows.count) for start in rows.starts)
    else:
        cuts = [
            (start, row, num_rows, at, count)
            for start in rows.starts
            for row, num_rows in _split_evenly(rows.rows, threads if rows.rows > 1 else 1)
            for at, count in _split_evenly(rows.count, threads if rows.rows == 1 else 1)
        ]
        total = sum(_thread_pool(threads).map(lambda cut: part(*cut), cuts))
    upper = (total << 64 - 8 * width) % MODULUS
    return torch.tensor(upper - MODULUS if upper >= MODULUS // 2 else upper)


def _split_evenly(size: int, parts: int) -> list[tuple[int, int]]:
    """Returns (first, count) of about equal parts."""
    each = -(-size // parts)
    return [(first, min(each, size - first)) for first in range(0, size, each)]


@lru_cache(maxsize=1)
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    """Returns a thread pool; its threads sleep while idle. OpenMP's spin, which slows a busy host down."""
    return ThreadPoolExecutor(threads)


def _copy_blocks(target: Tensor, source: Tensor, *, both: bool) -> tuple[Tensor, Tensor]:
    """Implements `copy_bits` with PyTorch."""
    given = written = torch.zeros((), dtype=torch.int64, device=target.device)
    for into, values in _blocks(target, source):
        into.copy_(values)
        written = written + bits(into)
        if both:
            given = given + bits(values)
    return (given if both else written), written


def _blocks(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields corresponding blocks of both tensors; on a GPU the complete tensors."""
    if target.numel() == 0:
        return
    room = BLOCK_BYTES * torch.get_num_threads()
    if target.device.type != "cpu" or target.nbytes <= room:
        yield target, source
        return
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    if target.nbytes // target.size(0) > room:  # a row exceeds a block
        for into, values in zip(target.unbind(), source.unbind(), strict=True):
            yield from _blocks(into, values)
        return
    rows = room * target.size(0) // target.nbytes
    yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)

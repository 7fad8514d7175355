"""CUDA graphs of the decode step: one launch instead of hundreds.

Owns the shapes that are captured. A graph serves every batch and length up to its own: spare rows decode stale state
into slots that nothing reads, and slots behind a row's position are masked. Written for CUDA and not yet run on one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MIN_LENGTH = 256
"""Shortest length that is captured; longer ones double."""


class DecodeGraphs:
    """Captures on first use of a shape; all graphs share one pool of memory and one buffer of logits.

    Args:
        step: (batch, length) -> logits; reads and writes the same addresses in every call.
        num_rows: Largest batch; may be read.
        row_len: Largest length.
    """

    def __init__(self, step: Callable[[int, int], Tensor], num_rows: int, row_len: int) -> None:
        self._step = step
        self.num_rows = num_rows
        self._row_len = row_len
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._logits_SV: Tensor | None = None

    def run(self, batch: int, length: int) -> Tensor:
        """Logits of the first `batch` rows; the buffer is overwritten by the next call."""
        shape = (_bucket(batch, 1, self.num_rows), _bucket(length, MIN_LENGTH, self._row_len))
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(*shape)
        graph, logits_BV = self._graphs[shape]
        graph.replay()
        return logits_BV[:batch]

    def _capture(self, batch: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            logits = self._step(batch, length)  # libraries initialise outside the capture
        torch.cuda.current_stream().wait_stream(side)
        if self._logits_SV is None:
            self._logits_SV = logits.new_empty(self.num_rows, logits.size(1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others ask the device
            logits_BV = self._logits_SV[:batch]
            logits_BV.copy_(self._step(batch, length))
        return graph, logits_BV


def _bucket(size: int, smallest: int, largest: int) -> int:
    """The power of two times `smallest` that holds `size`, at most `largest`."""
    bucket = smallest
    while bucket < size:
        bucket *= 2
    return min(bucket, largest)

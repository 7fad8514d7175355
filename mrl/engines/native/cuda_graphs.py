"""CUDA graphs of the decode step: one launch instead of hundreds.

Owns the shapes that are captured, and how long their graphs are kept. A graph serves every batch and length up to its
own: spare rows decode stale state into slots that nothing reads, and slots behind a row's position are masked. Written
for CUDA and not yet run on one; which captures are made, and that all that is read stays in place, is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MIN_LENGTH = 256
"""Shortest length that is captured; longer ones double."""

MOST_PLACES = 2
"""Shapes of cache and rows whose graphs are kept: training and validation may alternate."""

Replay = Callable[[], object]
"""Runs a captured step again; it writes into the logits that the capture was given."""


class DecodeGraphs:
    """Graphs of one engine, captured when a shape is first used; all share one pool of memory.

    Attributes:
        num_captures: Graphs captured so far.
    """

    def __init__(self, step: Callable[[int, int], Tensor], capture: Callable[[Replay], Replay] | None = None) -> None:
        """Captures nothing yet.

        Args:
            step: (batch, length) -> logits; reads and writes the same addresses in every call.
            capture: Captures a function that was called once before; None: as a CUDA graph.
        """
        self._step = step
        self._capture = capture or _CudaCapture()
        self._kept: dict[Hashable, dict[tuple[int, int], tuple[Replay, Tensor]]] = {}
        self._graphs: dict[tuple[int, int], tuple[Replay, Tensor]] = {}
        self._most_rows = self._row_len = 0
        self._logits_SV: Tensor | None = None
        self.num_captures = 0

    def begin(self, place: Hashable, most_rows: int, row_len: int) -> None:
        """Prepares a call of the engine; graphs captured at the same place are used again.

        Args:
            place: Addresses and shapes of all that a step reads and writes. A graph is valid only there.
            most_rows: Largest batch; rows behind it may be read by others.
            row_len: Largest length.
        """
        self._graphs = self._kept.pop(place, {})
        self._kept[place] = self._graphs  # the newest is last
        while len(self._kept) > MOST_PLACES:
            del self._kept[next(iter(self._kept))]
        self._most_rows, self._row_len = most_rows, row_len

    def run(self, batch: int, length: int) -> Tensor:
        """Returns logits of the first `batch` rows; the next call overwrites them."""
        shape = (_bucket(batch, 1, self._most_rows), _bucket(length, MIN_LENGTH, self._row_len))
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(*shape)
            self.num_captures += 1
        replay, logits_BV = self._graphs[shape]
        replay()
        return logits_BV[:batch]

    def _captured(self, batch: int, length: int) -> tuple[Replay, Tensor]:
        logits = _on_side_stream(lambda: self._step(batch, length))  # libraries initialise outside the capture
        if self._logits_SV is None or self._logits_SV.size(0) < batch:
            self._logits_SV = logits.new_empty(batch, logits.size(1))  # earlier graphs keep theirs
        logits_BV = self._logits_SV[:batch]
        return self._capture(lambda: logits_BV.copy_(self._step(batch, length))), logits_BV


def _on_side_stream(action: Callable[[], Tensor]) -> Tensor:
    """Runs an action on a stream of its own, as a capture does, and returns its result."""
    if not torch.cuda.is_available():
        return action()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = action()
    torch.cuda.current_stream().wait_stream(side)
    return found


class _CudaCapture:
    """Captures CUDA graphs into one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, action: Replay) -> Replay:
        """Returns what replays the action."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others ask the device
            action()
        return graph.replay


def _bucket(size: int, smallest: int, largest: int) -> int:
    """The power of two times `smallest` that holds `size`, at most `largest`."""
    bucket = smallest
    while bucket < size:
        bucket *= 2
    return min(bucket, largest)

"""CUDA graphs of the decode step: one launch instead of hundreds.

A graph serves every batch size and length up to its own: padding rows decode stale state into slots that nothing reads,
and slots after a row's position are masked. Not yet run on a GPU; CPU tests check which captures are made, and that the
tensors they read keep their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MIN_LENGTH = 256
"""Shortest captured length, slots; longer ones are powers of two times it."""

MAX_GRAPH_SETS = 2
"""Shapes of cache and decode state whose graphs are kept: training and validation may alternate."""

Replay = Callable[[], object]
"""Runs a captured step again; it writes into the logits given to the capture."""


class DecodeGraphs:
    """Graphs of one engine, captured when a shape is first used, in a shared memory pool.

    Attributes:
        num_captures: Graphs captured so far.
    """

    def __init__(self, step: Callable[[int, int], Tensor], capture: Callable[[Replay], Replay] | None = None) -> None:
        """Creates an empty set of graphs.

        Args:
            step: Computes logits from (batch, length); reads and writes the same addresses in every call.
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
        """Prepares a call of the engine; graphs captured at the same place are reused.

        Args:
            place: Addresses and shapes of everything that a step reads and writes. A graph is valid only for these.
            most_rows: Largest batch size; rows above it must not be overwritten.
            row_len: Largest length, slots.
        """
        self._graphs = self._kept.pop(place, {})
        self._kept[place] = self._graphs  # the newest is last
        while len(self._kept) > MAX_GRAPH_SETS:
            del self._kept[next(iter(self._kept))]
        self._most_rows, self._row_len = most_rows, row_len

    def run(self, batch: int, length: int) -> Tensor:
        """Returns the logits of the first `batch` rows; the next call overwrites them."""
        shape = (_bucket(batch, 1, self._most_rows), _bucket(length, MIN_LENGTH, self._row_len))
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(*shape)
            self.num_captures += 1
        replay, logits_BV = self._graphs[shape]
        replay()
        return logits_BV[:batch]

    def _captured(self, batch: int, length: int) -> tuple[Replay, Tensor]:
        logits = _on_side_stream(lambda: self._step(batch, length))  # libraries initialize outside the capture
        if self._logits_SV is None or self._logits_SV.size(0) < batch:
            self._logits_SV = logits.new_empty(batch, logits.size(1))  # earlier graphs keep theirs
        logits_BV = self._logits_SV[:batch]
        return self._capture(lambda: logits_BV.copy_(self._step(batch, length))), logits_BV


def _on_side_stream(action: Callable[[], Tensor]) -> Tensor:
    """Runs an action on a separate stream, as a capture does, and returns its result."""
    if not torch.cuda.is_available():
        return action()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = action()
    torch.cuda.current_stream().wait_stream(side)
    return found


class _CudaCapture:
    """Captures CUDA graphs into one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, action: Replay) -> Replay:
        """Returns a function that replays the action."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # other threads use CUDA
            action()
        return graph.replay


def _bucket(size: int, smallest: int, largest: int) -> int:
    """Returns `smallest` times the smallest power of two that is at least `size`, limited to `largest`."""
    bucket = smallest
    while bucket < size:
        bucket *= 2
    return min(bucket, largest)

"""What a decode step costs by the number of its rows: measured once on a machine, and tokens are drafted by it.

Owns the measurement. What is drafted does not change what is sampled, but when a response is whole. Where that decides
which responses a run takes (`engine.stream`), or what is given up in the cache and read again (`engine.converse`), and
where there is no place to keep what was measured, costs are `ASSUMED`: such a run depends on config and seed alone.
Else they are kept in the user's cache folder by processor, PyTorch, the model and its part on a rank, and are those of
the first engine of a job that asked, so that all ranks of a replica draft alike. One thread computes, and its processor
time counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrl.models.kernels import machine

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Of the steps that are measured."""

ROUNDS = 3
PATIENCE_S = 2.0
"""Processor time after which larger steps are not measured: beyond the last two the cost grows as between them."""

TOKENS, SLOTS = 8, 512
"""Attention is measured of so many tokens over so many slots each."""

Curve = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """In any unit.

    Attributes:
        steps: Of the products and draws of a step of 0, 1, 2 ... rows.
        slot: Of attention for each slot that a row reads, all layers together.
        drafts: What Python does for a step with drafts besides.
    """

    steps: Curve
    slot: float
    drafts: float


ASSUMED: dict[str, Any] = {"steps": [[1, 17], [17, 33]], "slot": 5e-4, "drafts": 0.0}
"""In units of the work for a row: reading the weights takes as long as computing 16 rows, attention over 2,000 slots as
long as one. About what 8 layers x 512 take on one thread with AVX-512 in fp32."""

DRAFTS_NS = 250_000
"""Python's work for a step with drafts, on one machine; it matters beside steps of a millisecond alone."""


def costs(what: str, step: Callable[[int], object], attend: Callable[[int, int], object], most: int) -> Costs:
    """Those of a model on this machine.

    Args:
        what: Names the work: the model, its part on this rank, what is drawn from.
        step: Products and draws of so many rows.
        attend: Attention of so many tokens over so many slots, in all layers.
        most: Rows of a step.
    """
    name = f"steps/{machine.key(machine.processor(), torch.__version__, what)}"
    place, own = machine.place(name), json.dumps(ASSUMED)
    if place is not None:
        made = machine.kept(name, lambda: json.dumps(measured(step, attend)).encode()).decode()
        own = made if place.exists() else own
    agreed = machine.agreed(f"step/{what}", own)
    if agreed != own:
        machine.keep(name, agreed.encode())
    return of(json.loads(agreed), most)


def of(told: Mapping[str, Any], most: int) -> Costs:
    """From what is kept, or `ASSUMED`."""
    return Costs(curve(told["steps"], most), told["slot"], told["drafts"])


def measured(step: Callable[[int], object], attend: Callable[[int, int], object]) -> dict[str, Any]:
    """Rows and nanoseconds of at least two steps; nanoseconds of a slot."""
    steps: list[list[int]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.thread_time()
    try:
        for rows in ROWS:
            if len(steps) > 1 and time.thread_time() - began > PATIENCE_S:
                break
            steps.append([rows, max(1, _best(step, rows))])
        slots = max(0, _best(attend, TOKENS, SLOTS) - _best(attend, TOKENS, 1))
    finally:
        torch.set_num_threads(threads)
    return {"steps": steps, "slot": slots / (TOKENS * (SLOTS - 1)), "drafts": DRAFTS_NS}


def _best(work: Callable[..., object], *given: int) -> int:
    """Nanoseconds of this thread's processor; the first round warms up."""
    times = []
    for _ in range(1 + ROUNDS):
        start = time.thread_time_ns()
        work(*given)
        times.append(time.thread_time_ns() - start)
    return min(times[1:])


def curve(points: list[list[int]], most: int) -> Curve:
    """Through the points, by straight lines; it never falls: one that is above a later one was disturbed."""
    rows, times = np.array(points, dtype=np.float64).T
    times = np.minimum.accumulate(times[::-1])[::-1]
    slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
    asked = np.arange(most + 1, dtype=np.float64)
    beyond = times[-1] + slope * (asked - rows[-1])
    found: Curve = np.where(asked > rows[-1], beyond, np.interp(asked, rows, times))
    return found

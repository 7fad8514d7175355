"""Duration of a decode step as a function of its number of rows; decides how many tokens are drafted.

Drafting does not change tokens, only when a response finishes. Where that decides which responses a run uses
(`engine.generate_streaming`) or which cached keys are evicted (`engine.generate_multi_turn`), the costs are `ASSUMED`,
so that such a run depends only on config and seed. So are they if there is no cache folder.

Otherwise they are measured once and stored in the user's cache folder, by processor, PyTorch, model and shard. All
ranks use the measurement of the first engine that asked, so that a replica drafts alike. It is made with one thread, in
CPU time.
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

from mrl.models.kernels import build_cache

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows of the measured steps."""

ROUNDS = 3
PATIENCE_S = 2.0
"""Processor time after which larger steps are not measured, s; they are extrapolated from the last two."""

TOKENS, SLOTS = 8, 512
"""Tokens, and slots per token, of the attention measurement."""

Curve = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Cost of a decode step, in any unit of time.

    Attributes:
        steps: Cost of the matrix products and sampling of a step of 0, 1, 2 ... rows.
        slot: Cost of attention per slot that a row reads, all layers together.
        drafts: Additional cost of a step with drafts (Python overhead).
    """

    steps: Curve
    slot: float
    drafts: float


ASSUMED: dict[str, Any] = {"steps": [[1, 17], [17, 33]], "slot": 5e-4, "drafts": 0.0}
"""Costs in units of the work for one row: reading the weights takes as long as computing 16 rows, attention over 2,000
slots as long as one. About right for 8 layers of 512 in fp32, on one thread with AVX-512."""

DRAFTS_NS = 250_000
"""Python overhead of a step with drafts on one machine, ns; significant only for steps of about a millisecond."""


def costs(what: str, step: Callable[[int], object], attend: Callable[[int, int], object], most: int) -> Costs:
    """Returns the costs of a model on this machine, measured or from the cache folder.

    Args:
        what: Description of the work for the cache: model, shard, kind of sampling.
        step: Runs the products and sampling of so many rows.
        attend: Runs the attention of so many tokens over so many slots, in all layers.
        most: Largest number of rows of a step.
    """
    name = f"steps/{build_cache.key(build_cache.processor(), torch.__version__, what)}"
    place, own = build_cache.cache_file(name), json.dumps(ASSUMED)
    if place is not None:
        made = build_cache.cached(name, lambda: json.dumps(measured(step, attend)).encode()).decode()
        own = made if place.exists() else own
    agreed = build_cache.first_rank_value(f"step/{what}", own)
    if agreed != own:
        build_cache.write_cache(name, agreed.encode())
    return from_stored(json.loads(agreed), most)


def from_stored(stored: Mapping[str, Any], most: int) -> Costs:
    """Returns the costs of a stored measurement, or of `ASSUMED`."""
    return Costs(curve(stored["steps"], most), stored["slot"], stored["drafts"])


def measured(step: Callable[[int], object], attend: Callable[[int, int], object]) -> dict[str, Any]:
    """Measures at least two steps, as [rows, nanoseconds], and the attention, as nanoseconds per slot."""
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
    """Returns the shortest CPU time of this thread, ns; the first round warms up."""
    times = []
    for _ in range(1 + ROUNDS):
        start = time.thread_time_ns()
        work(*given)
        times.append(time.thread_time_ns() - start)
    return min(times[1:])


def curve(points: list[list[int]], most: int) -> Curve:
    """Interpolates linearly between the points; a time above a later one is treated as noise and lowered."""
    rows, times = np.array(points, dtype=np.float64).T
    times = np.minimum.accumulate(times[::-1])[::-1]
    slope = (times[-1] - times[-2]) / (rows[-1] - rows[-2])
    asked = np.arange(most + 1, dtype=np.float64)
    beyond = times[-1] + slope * (asked - rows[-1])
    found: Curve = np.where(asked > rows[-1], beyond, np.interp(asked, rows, times))
    return found

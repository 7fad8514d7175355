"""Finds the smallest parallel layout that resembles a given one.

A dimension larger than one stays larger than one, and one of size one stays one, as far as the ranks suffice. The
model's sizes follow from the layout (`model.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from mrl.parallel_layout import ParallelLayout

WEIGHTS = {
    "tensor parallel": 8,
    "pipeline parallel": 8,
    "expert parallel": 8,
    "rollout tensor parallel": 8,
    "rollout expert parallel": 8,
    "context parallel": 6,
    "expert tensor parallel": 4,
    "rollout expert tensor parallel": 4,
    "data parallel": 3,
    "rollout replicas": 2,
    "expert data parallel": 1,
}
"""Importance of keeping each dimension split, if the ranks do not suffice for all."""


def sizes(grid: ParallelLayout, *, experts: bool) -> dict[str, int]:
    """Returns the size of every dimension of a layout, in ranks."""
    found = {
        "tensor parallel": grid.tp,
        "context parallel": grid.cp,
        "pipeline parallel": grid.pp,
        "data parallel": grid.dp,
        "rollout tensor parallel": grid.rollout_tp,
        "rollout replicas": grid.num_replicas,
    }
    if experts:
        found |= {
            "expert parallel": grid.ep,
            "expert tensor parallel": grid.expert_tp,
            "expert data parallel": len(grid.trainers) // grid.pp // (grid.ep * grid.expert_tp),
            "rollout expert parallel": grid.rollout_ep,
            "rollout expert tensor parallel": grid.rollout_moe_tp,
        }
    return found


def smallest_like(real: ParallelLayout, max_ranks: int, *, experts: bool) -> ParallelLayout:
    """Returns `real` if it fits into `max_ranks`, otherwise the smallest of the most similar layouts.

    A reduced layout has no uneven pipeline stages, since the model's depth is not known here (`model.py` adds them).
    Rollout replicas have no pipeline, as in the native engine. Ranks that only sample are kept, which takes two ranks
    at least.
    """
    max_ranks = max(max_ranks, 2) if real.has_separate_rollout else max_ranks
    if real.world_size <= max_ranks:
        return replace(real, rollout_pp=1)
    goal = sizes(real, experts=experts)

    def distance(grid: ParallelLayout) -> tuple[int, int, int, int]:
        found = sizes(grid, experts=experts)
        lost = sum(WEIGHTS[name] for name in goal if (goal[name] > 1) != (found[name] > 1))
        return lost, _num_changed_orders(real, grid), grid.world_size, sum(found.values())

    return min(_candidates(real, max_ranks, experts=experts), key=distance)


def _num_changed_orders(real: ParallelLayout, reduced: ParallelLayout) -> int:
    """Counts sizes whose order between actor and rollout changes, since the weight sync would differ."""
    pairs = [(grid.tp, grid.rollout_tp, grid.ep, grid.rollout_ep) for grid in (real, reduced)]
    (tp, rollout_tp, ep, rollout_ep), (small_tp, small_rollout_tp, small_ep, small_rollout_ep) = pairs
    return (compare(tp, rollout_tp) != compare(small_tp, small_rollout_tp)) + (
        compare(ep, rollout_ep) != compare(small_ep, small_rollout_ep)
    )


def compare(one: int, other: int) -> int:
    """Returns -1, 0 or 1 if `one` is smaller than, equal to or larger than `other`."""
    return (one > other) - (one < other)


def _candidates(real: ParallelLayout, max_ranks: int, *, experts: bool) -> Iterator[ParallelLayout]:
    most = max_ranks - 1 if real.has_separate_rollout else max_ranks
    for tp, cp, pp in itertools.product(_smaller(real.tp, most), _smaller(real.cp, most), _smaller(real.pp, most)):
        model = tp * cp * pp
        for dp in _smaller(real.dp, most // model) if model <= most else ():
            train, stage = model * dp, tp * cp * dp
            base = replace(
                real,
                tp=tp, cp=cp, pp=pp, vpp=min(real.vpp, 2) if pp > 1 else 1,
                ep=1, etp=None, rollout_tp=1, rollout_ep=1, rollout_pp=1,
                first_stage_layers=None, last_stage_layers=None,
            )  # fmt: skip
            for world, rollout_tp, own in _replicas(real, train, max_ranks):
                dense = replace(base, world_size=world, rollout_tp=rollout_tp, rollout_ranks=own)
                yield from _expert_layouts(real, dense, stage) if experts else (dense,)


def _replicas(real: ParallelLayout, train: int, max_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yields (ranks of the job, size of a replica, ranks that only sample) for a number of training ranks."""
    if not real.has_separate_rollout:
        yield from ((train, size, 0) for size in _smaller(real.rollout_tp, train) if train % size == 0)
        return
    left = max_ranks - train
    for size in _smaller(real.rollout_tp, left):
        for count in _smaller(real.num_replicas, left // size):
            yield train + count * size, size, count * size


def _expert_layouts(real: ParallelLayout, dense: ParallelLayout, stage: int) -> Iterator[ParallelLayout]:
    """Yields a dense layout with every expert layout over the ranks of a stage and of a replica."""
    cuts: list[int | None] = [None] if real.etp is None else list(_smaller(real.etp, stage))
    for ep, etp, rollout_ep in itertools.product(
        _smaller(real.ep, stage), cuts, _smaller(real.rollout_ep, dense.rollout_tp)
    ):
        grid = replace(dense, ep=ep, etp=etp, rollout_ep=rollout_ep)
        if ep == 1 and grid.expert_tp != grid.tp:  # rejected by trainer/validation/experts.py
            grid = replace(grid, etp=None)
        if stage % (ep * grid.expert_tp) == 0 and dense.rollout_tp % rollout_ep == 0:
            yield grid


def _smaller(size: int, most: int) -> list[int]:
    """Returns the sizes to try for a dimension: itself and those of 1, 2 and 4 that are not larger."""
    return sorted({one for one in (1, 2, 4, size) if one <= min(size, most)})

"""Sampling that stops before all is whole: what is in flight goes to the replicas, and what is begun comes back.

Owns the way between `InFlight` and an engine's `stream`. Longest answers first: groups with samples go on first, then
come those of the earliest batch, the longest of it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from mrl.distributed.collectives import all_gather_ragged
from mrl.distributed.groups import ProcessGroups
from mrl.engines._work_queue import Work
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.rollout.buffer import Group, InFlight
from mrl.rollout.prompt_assignment import LengthHistory
from mrl.rollout.prompt_queue import SharedQueue
from mrl.types import Rollout


def stream(
    engine: RolloutEngine,
    flight: InFlight,
    groups: list[Group],
    sampling: SamplingConfig,
    ranks: ProcessGroups,
    history: LengthHistory,
    over: dist.ProcessGroup,
    *,
    step: int,
    steps: int,
    ahead: bool,
) -> tuple[list[Rollout], list[int]]:
    """Collective over `over`: samples these groups until a step has enough.

    Args:
        engine: Awake, under the weights of now.
        flight: Gives and takes the samples that are begun.
        groups: To be sampled.
        sampling: The distribution.
        ranks: Who sits where.
        history: Expected lengths.
        over: The ranks that sample, at least.
        step: The next one that takes groups.
        steps: In the weights of now.
        ahead: See `InFlight.enough`.

    Returns:
        Rollouts of this replica whose groups are whole, and these groups in the order in which they became it.
    """
    here = ranks.grid.replica(ranks.rank) if ranks.samples else None
    groups = _sorted(groups, flight, history)
    own = [_work(group, flight, sampling.n) for group in groups if group.replica is not None and group.replica == here]
    waiting = [_work(group, flight, sampling.n) for group in groups if group.replica is None]
    missing = _told([(work.prompt.uid, work.num_samples) for work in own], 2, ranks, over)
    queue = SharedQueue(
        own,
        {group.uid: group.replica for group in groups if group.replica is not None},
        waiting,
        {row[0]: row[1] for row in missing} | {work.prompt.uid: work.num_samples for work in waiting},
        partial(flight.enough, step=step, ahead=ahead),
        most=flight.schedule.most_in_flight * sampling.n,
        num_rows=engine.spec.config.max_num_seqs,
        grid=ranks.grid,
        rank=ranks.rank,
        over=over,
        told_to_stop=engine.told_to_stop,
    )
    begun = engine.stream(queue, sampling)
    for group in groups:
        flight.begun.pop(group.uid, None)
    for one in begun:
        flight.begun.setdefault(one.prompt.uid, []).append(one)
    for uid, rollouts in queue.rollouts.items():
        flight.rollouts.setdefault(uid, []).extend(rollouts)
    left = {group.uid for group in groups} - set(queue.whole)
    held = [(uid, here or 0, *flight.held(uid)) for uid in sorted(left & {*flight.begun, *flight.rollouts})]
    flight.stopped(_told(held, 4, ranks, over), steps)
    whole = [rollout for uid in queue.whole for rollout in flight.rollouts.get(uid, ())]
    return sorted(whole, key=lambda one: (one.prompt.uid, one.sample_index)), queue.whole


def _sorted(groups: Sequence[Group], flight: InFlight, history: LengthHistory) -> list[Group]:
    """Those with samples, then the others batch after batch, long ones first."""
    size, first = flight.schedule.batch_size, min((group.uid for group in groups), default=0)

    def place(group: Group) -> tuple[bool, int, float, int]:
        batch = (group.uid - first) // size if flight.schedule.in_order else not group.restarted
        return group.replica is None, batch, -history.expected(group.source), group.uid

    return sorted(groups, key=place)


def _work(group: Group, flight: InFlight, num_samples: int) -> Work:
    begun = tuple(sorted(flight.begun.get(group.uid, ()), key=lambda one: one.sample_index))
    there = {one.sample_index for one in (*begun, *flight.rollouts.get(group.uid, ()))}
    new = tuple(index for index in range(num_samples) if index not in there)
    return Work(flight.prompt(group.uid), new, begun)


def _told(mine: Sequence[Sequence[int]], width: int, ranks: ProcessGroups, over: dist.ProcessGroup) -> list[list[int]]:
    """Collective over `over`: the rows of all replicas, each told by its first rank."""
    own = torch.tensor(mine if ranks.leads_replica else [], dtype=torch.int64).reshape(-1, width)
    rows: list[list[int]] = all_gather_ragged(own, over).tolist()
    return rows

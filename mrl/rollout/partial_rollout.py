"""Partial rollouts: sampling that stops as soon as a step has enough groups, and continues unfinished responses later.

It connects the rollout buffer with an engine's `sample_until_complete`. Partial groups continue first, then the groups
of the earliest batch follow, those with the longest expected responses first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from mrl.distributed.collectives import all_gather_ragged
from mrl.distributed.groups import ProcessGroups
from mrl.engines._work_queue import PromptWork
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.rollout.buffer import PromptGroup, RolloutBuffer
from mrl.rollout.prompt_assignment import LengthHistory
from mrl.rollout.prompt_queue import PromptQueue
from mrl.types import Rollout


def sample_until_complete(
    engine: RolloutEngine,
    buffer: RolloutBuffer,
    groups: list[PromptGroup],
    sampling: SamplingConfig,
    ranks: ProcessGroups,
    history: LengthHistory,
    over: dist.ProcessGroup,
    *,
    step: int,
    steps: int,
    ahead: bool,
) -> tuple[list[Rollout], list[int]]:
    """Collective over `over`: samples these groups until the next step has enough complete ones.

    Args:
        engine: Rollout engine, awake and with the current weights.
        buffer: Source and destination of the partial rollouts.
        groups: Groups to sample, pending or partial.
        sampling: Sampling distribution.
        ranks: Process groups and coordinates of this rank.
        history: Expected response lengths, by which the queue is sorted.
        over: Process group that contains at least all ranks that sample.
        step: Next step that consumes groups.
        steps: Training steps done by the current weights.
        ahead: Argument of `RolloutBuffer.may_stop`.

    Returns:
        Samples of the completed groups on this replica, and the uids of these groups in order of completion.
    """
    replica = ranks.grid.replica(ranks.rank) if ranks.is_sampler else None
    groups = _sorted(groups, buffer, history)
    own = [_work(group, buffer, sampling.n) for group in groups if replica is not None and group.replica == replica]
    waiting = [_work(group, buffer, sampling.n) for group in groups if group.replica is None]
    missing = _gather_rows([(work.prompt.uid, work.num_samples) for work in own], 2, ranks, over)
    queue = PromptQueue(
        own,
        {group.uid: group.replica for group in groups if group.replica is not None},
        waiting,
        {row[0]: row[1] for row in missing} | {work.prompt.uid: work.num_samples for work in waiting},
        partial(buffer.may_stop, step=step, ahead=ahead),
        max_samples=buffer.schedule.max_in_flight * sampling.n,
        num_rows=engine.spec.config.max_num_seqs,
        grid=ranks.grid,
        rank=ranks.rank,
        over=over,
        abort_requested=engine.abort_requested,
    )
    partials = engine.generate_streaming(queue, sampling)
    for group in groups:
        buffer.partial_rollouts.pop(group.uid, None)
    for one in partials:
        buffer.partial_rollouts.setdefault(one.prompt.uid, []).append(one)
    for uid, rollouts in queue.rollouts.items():
        buffer.rollouts.setdefault(uid, []).extend(rollouts)
    here = sorted(({group.uid for group in groups} - {*queue.completed}) & {*buffer.partial_rollouts, *buffer.rollouts})
    sizes = [(uid, replica or 0, *buffer.local_size(uid)) for uid in here]
    buffer.mark_partial(_gather_rows(sizes, 4, ranks, over), steps)
    complete = [rollout for uid in queue.completed for rollout in buffer.rollouts.get(uid, ())]
    return sorted(complete, key=lambda one: (one.prompt.uid, one.sample_index)), queue.completed


def _sorted(groups: Sequence[PromptGroup], buffer: RolloutBuffer, history: LengthHistory) -> list[PromptGroup]:
    """Sorts partial groups first, then by batch, longest expected responses first."""
    size, first = buffer.schedule.batch_size, min((group.uid for group in groups), default=0)

    def key(group: PromptGroup) -> tuple[bool, int, float, int]:
        batch = (group.uid - first) // size if buffer.schedule.in_order else not group.restarted
        return group.replica is None, batch, -history.expected(group.source), group.uid

    return sorted(groups, key=key)


def _work(group: PromptGroup, buffer: RolloutBuffer, num_samples: int) -> PromptWork:
    """Returns the unfinished samples of a group as work for an engine."""
    partials = tuple(sorted(buffer.partial_rollouts.get(group.uid, ()), key=lambda one: one.sample_index))
    started = {one.sample_index for one in (*partials, *buffer.rollouts.get(group.uid, ()))}
    new = tuple(index for index in range(num_samples) if index not in started)
    return PromptWork(buffer.prompt(group.uid), new, partials)


def _gather_rows(
    rows: Sequence[Sequence[int]], width: int, ranks: ProcessGroups, over: dist.ProcessGroup
) -> list[list[int]]:
    """Collective over `over`: concatenates the rows of all replicas, as their first ranks have them."""
    own = torch.tensor(rows if ranks.is_replica_leader else [], dtype=torch.int64).reshape(-1, width)
    gathered: list[list[int]] = all_gather_ragged(own, over).tolist()
    return gathered

"""One prompt queue for all replicas, deterministic because it counts decode steps instead of reading a clock.

Every few decode steps all replicas exchange which responses finished. From that every rank computes the same decisions:
which replica gets the next prompts, and when all replicas stop. A replica with short responses gets more prompts, and
the result does not depend on how fast any replica runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from mrl.distributed.collectives import all_gather_ragged
from mrl.engines._work_queue import PromptWork, WorkQueue
from mrl.parallel_layout import ParallelLayout
from mrl.types import Rollout

ABORT = -1
"""Value in place of a uid that reports a stop request."""


class PromptQueue(WorkQueue):
    """Prompt queue of one sampling call, one instance per rank.

    Attributes:
        rollouts: Finished responses of this replica, by uid.
        completed: Uids of the completed groups of all replicas, in order of completion.
    """

    def __init__(
        self,
        own: Sequence[PromptWork],
        replica_of: Mapping[int, int],
        waiting: Sequence[PromptWork],
        missing: Mapping[int, int],
        may_stop: Callable[[Collection[int]], bool],
        *,
        max_samples: int,
        num_rows: int,
        grid: ParallelLayout,
        rank: int,
        over: dist.ProcessGroup,
        abort_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        """Creates the queue; all arguments except `own` and `rank` are the same on every rank.

        Args:
            own: Partial groups that this replica continues.
            replica_of: Replica index of each partial group, by uid.
            waiting: Pending groups, in the order in which they start.
            missing: Number of unfinished samples of each group, by uid.
            may_stop: Returns whether sampling may stop, given the uids of the groups completed in this call.
            max_samples: Upper limit on the samples of a replica, see `WorkQueue`.
            num_rows: Sequences that a replica decodes concurrently.
            grid: Parallel layout of the job.
            rank: Global rank of this process.
            over: Process group that contains at least all ranks that sample.
            abort_requested: Returns whether this rank received a stop request; then all replicas stop.
        """
        self.max_samples, self._abort_requested = max_samples, abort_requested
        self.rollouts: dict[int, list[Rollout]] = {}
        self.completed: list[int] = []
        self._own, self._waiting, self._missing = list(own), deque(waiting), dict(missing)
        self._may_stop = may_stop
        self._num_rows, self._grid, self._over = num_rows, grid, over
        self._is_leader = grid.rollout_rank(rank) == 0 and rank in grid.samplers
        self._replica = grid.replica(rank) if rank in grid.samplers else -1
        self._load = dict.fromkeys(range(grid.num_replicas), 0)
        for uid, replica in replica_of.items():
            self._load[replica] += self._missing[uid]

    def poll(self, finished: Sequence[Rollout], num_waiting: int) -> Sequence[PromptWork] | None:
        """Implements `WorkQueue.poll`: gives waiting prompts to the least loaded replica with free sequences."""
        for rollout in finished:
            self.rollouts.setdefault(rollout.prompt.uid, []).append(rollout)
        own = [[rollout.prompt.uid, self._replica] for rollout in (finished if self._is_leader else ())]
        own += [[ABORT, 0]] if self._abort_requested() else []
        reports = all_gather_ragged(torch.tensor(own, dtype=torch.int64).reshape(-1, 2), self._over).tolist()
        for uid, replica in reports:
            if uid == ABORT:
                continue
            self._missing[uid] -= 1
            self._load[replica] -= 1
            if not self._missing[uid]:
                self.completed.append(uid)
        if any(uid == ABORT for uid, _ in reports) or self._may_stop(self.completed):
            return None
        assigned, self._own = self._own, []
        while self._waiting:
            work = self._waiting[0]
            replica = min(self._load, key=lambda one: (self._load[one], one))
            if self._load[replica] and self._load[replica] + work.num_samples > self._num_rows:
                break
            self._waiting.popleft()
            self._load[replica] += work.num_samples
            if replica == self._replica:
                assigned.append(work)
        return assigned

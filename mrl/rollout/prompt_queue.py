"""One queue of prompts for all replicas, in logical time.

Owns which replica samples a prompt that waits, and when all of them stop. Replicas ask together, once in a number of
decode steps, and every rank decides the same from what all have told: which groups became whole and how many sequences
each has. So a replica whose answers are short takes more prompts, and yet nothing depends on how fast it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from mrl.distributed.collectives import all_gather_ragged
from mrl.engines._work_queue import Feed, Work
from mrl.parallel_layout import Grid
from mrl.types import Rollout

STOP = -1
"""In place of a uid: a rank was told to stop."""


class SharedQueue(Feed):
    """Of one call.

    Attributes:
        rollouts: By uid the whole responses of this replica.
        whole: Groups in the order in which they became whole, of all replicas.
    """

    def __init__(
        self,
        own: Sequence[Work],
        held: Mapping[int, int],
        waiting: Sequence[Work],
        missing: Mapping[int, int],
        enough: Callable[[Collection[int]], bool],
        *,
        most: int,
        num_rows: int,
        grid: Grid,
        rank: int,
        over: dist.ProcessGroup,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """The same on every rank, but for the samples in `own`.

        Args:
            own: Groups with samples on this replica, which goes on with them.
            held: By uid the replica of each group with samples.
            waiting: The others, in the order in which they begin.
            missing: By uid the samples that a group lacks.
            enough: Whether it is, once these groups have become whole.
            most: See `Feed`.
            num_rows: Sequences that run at a time in a replica.
            grid: Who sits where.
            rank: This one.
            over: The ranks that sample, at least.
            told_to_stop: Whether this rank was told to: then all replicas stop.
        """
        self.most = most
        self._told_to_stop = told_to_stop
        self.rollouts: dict[int, list[Rollout]] = {}
        self.whole: list[int] = []
        self._own = list(own)
        self._waiting = deque(waiting)
        self._missing = dict(missing)
        self._enough = enough
        self._num_rows, self._grid, self._over = num_rows, grid, over
        self._speaks = grid.rollout_rank(rank) == 0 and rank in grid.samplers
        self._replica = grid.replica(rank) if rank in grid.samplers else -1
        self._load = dict.fromkeys(range(grid.num_replicas), 0)
        for uid, replica in held.items():
            self._load[replica] += self._missing[uid]

    def pulse(self, finished: Sequence[Rollout], num_waiting: int) -> Sequence[Work] | None:
        """See `Feed.pulse`: the first of the queue goes to the replica with the fewest sequences, while it has rows."""
        for rollout in finished:
            self.rollouts.setdefault(rollout.prompt.uid, []).append(rollout)
        mine = [[rollout.prompt.uid, self._replica] for rollout in (finished if self._speaks else ())]
        mine += [[STOP, 0]] if self._told_to_stop() else []
        told = all_gather_ragged(torch.tensor(mine, dtype=torch.int64).reshape(-1, 2), self._over).tolist()
        for uid, replica in told:
            if uid == STOP:
                continue
            self._missing[uid] -= 1
            self._load[replica] -= 1
            if not self._missing[uid]:
                self.whole.append(uid)
        if any(uid == STOP for uid, _ in told) or self._enough(self.whole):
            return None
        handed, self._own = self._own, []
        while self._waiting:
            work = self._waiting[0]
            replica = min(self._load, key=lambda one: (self._load[one], one))
            if self._load[replica] and self._load[replica] + work.num_samples > self._num_rows:
                break
            self._waiting.popleft()
            self._load[replica] += work.num_samples
            if replica == self._replica:
                handed.append(work)
        return handed

"""Multi-turn episodes in one generation loop: a sequence waits for its environment while others decode.

A sequence whose turn ended leaves the batch at once and joins a queue. Its keys and values stay in the cache unless
running sequences need the row; then they are recomputed. Replies are used at logical times, never on arrival, so that
the batches, and with them every bit of a run, follow from config and seed:

- Decisions are made when a turn ends, and when nothing runs.
- The queue is ordered by the decode step at which a turn ended, then by prompt and sample index.
- Waiting prompts start first, in all free rows, while at most `MAX_ACTIVE_RATIO` episodes per row are active.
- The head of the queue resumes once the running episodes are at most `RESUME_FRACTION` of their goal: `SHARE` of the
  active episodes, but no more than there are rows. As many resume as are missing to the goal. If a reply has not
  arrived, the engine waits for it.

So the head of the queue has waited for at least about half a turn's decode steps before its reply is needed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from mrl.engines._multiturn_base import MultiTurnClient, SequenceKey, check_reply
from mrl.engines._multiturn_sample import MultiTurnSample
from mrl.engines.base import SamplingConfig
from mrl.engines.native.generation import Generation
from mrl.engines.native.scheduler import PrefillGroup, RunningSample
from mrl.types import Rollout

MAX_ACTIVE_RATIO = 3
"""Most active episodes per decoding row while prompts are waiting to start."""

SHARE = 2 / 3
"""Fraction of the active episodes that should run."""

RESUME_FRACTION = 3 / 4
"""Fraction of that goal at which episodes resume, so that several are prefilled together."""

PARKED_ROWS_DIVISOR = 4
"""Divisor: if memory is short, the number of parked rows is a multiple of running rows / `PARKED_ROWS_DIVISOR`, so that
small changes of the free memory seldom change it."""


def pool_rows(limit: int, num_prompts: int, num_samples: int, fitting: int) -> int:
    """Returns the number of cache rows for episodes of which `limit` may run, if `fitting` rows fit into memory."""
    most = min(
        num_prompts * num_samples, MAX_ACTIVE_RATIO * limit + num_samples - 1
    )  # the samples of a prompt start together
    wanted = most + (most > 1)  # one spare row for swapping rows
    if fitting >= wanted or fitting < limit:
        return wanted
    step = -(-limit // PARKED_ROWS_DIVISOR)
    return limit + (fitting - limit) // step * step


class MultiTurnGeneration(Generation):
    """Multi-turn episodes of one call, in the order that the module docstring describes.

    Args:
        client: Multi-turn client.
        sampling: Distribution of each turn; `max_tokens` limits the episode.
        parts: Further arguments of `Generation`.
    """

    def __init__(self, client: MultiTurnClient, sampling: SamplingConfig, **parts: Any) -> None:
        super().__init__(sampling=sampling, **parts)
        self._client = client
        self._limit, self._seed = sampling.max_tokens, sampling.seed
        self._samples: dict[SequenceKey, MultiTurnSample] = {}
        self._queue: list[SequenceKey] = []
        self._version = -1
        self.stats |= {"reread_tokens": 0.0, "waited_s": 0.0}

    def run(self, policy_version: int) -> list[Rollout]:
        """Returns all episodes, ordered by prompt, then sample index; none after an abort request."""
        self._version = policy_version
        found = super().run(policy_version)
        return found if self._done else []

    @property
    def _done(self) -> bool:
        return self._scheduler.done and not self._queue

    def _family(self, sample: RunningSample) -> int:
        return sample.group.index  # a later turn has a prompt uid of its own

    def _decode(self) -> list[int]:
        self._client.poll()
        return super()._decode()

    def _admit(self) -> list[PrefillGroup]:
        """Returns new prompts and resumed episodes, with their cached slots moved into their rows."""
        scheduler = self._scheduler
        num_active = len(scheduler.running) + scheduler.num_prefilled_waiting
        admitted = scheduler.admit(MAX_ACTIVE_RATIO * scheduler.num_rows - num_active - len(self._queue))
        resumed = self._take_resumable(num_active + sum(len(group.pending) for group in admitted))
        for move in scheduler.resume(list(resumed.values()), admitted):
            self._move(move)
        for key, group in resumed.items():
            self.stats["reread_tokens"] += self._samples[key].num_seen - group.cached
        return [*resumed.values(), *admitted]

    def _take_resumable(self, num_others: int) -> dict[SequenceKey, PrefillGroup]:
        """Takes from the head of the queue the episodes that resume, given `num_others` that run or start."""
        found: dict[SequenceKey, PrefillGroup] = {}
        while self._queue:
            running = num_others + len(found)
            goal = min(self._scheduler.num_rows, math.ceil(SHARE * (running + len(self._queue))))
            if running > RESUME_FRACTION * goal:
                break
            found |= self._wait_for_replies(goal - running)
        return found

    def _wait_for_replies(self, most: int) -> dict[SequenceKey, PrefillGroup]:
        """Waits for the replies to the first `most` of the queue; returns those that continue, finishes the others."""
        keys, self._queue = self._queue[:most], self._queue[most:]
        began = time.perf_counter()
        answers = self._client.wait_for_replies(keys)
        self.stats["waited_s"] += time.perf_counter() - began
        found = {}
        for key, answer in zip(keys, answers, strict=True):
            one = self._samples[key]
            if answer is None:
                self._finished[key] = one.to_rollout(self._version)
                self._scheduler.parking.forget(key)
                continue
            one.append_reply(check_reply(answer, len(one.ids), self._limit))
            found[key] = PrefillGroup(
                one.prompt_index, one.as_prompt(self._seed), deque([0]), self._limit - len(one.ids), resumed_key=key
            )
        return found

    def _end(self, rollouts: Mapping[int, Rollout]) -> dict[int, SequenceKey]:
        """Submits the turns that ended; returns the rows of sequences that may have another turn."""
        samples = {row: self._scheduler.running[row] for row in rollouts}
        waiting = {}
        for row in sorted(rollouts, key=lambda row: samples[row].key):
            sample, key = samples[row], samples[row].key
            begun = MultiTurnSample(sample.group.index, sample.group.prompt, sample.sample_index)
            one = self._samples.setdefault(key, begun)
            stopped = one.append_turn(rollouts[row], sample.group.room)
            self._client.submit(stopped)
            self._queue.append(key)
            if stopped.finish_reason != "length":
                waiting[row] = key
        return waiting

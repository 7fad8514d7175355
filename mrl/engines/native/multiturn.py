"""Conversations in one loop: a sequence waits for its environment while the others decode.

Owns who goes on and when. A sequence whose turn ended leaves the batch at once and waits in a queue; its keys and
values stay in the cache, unless running sequences need the rows, and then they are computed again. Answers are taken at
a logical time, never when they come, so that what shares a batch, and with it every bit of a run, follows from config
and seed alone:

- Decisions are made where a turn has just ended, and where nothing runs.
- The queue is in the order of the decode steps at which turns ended, then of the prompt's place and the sample.
- Prompts that wait begin first, in all free rows, as long as at most `LIVE` conversations for each row are under way.
- The first of the queue go on once the running ones are at most `LOW` of their goal: `SHARE` of the conversations under
  way, and no more than there are rows. As many go on as are missing to the goal. Where an answer of these is not there
  yet, the engine waits for it.

So the head of the queue has waited for about half as many decode steps as a turn has, or more, before its answer is
needed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from mrl.engines._multiturn_base import Key, Talk, check_answer
from mrl.engines._multiturn_sample import Conversation
from mrl.engines.base import SamplingConfig
from mrl.engines.native.generation import Generation
from mrl.engines.native.scheduler import Group, Sample
from mrl.types import Rollout

LIVE = 3
"""Conversations under way for each row that decodes, while there are prompts that have not begun."""

SHARE = 2 / 3
"""Of the conversations under way that run."""

LOW = 3 / 4
"""Of that goal, at which the queue is asked: those that go on together are read together."""

PARKING = 4
"""Where memory is short, rows to wait in come by this part of those that run: a little more or less of free memory
seldom changes their number."""


def pool_rows(limit: int, num_prompts: int, num_samples: int, fitting: int) -> int:
    """Rows of the cache for conversations of which `limit` may run at a time, where memory has room for `fitting`."""
    most = min(num_prompts * num_samples, LIVE * limit + num_samples - 1)  # the samples of a prompt begin together
    asked = most + (most > 1)  # one is free to move others through
    if fitting >= asked or fitting < limit:
        return asked
    step = -(-limit // PARKING)
    return limit + (fitting - limit) // step * step


class Session(Generation):
    """One call's conversations; the module says in which order.

    Args:
        talk: Answers.
        sampling: Of each turn; its length is that of a conversation.
        parts: The others of `Generation`; the scheduler with a parking.
    """

    def __init__(self, talk: Talk, sampling: SamplingConfig, **parts: Any) -> None:
        super().__init__(sampling=sampling, **parts)
        self._talk = talk
        self._limit, self._seed = sampling.max_tokens, sampling.seed
        self._conversations: dict[Key, Conversation] = {}
        self._queue: list[Key] = []
        self._version = -1
        self.stats |= {"reread_tokens": 0.0, "waited_s": 0.0}

    def run(self, policy_version: int) -> list[Rollout]:
        """All conversations, ordered by prompt, then sample index; none if it was abandoned."""
        self._version = policy_version
        found = super().run(policy_version)
        return found if self._done else []

    @property
    def _done(self) -> bool:
        return self._scheduler.done and not self._queue

    def _family(self, sample: Sample) -> int:
        return sample.group.index  # a later turn is a prompt of its own

    def _decode(self) -> list[int]:
        self._talk.hear()
        return super()._decode()

    def _admit(self) -> list[Group]:
        """Prompts that begin and conversations that go on, with what these have in the cache in their rows."""
        scheduler = self._scheduler
        under_way = len(scheduler.running) + scheduler.num_due
        admitted = scheduler.admit(LIVE * scheduler.num_rows - under_way - len(self._queue))
        resumed = self._resumed(under_way + sum(len(group.pending) for group in admitted))
        for move in scheduler.resume(list(resumed.values()), admitted):
            self._move(move)
        for key, group in resumed.items():
            self.stats["reread_tokens"] += self._conversations[key].num_seen - group.cached
        return [*resumed.values(), *admitted]

    def _resumed(self, num_others: int) -> dict[Key, Group]:
        """From the head of the queue those that go on beside so many others that run or begin."""
        found: dict[Key, Group] = {}
        while self._queue:
            running = num_others + len(found)
            goal = min(self._scheduler.num_rows, math.ceil(SHARE * (running + len(self._queue))))
            if running > LOW * goal:
                break
            found |= self._answered(goal - running)
        return found

    def _answered(self, most: int) -> dict[Key, Group]:
        """Waits for the answers to the first of the queue: those that go on; the others are over."""
        keys, self._queue = self._queue[:most], self._queue[most:]
        began = time.perf_counter()
        answers = self._talk.answers(keys)
        self.stats["waited_s"] += time.perf_counter() - began
        found = {}
        for key, answer in zip(keys, answers, strict=True):
            one = self._conversations[key]
            if answer is None:
                self._finished[key] = one.ended(self._version)
                self._scheduler.parking.forget(key)
                continue
            one.heard(check_answer(answer, len(one.ids), self._limit))
            found[key] = Group(one.place, one.asked(self._seed), deque([0]), self._limit - len(one.ids), answered=key)
        return found

    def _end(self, rollouts: Mapping[int, Rollout]) -> dict[int, Key]:
        """Hands turns that ended over; their sequences wait, but for those that have no room for another turn."""
        samples = {row: self._scheduler.running[row] for row in rollouts}
        waiting = {}
        for row in sorted(rollouts, key=lambda row: samples[row].key):
            sample, key = samples[row], samples[row].key
            begun = Conversation(sample.group.index, sample.group.prompt, sample.sample_index)
            one = self._conversations.setdefault(key, begun)
            stopped = one.took(rollouts[row], sample.group.room)
            self._talk.ask(stopped)
            self._queue.append(key)
            if stopped.finish_reason != "length":
                waiting[row] = key
        return waiting

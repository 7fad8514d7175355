"""From answers that are wanted to tokens: all ranks of the job generate, a part of each answer at a time.

Owns the order of the work. HTTP threads leave answers at the `Desk` of rank 0; in each round all open answers get up to
`PART` tokens, so that one that arrives waits for one round and not for the longest answer before it. Between its parts
an answer is a longer prompt: an engine that keeps prefixes reads only what is new of it, the native engine reads all of
it again.

What an answer gets depends on its prompt, its sampling and its seed, not on who else is served. Where the engine fails
at a batch, only the answers fail that it cannot generate alone either.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mrl.commands.serve.stream_state import Answer
from mrl.distributed.collectives import RankFailedError, from_first_rank, together
from mrl.distributed.groups import ProcessGroups
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.errors import UserError
from mrl.rollout.prompt_assignment import LengthHistory, generate
from mrl.types import Prompt

PART = 32
"""Tokens that an answer gets in a round."""

TICK_S = 0.5
"""Longest wait for an answer before the other ranks are told that there is none."""

MOST_WAITING = 4096
"""Answers that may wait for their turn; more are turned away."""

Told = list[tuple[int, list[int], list[float], bool]]
"""Of each prompt of a batch: its uid, tokens, log-probabilities, and whether it ended with an end token."""


@dataclass(frozen=True)
class Batch:
    """What one call of the engine generates; it travels to all ranks.

    Attributes:
        sampling: One response of each prompt.
        prompts: uid and token ids.
    """

    sampling: SamplingConfig
    prompts: list[tuple[int, tuple[int, ...]]]


Failed = dict[int, Exception]
"""Uid of a prompt of a batch -> why the engine cannot generate for it."""


class BusyError(RuntimeError):
    """Too many answers wait."""


class Desk:
    """Rank 0's list of open answers; `leave` may be called from any thread."""

    def __init__(self, longest: int, part: int, most: int, stop_ids: tuple[int, ...]) -> None:
        """Nothing is open.

        Args:
            longest: Tokens of the engine's longest sequence.
            part: Tokens of an answer's part.
            most: Answers that are worked on at a time.
            stop_ids: The model's end tokens.
        """
        self._longest, self._part, self._most, self._stop_ids = longest, part, most, stop_ids
        self._arrived: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._open: list[Answer] = []
        self._waiting: list[Answer] = []
        self._working: list[dict[int, Answer]] = []
        self._lock = threading.Lock()
        self._wanted: set[Answer] = set()
        self._closed, self._ends = "", False

    def leave(self, answers: Sequence[Answer]) -> None:
        """Takes answers to generate.

        Raises:
            BusyError: Too many wait already, or the server ends.
        """
        with self._lock:
            if self._closed:
                raise BusyError(self._closed)
            if len(self._wanted) + len(answers) > MOST_WAITING:
                raise BusyError(f"{len(self._wanted)} answers wait already; ask again later.")
            self._wanted.update(answers)
            for answer in answers:
                self._arrived.put(answer)

    def withdraw(self, answers: Sequence[Answer]) -> None:
        """Gives up answers whose client has left; the next round is without them. From any thread."""
        for answer in answers:
            answer.cancelled = True
        with self._lock:
            self._wanted.difference_update(answers)

    def end(self) -> None:
        """Lets `work` return once all that was left before is answered."""
        self._arrived.put(None)

    def next_batches(self) -> list[Batch] | None:
        """The next round's work, maybe none after `TICK_S`; answers of equal sampling share a batch. None: the end."""
        self._take_arrived()
        if self._ends and not self._open and not self._waiting:
            return None
        self._forget([answer for answer in (*self._open, *self._waiting) if answer.cancelled])
        while self._waiting and len(self._open) < self._most:
            self._open.append(self._waiting.pop(0))
        groups: dict[tuple[SamplingConfig, int], dict[int, Answer]] = {}
        for answer in self._open:
            sampling, uid, twin = self._sampling(answer), answer.next_uid(), 0
            while uid in groups.setdefault((sampling, twin), {}):  # the same seed twice: not in one call of the engine
                twin += 1
            groups[sampling, twin][uid] = answer
        self._working = list(groups.values())
        return [
            Batch(sampling, [(uid, answer.ids) for uid, answer in group.items()])
            for (sampling, _), group in groups.items()
        ]

    def took(self, place: int, found: Told) -> None:
        """What the ranks generated of the batch that stands there in the round."""
        for uid, ids, logprobs, ended in found:
            answer = self._working[place][uid]
            if answer.take(ids, logprobs, ended=ended):
                self._forget([answer])

    def failed(self, place: int, errors: Failed) -> None:
        """Ends the answers that the engine could not generate.

        Args:
            place: Of the batch in the round.
            errors: See `Failed`.
        """
        for uid, error in errors.items():
            answer = self._working[place][uid]
            status = 400 if isinstance(error, UserError) else 500
            answer.fail(f"the engine cannot answer this request: {error}", status)
            self._forget([answer])

    def close(self, why: str) -> None:
        """All open answers fail, and no further one is taken."""
        with self._lock:
            self._closed = why
            while not self._arrived.empty():
                self._waiting += [answer for answer in [self._arrived.get()] if answer is not None]
        for answer in (*self._open, *self._waiting):
            answer.fail(why, 503)
        self._open, self._waiting = [], []

    def _take_arrived(self) -> None:
        wait = not self._open and not self._waiting
        try:
            while True:
                answer = self._arrived.get(timeout=TICK_S) if wait else self._arrived.get_nowait()
                wait = False
                if answer is None:
                    self._ends = True
                else:
                    self._waiting.append(answer)
        except queue.Empty:
            return

    def _forget(self, answers: Sequence[Answer]) -> None:
        gone = set(answers)
        if gone:
            self._open = [answer for answer in self._open if answer not in gone]
            self._waiting = [answer for answer in self._waiting if answer not in gone]
            with self._lock:
                self._wanted -= gone

    def _sampling(self, answer: Answer) -> SamplingConfig:
        wanted = answer.sampling
        room = self._longest - len(answer.ids)
        return SamplingConfig(
            n=1,
            # a whole part where it fits, so that answers near their end stay in the batch of the others
            max_tokens=self._part if room >= self._part else min(room, answer.remaining),
            temperature=wanted.temperature or 1.0,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            min_p=wanted.min_p,
            greedy=not wanted.temperature,
            ignore_eos=wanted.ignore_eos,
            stop_token_ids=self._stop_ids,
        )


def work(engine: RolloutEngine, groups: ProcessGroups, desk: Desk | None) -> None:
    """Collective over the job: generates what is left at the desk, until it or an exception ends this.

    Args:
        engine: Awake.
        groups: Who sits where.
        desk: On rank 0; None on the others.

    Raises:
        UserError, RankFailedError: The engine can generate nothing any more.
    """
    history = LengthHistory(PART)
    while (batches := from_first_rank(desk.next_batches() if desk else None)) is not None:
        for place, batch in enumerate(batches):
            found, failed = _generated(engine, groups, history, batch)
            if desk is not None:
                desk.took(place, found)
                desk.failed(place, failed)


def _generated(
    engine: RolloutEngine, groups: ProcessGroups, history: LengthHistory, batch: Batch
) -> tuple[Told, Failed]:
    """Collective over the job: returns, on rank 0, what all replicas generated for a batch and what they could not.

    A batch at which the engine fails is tried in halves, so that one bad prompt takes no other with it.

    Raises:
        UserError, RankFailedError: The engine fails at any prompt.
    """
    try:
        return _attempt(engine, groups, history, batch), {}
    except (UserError, RankFailedError) as error:
        _check_alive(engine, groups, history, batch.sampling.stop_token_ids)
        if len(batch.prompts) == 1:
            return [], {batch.prompts[0][0]: error}
    half = len(batch.prompts) // 2
    found: Told = []
    failed: Failed = {}
    for prompts in (batch.prompts[:half], batch.prompts[half:]):
        more, errors = _generated(engine, groups, history, Batch(batch.sampling, prompts))
        found += more
        failed |= errors
    return found, failed


def _check_alive(
    engine: RolloutEngine, groups: ProcessGroups, history: LengthHistory, stop_ids: tuple[int, ...]
) -> None:
    """Collective over the job: generates one token on each replica from a prompt that every model can read.

    Raises:
        UserError, RankFailedError: It cannot; the fault is not the request's.
    """
    sampling = SamplingConfig(n=1, max_tokens=1, greedy=True, stop_token_ids=stop_ids)
    prompts = [(uid, stop_ids[:1] or (0,)) for uid in range(groups.grid.num_replicas)]
    _attempt(engine, groups, history, Batch(sampling, prompts))


def _attempt(engine: RolloutEngine, groups: ProcessGroups, history: LengthHistory, batch: Batch) -> Told:
    """Collective over the job: returns what all replicas generated for a batch, on rank 0.

    Raises:
        UserError, RankFailedError: A replica failed; the same on every rank.
    """
    prompts = [Prompt(uid, ids, "", source=f"request {uid:x}") for uid, ids in batch.prompts]
    with together():
        rollouts = generate(engine, prompts, batch.sampling, groups, history)
    mine: Told = [
        (one.prompt.uid, one.response_ids, one.rollout_logprobs, one.finish_reason == "stop")
        for one in rollouts
        if groups.leads_replica
    ]
    if dist.get_world_size() == 1:
        return mine
    parts: list[Told] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return [one for part in parts for one in part]

"""Batching of requests over rounds: in each round all ranks generate a part of every open answer.

HTTP threads submit answers to rank 0's `RequestQueue`. In each round all open answers get up to `ROUND_TOKENS` tokens,
so that a new one waits for one round and not for the longest answer before it. Between rounds an answer is a longer
prompt: an engine with a prefix cache computes only the new part, the native engine computes all of it again.

An answer depends on its prompt, sampling parameters and seed, not on concurrent requests. If the engine fails on a
batch, only the answers fail that it cannot generate alone either.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mrl.commands.serve.stream_state import StreamedAnswer
from mrl.distributed.collectives import RankFailedError, broadcast_from_rank_0, raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.errors import UserError
from mrl.rollout.prompt_assignment import LengthHistory, generate
from mrl.types import Prompt

ROUND_TOKENS = 32
"""Tokens that an answer gets in a round."""

IDLE_WAIT_S = 0.5
"""Longest wait of rank 0 for a request before an empty round, s."""

MAX_WAITING = 4096
"""Limit of submitted answers; more are rejected."""

Generated = list[tuple[int, list[int], list[float], bool]]
"""Entry per prompt of a batch: uid, tokens, log-probabilities, and whether an end token ended it."""


@dataclass(frozen=True)
class Batch:
    """Prompts of one call of the engine, sent to all ranks.

    Attributes:
        sampling: Sampling parameters, one response per prompt.
        prompts: (uid, token ids) of each prompt.
    """

    sampling: SamplingConfig
    prompts: list[tuple[int, tuple[int, ...]]]


Failures = dict[int, Exception]
"""Uid of a prompt -> error of the engine."""


class BusyError(RuntimeError):
    """Error for a request beyond the server's capacity."""


class RequestQueue:
    """Rank 0's open answers; `submit` and `cancel` are thread-safe."""

    def __init__(self, longest: int, round_tokens: int, max_open: int, stop_ids: tuple[int, ...]) -> None:
        """Creates an empty queue.

        Args:
            longest: Longest sequence of the engine, tokens.
            round_tokens: Tokens that an answer gets in a round.
            max_open: Answers that are generated concurrently.
            stop_ids: End tokens of the model.
        """
        self._longest, self._round_tokens, self._max_open, self._stop_ids = longest, round_tokens, max_open, stop_ids
        self._incoming: queue.SimpleQueue[StreamedAnswer | None] = queue.SimpleQueue()
        self._open: list[StreamedAnswer] = []
        self._waiting: list[StreamedAnswer] = []
        self._batches: list[dict[int, StreamedAnswer]] = []
        self._lock = threading.Lock()
        self._submitted: set[StreamedAnswer] = set()
        self._closed, self._finishing = "", False

    def submit(self, answers: Sequence[StreamedAnswer]) -> None:
        """Queues answers to generate.

        Raises:
            BusyError: Too many answers wait, or the server is shutting down.
        """
        with self._lock:
            if self._closed:
                raise BusyError(self._closed)
            if len(self._submitted) + len(answers) > MAX_WAITING:
                raise BusyError(f"{len(self._submitted)} answers are already queued; try again later.")
            self._submitted.update(answers)
            for answer in answers:
                self._incoming.put(answer)

    def cancel(self, answers: Sequence[StreamedAnswer]) -> None:
        """Drops answers whose client disconnected, from the next round on."""
        for answer in answers:
            answer.cancelled = True
        with self._lock:
            self._submitted.difference_update(answers)

    def finish(self) -> None:
        """Makes `serve_rounds` return once all answers submitted so far are complete."""
        self._incoming.put(None)

    def next_batches(self) -> list[Batch] | None:
        """Returns the next round's batches, one per distinct sampling config; None after `finish`, once all is done.

        Waits up to IDLE_WAIT_S for an answer and then returns no batch.
        """
        self._take_incoming()
        if self._finishing and not self._open and not self._waiting:
            return None
        self._drop([answer for answer in (*self._open, *self._waiting) if answer.cancelled])
        while self._waiting and len(self._open) < self._max_open:
            self._open.append(self._waiting.pop(0))
        groups: dict[tuple[SamplingConfig, int], dict[int, StreamedAnswer]] = {}
        for answer in self._open:
            sampling, uid, twin = self._sampling(answer), answer.next_uid(), 0
            while uid in groups.setdefault((sampling, twin), {}):  # equal seeds need separate calls of the engine
                twin += 1
            groups[sampling, twin][uid] = answer
        self._batches = list(groups.values())
        return [
            Batch(sampling, [(uid, answer.ids) for uid, answer in group.items()])
            for (sampling, _), group in groups.items()
        ]

    def add_tokens(self, index: int, found: Generated) -> None:
        """Adds the generated tokens of the round's batch `index` to its answers."""
        for uid, ids, logprobs, ended in found:
            answer = self._batches[index][uid]
            if answer.add_tokens(ids, logprobs, ended=ended):
                self._drop([answer])

    def add_failures(self, index: int, errors: Failures) -> None:
        """Ends the answers of the round's batch `index` that the engine could not generate, by uid."""
        for uid, error in errors.items():
            answer = self._batches[index][uid]
            status = 400 if isinstance(error, UserError) else 500
            answer.fail(f"the engine failed on this request: {error}", status)
            self._drop([answer])

    def fail_all(self, why: str) -> None:
        """Fails all open answers and rejects further ones with the message `why`."""
        with self._lock:
            self._closed = why
            while not self._incoming.empty():
                self._waiting += [answer for answer in [self._incoming.get()] if answer is not None]
        for answer in (*self._open, *self._waiting):
            answer.fail(why, 503)
        self._open, self._waiting = [], []

    def _take_incoming(self) -> None:
        wait = not self._open and not self._waiting
        try:
            while True:
                answer = self._incoming.get(timeout=IDLE_WAIT_S) if wait else self._incoming.get_nowait()
                wait = False
                if answer is None:
                    self._finishing = True
                else:
                    self._waiting.append(answer)
        except queue.Empty:
            return

    def _drop(self, answers: Sequence[StreamedAnswer]) -> None:
        dropped = set(answers)
        if dropped:
            self._open = [answer for answer in self._open if answer not in dropped]
            self._waiting = [answer for answer in self._waiting if answer not in dropped]
            with self._lock:
                self._submitted -= dropped

    def _sampling(self, answer: StreamedAnswer) -> SamplingConfig:
        sampling = answer.sampling
        room = self._longest - len(answer.ids)
        return SamplingConfig(
            n=1,
            # a full round if it fits, so that answers near their end share the others' sampling config and batch
            max_tokens=self._round_tokens if room >= self._round_tokens else min(room, answer.remaining),
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            greedy=not sampling.temperature,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=self._stop_ids,
        )


def serve_rounds(engine: RolloutEngine, groups: ProcessGroups, request_queue: RequestQueue | None) -> None:
    """Collective over all ranks: generates the queued answers until the queue is finished or an exception is raised.

    Args:
        engine: Engine, awake.
        groups: Process groups of this rank.
        request_queue: Queue on rank 0; None on other ranks.

    Raises:
        UserError, RankFailedError: The engine cannot generate any more.
    """
    history = LengthHistory(ROUND_TOKENS)
    while (batches := broadcast_from_rank_0(request_queue.next_batches() if request_queue else None)) is not None:
        for index, batch in enumerate(batches):
            found, failed = _generate_or_bisect(engine, groups, history, batch)
            if request_queue is not None:
                request_queue.add_tokens(index, found)
                request_queue.add_failures(index, failed)


def _generate_or_bisect(
    engine: RolloutEngine, groups: ProcessGroups, history: LengthHistory, batch: Batch
) -> tuple[Generated, Failures]:
    """Collective over all ranks: generates a batch; returns results and failures on rank 0.

    A failing batch is halved recursively, so that one bad prompt does not fail the others. Raises if the engine cannot
    generate any prompt.
    """
    try:
        return _generate(engine, groups, history, batch), {}
    except (UserError, RankFailedError) as error:
        _check_alive(engine, groups, history, batch.sampling.stop_token_ids)
        if len(batch.prompts) == 1:
            return [], {batch.prompts[0][0]: error}
    half = len(batch.prompts) // 2
    found: Generated = []
    failed: Failures = {}
    for prompts in (batch.prompts[:half], batch.prompts[half:]):
        more, errors = _generate_or_bisect(engine, groups, history, Batch(batch.sampling, prompts))
        found += more
        failed |= errors
    return found, failed


def _check_alive(
    engine: RolloutEngine, groups: ProcessGroups, history: LengthHistory, stop_ids: tuple[int, ...]
) -> None:
    """Collective over all ranks: generates a token per replica from a valid prompt; raises if the engine is broken."""
    sampling = SamplingConfig(n=1, max_tokens=1, greedy=True, stop_token_ids=stop_ids)
    prompts = [(uid, stop_ids[:1] or (0,)) for uid in range(groups.grid.num_replicas)]
    _generate(engine, groups, history, Batch(sampling, prompts))


def _generate(engine: RolloutEngine, groups: ProcessGroups, history: LengthHistory, batch: Batch) -> Generated:
    """Collective over all ranks: generates a batch; returns the results of all replicas on rank 0."""
    prompts = [Prompt(uid, ids, "", source=f"request {uid:x}") for uid, ids in batch.prompts]
    with raise_on_all_ranks():
        rollouts = generate(engine, prompts, batch.sampling, groups, history)
    own: Generated = [
        (one.prompt.uid, one.response_ids, one.rollout_logprobs, one.finish_reason == "stop")
        for one in rollouts
        if groups.is_replica_leader
    ]
    if dist.get_world_size() == 1:
        return own
    parts: list[Generated] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return [one for part in parts for one in part]

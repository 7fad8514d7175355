"""Streaming generation: a work queue hands out samples between decode steps and may stop the call.

The queue is polled at the start, then every `poll_interval` decode steps, and at once when nothing runs or waits: at
logical times, so that the batches follow from the work, never from the clock.

A partial rollout is prefilled again, prompt and response, with the current weights, and samples its next token with the
random number of that position: with the same weights it becomes what it would have become uninterrupted. Its earlier
tokens stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import Tensor

from mrl.engines._kept_tokens import KeptTokens
from mrl.engines._multiturn_base import SequenceKey
from mrl.engines._work_queue import PromptWork, WorkQueue
from mrl.engines.base import SamplingConfig
from mrl.engines.native.generation import Generation
from mrl.engines.native.scheduler import RunningSample
from mrl.types import PartialRollout, Prompt, Rollout

MAX_POLL_INTERVAL = 8
"""Most decode steps between two polls."""
MIN_POLLS = 8
"""Fewest polls during the longest response; with a single one, no response would ever stop partially."""


class StreamingGeneration(Generation):
    """Streaming generation of one call.

    Args:
        work_queue: Source of work, which also stops the call.
        check: Raises if one of the prompts does not fit with so many further tokens.
        sampling: Sampling distribution, see `Generation`.
        parts: Further arguments of `Generation`.
    """

    def __init__(
        self,
        work_queue: WorkQueue,
        check: Callable[[Sequence[Prompt], int], None],
        sampling: SamplingConfig,
        **parts: Any,
    ) -> None:
        super().__init__(sampling=sampling, **parts)
        self._work_queue = work_queue
        self._check = check
        self._poll_interval = poll_interval(sampling.max_tokens)
        self._newly_finished: list[Rollout] = []
        self.stats |= {"reread_tokens": 0.0, "waited_s": 0.0}

    def run_until_stopped(self, policy_version: int) -> list[PartialRollout]:
        """Samples until the queue stops the call; returns the partial rollouts, ordered by (prompt uid, sample index).

        After an abort request it samples no more, but polls the queue until that stops the call, since the other
        replicas poll with it.
        """
        abandoned = False
        while (work := self._poll()) is not None:
            if not abandoned:
                self._enqueue(work)
                abandoned = self._advance(policy_version, self._poll_interval)
        running = self._rollouts(range(len(self._scheduler.running)), policy_version)
        left = [_as_partial(running_sample) for running_sample in running]
        return sorted([*self._unrecorded(left), *self._scheduler.not_resumed], key=_place_of)

    def _poll(self) -> Sequence[PromptWork] | None:
        finished, self._newly_finished = sorted(self._newly_finished, key=_place_of), []
        began = time.perf_counter()
        work = self._work_queue.poll(finished, self._scheduler.num_waiting)
        self.stats["waited_s"] += time.perf_counter() - began
        return work

    def _enqueue(self, work: Sequence[PromptWork]) -> None:
        """Queues the work, partial rollouts before new samples."""
        self._check([one.prompt for one in work], self._sampling.max_tokens)
        for partial in self._unrecorded([each for one in work for each in one.partial_rollouts]):
            check_resumable(partial, self._sampling)
            so_far = replace(partial.prompt, prompt_ids=(*partial.prompt.prompt_ids, *partial.response_ids))
            self._check([so_far], self._sampling.max_tokens - len(partial.response_ids))
            self._scheduler.enqueue(so_far, [partial.sample_index], partial)
        for one in work:
            if one.new_indices:
                self._scheduler.enqueue(one.prompt, one.new_indices)

    def _unrecorded(self, samples: Sequence[PartialRollout]) -> Sequence[PartialRollout]:
        if samples and self._rows.routed_SLK is not None:
            raise RuntimeError(
                f"{len(samples)} partial rollouts cannot have a routing record: their tokens are prefilled again with "
                "other weights. Set rollout.enable_rollout_routing_replay=false, or finish each response before a "
                "weight update"
            )
        return samples

    def _place(self, rows: Sequence[int], samples: Sequence[RunningSample]) -> Tensor:
        index = super()._place(rows, samples)
        for row, sample in zip(rows, samples, strict=True):
            partial = sample.group.partial_rollout
            if partial is None:
                continue
            self._rows.restore(row, partial.response_ids, partial.rollout_logprobs)
            if self._sampling.return_kept_tokens and partial.kept_tokens is not None:
                kept = partial.kept_tokens
                state = kept.ids_K.numpy().tobytes(), kept.counts_R.tolist(), list(partial.log_kept_mass)
                sample.kept_tokens = KeptTokens.of(state)
            self.stats["reread_tokens"] += sample.group.prompt_len
        return index

    def _end(self, rollouts: Mapping[int, Rollout]) -> dict[int, SequenceKey]:
        self._newly_finished += rollouts.values()
        return {}

    def _rollout(
        self, row: int, sample: RunningSample, said: tuple[list[int], list[float]], policy_version: int
    ) -> Rollout:
        rollout, partial = super()._rollout(row, sample, said, policy_version), sample.group.partial_rollout
        if partial is not None:
            rollout.prompt = partial.prompt
            own = len(rollout.response_ids) - len(partial.response_ids)
            runs = merge_versions((*partial.version_runs, (policy_version, own)))
            rollout.version_runs = runs if len(runs) > 1 else ()
        return rollout


def _as_partial(found: Rollout) -> PartialRollout:
    """Converts a running sample to a partial rollout."""
    return PartialRollout(
        found.prompt,
        found.sample_index,
        tuple(found.response_ids),
        tuple(found.rollout_logprobs),
        found.versions,
        found.kept_tokens,
        tuple(found.log_kept_mass),
    )


def poll_interval(max_tokens: int) -> int:
    """Returns the decode steps between two polls for responses of at most `max_tokens` tokens."""
    return max(1, min(MAX_POLL_INTERVAL, max_tokens // MIN_POLLS))


def merge_versions(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merges consecutive runs of the same policy version."""
    parts = groupby(runs, key=lambda run: run[0])
    return tuple((version, sum(count for _, count in part)) for version, part in parts)


def check_resumable(partial: PartialRollout, sampling: SamplingConfig) -> None:
    """Checks that a partial rollout can be resumed.

    Raises:
        RuntimeError: It has no token or no room for another, its parts differ in length, or kept token ids are
            requested but missing.
    """
    count = len(partial.response_ids)
    name = f"partial rollout {partial.sample_index} of prompt {partial.prompt.source or partial.prompt.uid}"
    if not 0 < count < sampling.max_tokens:
        raise RuntimeError(f"{name} has {count} tokens; 1 to {sampling.max_tokens - 1} are allowed")
    scored, versioned = len(partial.rollout_logprobs), sum(tokens for _, tokens in partial.version_runs)
    if (scored, versioned) != (count, count):
        raise RuntimeError(
            f"{name} has {count} tokens, log-probabilities of {scored}, and versions of {versioned}; they must be equal"
        )
    if sampling.return_kept_tokens:
        kept = 0 if partial.kept_tokens is None else partial.kept_tokens.counts_R.numel()
        if (kept, len(partial.log_kept_mass)) != (count, count):
            raise RuntimeError(
                f"{name} has kept token ids for {kept} of its {count} tokens; the sampling mask needs all of them"
            )


def _place_of(one: Rollout | PartialRollout) -> SequenceKey:
    return one.prompt.uid, one.sample_index

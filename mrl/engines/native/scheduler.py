"""Scheduler: assigns sequences to rows of the KV cache. Does not touch tensors.

Running samples fill rows 0 .. num_running - 1. A prompt is prefilled into one row and copied to the rows of its other
samples; samples without a free row start later in a row of the same prompt, whose first slots still contain it. A
paused sequence is kept in a row after the running ones if there is one (`paused_sequences`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from mrl.engines._kept_tokens import KeptTokens
from mrl.engines._multiturn_base import SequenceKey
from mrl.engines.native.attention import PrefillChunk
from mrl.engines.native.paused_sequences import PausedSequences, RowCopy
from mrl.types import PartialRollout, Prompt

SharedPrefixes = tuple[list[int], list[int]]
"""Row with the same prompt for each row, and the number of leading slots that both share."""


@dataclass
class PrefillGroup:
    """Prompt and the samples that share its prefill.

    Attributes:
        index: Order in the call.
        prompt: Tokens to prefill.
        pending: Sample indices not yet started.
        room: Most tokens of each sample.
        resumed_key: Key of the episode that resumes with it; None: its samples are new.
        partial_rollout: Partial rollout that resumes, whose tokens are the end of `prompt`; None: its samples are new.
        cached: Tokens whose keys and values are in its row already.
        hidden_H: Hidden state from which each sample's first token is drawn; None before the prefill.
        routed: Routing record of the prompt in parts [tokens, layers, top_k], in order; empty without recording.
    """

    index: int
    prompt: Prompt
    pending: deque[int]
    room: int
    resumed_key: SequenceKey | None = None
    partial_rollout: PartialRollout | None = None
    cached: int = 0
    hidden_H: Tensor | None = None
    routed: list[Tensor] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        """Prompt length, tokens."""
        return len(self.prompt.prompt_ids)

    @property
    def token_history(self) -> tuple[Sequence[int], int]:
        """Token ids with which its samples continue, and the length of the prompt that they share."""
        shared = self.prompt if self.partial_rollout is None else self.partial_rollout.prompt
        return self.prompt.prompt_ids, len(shared.prompt_ids)


@dataclass
class RunningSample:
    """Sample whose response is being generated.

    Attributes:
        group: Group of its prompt.
        sample_index: Index among the samples of the prompt.
        started: Decode steps made before it started.
        ahead: Tokens beyond one per step since then (accepted drafts).
        kept_tokens: Kept token ids.
    """

    group: PrefillGroup
    sample_index: int
    started: int
    ahead: int = 0
    kept_tokens: KeptTokens = field(default_factory=KeptTokens)

    @property
    def key(self) -> SequenceKey:
        """Identifies the sample in the call."""
        return self.group.resumed_key or (self.group.index, self.sample_index)

    def num_cached(self, step: int) -> int:
        """Returns the number of cache slots that the sample has filled after `step` decode steps."""
        return self.group.prompt_len + step - self.started + self.ahead


class Scheduler:
    """Queue of waiting prompts, and running samples by row.

    Args:
        prompts: Initial queue, in the order in which prompts start.
        num_samples: Samples per prompt.
        num_rows: Sequences that run at a time.
        room: Longest response, tokens.
        share_prefill: Prefill a prompt once for all its samples.
        keeps_prompts: A running row keeps the slots of its prompt, with which further samples can start; False: samples
            that find no free row prefill the prompt again (`KVCache.wraps`, or linear attention).
        parking: Rows for paused sequences; None: none pauses.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        num_rows: int,
        *,
        room: int,
        share_prefill: bool,
        keeps_prompts: bool = True,
        parking: PausedSequences | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.parking = parking or PausedSequences(num_rows)
        self.running: list[RunningSample] = []
        self._waiting: deque[PrefillGroup] = deque()
        self._started: list[PrefillGroup] = []
        self._room, self._share_prefill, self._keeps_prompts = room, share_prefill, keeps_prompts
        self._num_prompts = 0
        self._alike: SharedPrefixes | None = None
        for prompt in prompts:
            self.enqueue(prompt, range(num_samples))

    def enqueue(self, prompt: Prompt, samples: Sequence[int], partial_rollout: PartialRollout | None = None) -> None:
        """Appends samples of a prompt to the queue.

        Args:
            prompt: Prompt to prefill; with a partial rollout its last tokens are the response so far.
            samples: Sample indices; they share one prefill if `share_prefill`.
            partial_rollout: Partial rollout that the samples resume; None: they are new.
        """
        for part in [samples] if self._share_prefill else [[sample] for sample in samples]:
            self._waiting.append(
                PrefillGroup(self._num_prompts, prompt, deque(part), self._room, partial_rollout=partial_rollout)
            )
        self._num_prompts += 1

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.running and not self._waiting

    @property
    def num_prefilled_waiting(self) -> int:
        """Number of samples whose prompt is prefilled and that wait for a free row; they start before new prompts."""
        return sum(len(group.pending) for group in self._started)

    @property
    def num_waiting(self) -> int:
        """Number of samples that have not started: those of prefilled prompts and those of queued ones."""
        return self.num_prefilled_waiting + sum(len(group.pending) for group in self._waiting)

    @property
    def not_resumed(self) -> list[PartialRollout]:
        """Partial rollouts that wait to resume."""
        return [group.partial_rollout for group in self._waiting if group.partial_rollout is not None]

    def admit(self, most: int | None = None) -> list[PrefillGroup]:
        """Takes waiting prompts that fit, to be prefilled into the rows after the running ones.

        Args:
            most: Stop after so many samples; None: no limit.
        """
        admitted: list[PrefillGroup] = []
        free = self.num_rows - len(self.running) - self.num_prefilled_waiting
        room = free if most is None else most
        while self._waiting and free > 0 and room > 0:
            group = self._waiting.popleft()
            if not self._keeps_prompts and len(group.pending) > free:
                rest = deque(group.pending.pop() for _ in range(len(group.pending) - free))
                self._waiting.appendleft(replace(group, pending=deque(reversed(rest)), routed=[]))
            free -= len(group.pending)
            room -= len(group.pending)
            admitted.append(group)
        return admitted

    def resume(self, groups: Sequence[PrefillGroup], admitted: Sequence[PrefillGroup]) -> list[RowCopy]:
        """Prepares the rows in which samples will start; sets `cached` of resumed groups to the slots that are left.

        Args:
            groups: Groups of resumed episodes; they start before the others.
            admitted: Groups from `admit`.
        """
        first = len(self.running)
        others = self.num_prefilled_waiting + sum(len(group.pending) for group in admitted)
        needed = min(self.num_rows, first + len(groups) + others)
        keys = [group.resumed_key for group in groups if group.resumed_key is not None]
        moves, lengths = self.parking.resume(keys, first, needed)
        for group, length in zip(groups, lengths, strict=True):
            group.cached = length
        return moves

    def start(self, groups: Sequence[PrefillGroup], step: int) -> tuple[list[int], list[RowCopy]]:
        """Starts samples of prefilled prompts, and of earlier prompts with samples left, in all free rows.

        Args:
            groups: Groups from `admit`; prompt i is in row `len(running) + i`.
            step: Decode steps made so far.

        Returns:
            Rows in which a sample starts, and copies to make before, in order.
        """
        self._alike = None
        rows, moves = [], []
        home = {id(sample.group): row for row, sample in enumerate(self.running)}
        for group in groups:
            home[id(group)] = len(self.running)
            rows.append(len(self.running))
            self.running.append(RunningSample(group, group.pending.popleft(), step))
        self._started = [group for group in (*self._started, *groups) if group.pending]
        for group in self._started:
            while group.pending and len(self.running) < self.num_rows:
                target = len(self.running)
                moves.append(RowCopy(home[id(group)], target, group.prompt_len))
                rows.append(target)
                self.running.append(RunningSample(group, group.pending.popleft(), step))
        self._started = [group for group in self._started if group.pending]
        if self._started and not self._keeps_prompts:
            raise RuntimeError("samples wait for a row with the state of their prompt, which no row keeps")
        return rows, moves

    def retire(
        self, rows: Iterable[int], step: int, waiting: Mapping[int, SequenceKey] | None = None
    ) -> tuple[list[int], list[RowCopy]]:
        """Ends the samples in the given rows; `waiting` maps rows to pause to their keys.

        A prompt with samples left keeps the row and starts the next one there; otherwise the last running row moves in.

        Returns:
            Rows in which a sample starts (valid after the moves), and the moves, to be made in order. A row that starts
                keeps its prompt's slots; only the state after the prompt is new.
        """
        self._alike = None
        started: set[int] = set()
        moves: list[RowCopy] = []
        for row in sorted(rows, reverse=True):
            group = self.running[row].group
            if waiting and row in waiting:
                length = self.running[row].num_cached(step)
                moves += self.parking.park(waiting[row], row, length, len(self.running))
            if group.pending:
                self.running[row] = RunningSample(group, group.pending.popleft(), step)
                started.add(row)
                continue
            last = len(self.running) - 1
            moved = self.running.pop()
            if row != last:
                self.running[row] = moved
                moves.append(RowCopy(last, row, moved.num_cached(step)))
                if last in started:
                    started.remove(last)
                    started.add(row)
        return sorted(started), moves

    def longest(self, step: int) -> int:
        """Returns the slots of the longest running sequence, including its newest token."""
        return max(sample.num_cached(step) for sample in self.running) + 1

    def shared_prefixes(self) -> SharedPrefixes:
        """Returns, for each running row, one with the same prompt and the number of slots that both share.

        Returns the same object until the running samples change.
        """
        if self._alike is None:
            homes: dict[int, int] = {}
            rows = [homes.setdefault(id(sample.group), row) for row, sample in enumerate(self.running)]
            self._alike = (rows, [sample.group.prompt_len for sample in self.running])
        return self._alike


def prefill_chunks(
    prompt_lens: Sequence[int],
    first_row: int,
    max_tokens: int,
    *,
    starts: Sequence[int] = (),
    max_row_tokens: int | None = None,
) -> Iterable[list[PrefillChunk]]:
    """Distributes prompts over forwards of at most `max_tokens` tokens; prompt i goes to row `first_row + i`.

    Prompts of similar length share a forward. A prompt longer than a forward is cut every `max_tokens` tokens,
    independent of the other prompts: a token's bits depend on where its prompt is cut, not on the rest of the batch.
    Tokens before a prompt's entry in `starts` are in its row already. `max_row_tokens` limits the tokens of a prompt in
    a forward, as `KVCache.most_tokens` does.
    """
    starts = starts or [0] * len(prompt_lens)
    order = sorted(range(len(prompt_lens)), key=lambda i: prompt_lens[i] - starts[i])
    batch: list[PrefillChunk] = []
    room = max_tokens
    for i in order:
        start = starts[i]
        if batch and prompt_lens[i] - start > room:
            yield sorted(batch, key=lambda chunk: chunk.extent)
            batch, room = [], max_tokens
        while start < prompt_lens[i]:
            stop = min(prompt_lens[i], start + room, start + (max_row_tokens or room))
            batch.append(PrefillChunk(first_row + i, start, stop))
            room -= stop - start
            start = stop
            if room == 0 or start < prompt_lens[i]:
                yield sorted(batch, key=lambda chunk: chunk.extent)
                batch, room = [], max_tokens
    if batch:
        yield sorted(batch, key=lambda chunk: chunk.extent)

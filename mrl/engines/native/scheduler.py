"""Which sequence runs in which row of the KV cache.

Owns the waiting prompts, the running samples and the limits on both; it touches no tensor. Running samples fill rows
0 .. num_running - 1. A prompt is prefilled into one row and copied to the rows of its other samples; samples for which
no row is free start later in a row of the same prompt, whose first slots still hold it. A sequence that waits is parked
in a row behind the running ones where there is one (`parking`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mrl.engines._kept_tokens import Kept
from mrl.engines._multiturn_base import Key
from mrl.engines.native.attention import Chunk
from mrl.engines.native.parked_slots import Move, Parking
from mrl.types import Begun, Prompt

Alike = tuple[list[int], list[int]]
"""For each row another one, and how many first slots of both hold the same."""


@dataclass
class Group:
    """A prompt and the samples that share its prefill.

    Attributes:
        index: Order in the call.
        prompt: What is sampled from.
        pending: Sample indices not yet started.
        room: Tokens that each of its samples may have.
        answered: The conversation that goes on with it; None: its samples begin one.
        begun: The sample that goes on, whose tokens so far are the end of `prompt`; None: its samples begin.
        cached: Tokens whose keys and values lie in its row already.
        hidden_H: State from which each sample's first token is drawn; None before the prefill.
        routed: Experts of the prompt's tokens, where they are recorded: parts [tokens, layers, top_k], in order.
    """

    index: int
    prompt: Prompt
    pending: deque[int]
    room: int
    answered: Key | None = None
    begun: Begun | None = None
    cached: int = 0
    hidden_H: Tensor | None = None
    routed: list[Tensor] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.prompt.prompt_ids)

    @property
    def whole(self) -> tuple[Sequence[int], int]:
        """The sequence that its samples go on with, and how many tokens of it are the prompt that they share."""
        shared = self.prompt if self.begun is None else self.begun.prompt
        return self.prompt.prompt_ids, len(shared.prompt_ids)


@dataclass
class Sample:
    """A running response.

    Attributes:
        group: Its prompt.
        sample_index: Among the samples of that.
        started: Decode steps that were made before it.
        ahead: Tokens that it has beyond one for each step since.
        kept: What truncation kept of it.
    """

    group: Group
    sample_index: int
    started: int
    ahead: int = 0
    kept: Kept = field(default_factory=Kept)

    @property
    def key(self) -> Key:
        """Names it among all samples of the call."""
        return self.group.answered or (self.group.index, self.sample_index)

    def num_cached(self, step: int) -> int:
        """Slots that it has filled after so many decode steps."""
        return self.group.prompt_len + step - self.started + self.ahead


class Scheduler:
    """Rows, and who comes next.

    Args:
        prompts: Those that wait first, in the order in which they start.
        num_samples: Samples of each prompt.
        num_rows: Sequences that run at a time.
        room: Tokens of a response.
        share_prefill: Prefill a prompt once for all its samples.
        parking: For sequences that wait; None: none does.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        num_rows: int,
        *,
        room: int,
        share_prefill: bool,
        parking: Parking | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.parking = parking or Parking(num_rows)
        self.running: list[Sample] = []
        self._waiting: deque[Group] = deque()
        self._started: list[Group] = []
        self._room, self._share_prefill = room, share_prefill
        self._num_prompts = 0
        self._alike: Alike | None = None
        for prompt in prompts:
            self.wait(prompt, range(num_samples))

    def wait(self, prompt: Prompt, samples: Sequence[int], begun: Begun | None = None) -> None:
        """These samples of a prompt start after all that wait; or the one that is `begun` goes on, from all it has."""
        for part in [samples] if self._share_prefill else [[sample] for sample in samples]:
            self._waiting.append(Group(self._num_prompts, prompt, deque(part), self._room, begun=begun))
        self._num_prompts += 1

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self._waiting

    @property
    def num_due(self) -> int:
        """Samples that start before any other: of prompts that were read."""
        return sum(len(group.pending) for group in self._started)

    @property
    def num_waiting(self) -> int:
        """Samples that have not started, for want of a row."""
        return self.num_due + sum(len(group.pending) for group in self._waiting)

    @property
    def not_resumed(self) -> list[Begun]:
        """Samples that wait to go on."""
        return [group.begun for group in self._waiting if group.begun is not None]

    def admit(self, most: int | None = None) -> list[Group]:
        """Takes waiting prompts for which there are rows, to be prefilled into the rows after the running ones.

        Args:
            most: None is taken once so many samples have been; None: any number.
        """
        admitted: list[Group] = []
        free = self.num_rows - len(self.running) - self.num_due
        room = free if most is None else most
        while self._waiting and free > 0 and room > 0:
            group = self._waiting.popleft()
            free -= len(group.pending)
            room -= len(group.pending)
            admitted.append(group)
        return admitted

    def resume(self, groups: Sequence[Group], admitted: Sequence[Group]) -> list[Move]:
        """Makes the rows ready in which samples are to start; `cached` of the groups that go on is what is left.

        Args:
            groups: Conversations that go on; they start before the others.
            admitted: From `admit`.
        """
        first = len(self.running)
        others = self.num_due + sum(len(group.pending) for group in admitted)
        needed = min(self.num_rows, first + len(groups) + others)
        keys = [group.answered for group in groups if group.answered is not None]
        moves, lengths = self.parking.leave(keys, first, needed)
        for group, length in zip(groups, lengths, strict=True):
            group.cached = length
        return moves

    def start(self, groups: Sequence[Group], step: int) -> tuple[list[int], list[Move]]:
        """Starts samples of prefilled prompts, and of earlier prompts with samples left, in all rows that are free.

        Args:
            groups: From `admit`; prompt i lies in row `len(running) + i`.
            step: Decode steps made so far.

        Returns:
            Rows in which a sample begins, and copies to make before, in order.
        """
        self._alike = None
        rows, moves = [], []
        home = {id(sample.group): row for row, sample in enumerate(self.running)}
        for group in groups:
            home[id(group)] = len(self.running)
            rows.append(len(self.running))
            self.running.append(Sample(group, group.pending.popleft(), step))
        self._started = [group for group in (*self._started, *groups) if group.pending]
        for group in self._started:
            while group.pending and len(self.running) < self.num_rows:
                target = len(self.running)
                moves.append(Move(home[id(group)], target, group.prompt_len))
                rows.append(target)
                self.running.append(Sample(group, group.pending.popleft(), step))
        self._started = [group for group in self._started if group.pending]
        return rows, moves

    def retire(
        self, rows: Iterable[int], step: int, waiting: Mapping[int, Key] | None = None
    ) -> tuple[list[int], list[Move]]:
        """Ends the samples in the given rows; `waiting`: those of them that are to be parked.

        A prompt with samples left keeps the row and begins the next one there; otherwise the last running row moves in.

        Returns:
            Rows in which a sample begins (valid after the moves), and the moves, to be made in order. Only the row's
            state beyond the prompt is new in a row that begins.
        """
        self._alike = None
        begun: set[int] = set()
        moves: list[Move] = []
        for row in sorted(rows, reverse=True):
            group = self.running[row].group
            if waiting and row in waiting:
                length = self.running[row].num_cached(step)
                moves += self.parking.park(waiting[row], row, length, len(self.running))
            if group.pending:
                self.running[row] = Sample(group, group.pending.popleft(), step)
                begun.add(row)
                continue
            last = len(self.running) - 1
            moved = self.running.pop()
            if row != last:
                self.running[row] = moved
                moves.append(Move(last, row, moved.num_cached(step)))
                if last in begun:
                    begun.remove(last)
                    begun.add(row)
        return sorted(begun), moves

    def longest(self, step: int) -> int:
        """Slots in use by the longest running sequence, once it has taken in its newest token."""
        return max(sample.num_cached(step) for sample in self.running) + 1

    def alike(self) -> Alike:
        """For each running row one with the same prompt, and how many slots both have of it.

        The same object until other samples run.
        """
        if self._alike is None:
            homes: dict[int, int] = {}
            rows = [homes.setdefault(id(sample.group), row) for row, sample in enumerate(self.running)]
            self._alike = (rows, [sample.group.prompt_len for sample in self.running])
        return self._alike


def prefill_chunks(
    prompt_lens: Sequence[int], first_row: int, max_tokens: int, *, starts: Sequence[int] = ()
) -> Iterable[list[Chunk]]:
    """Spreads prompts over forwards of at most `max_tokens` tokens; prompt i goes to row `first_row + i`.

    Prompts of similar length share a forward. One that is longer than a forward is cut each `max_tokens` tokens, never
    where others leave off: a token's bits depend on where its prompt is cut, and not on what is read beside it. What
    comes before a prompt's place in `starts` is in its row already.
    """
    starts = starts or [0] * len(prompt_lens)
    order = sorted(range(len(prompt_lens)), key=lambda i: prompt_lens[i] - starts[i])
    batch: list[Chunk] = []
    room = max_tokens
    for i in order:
        start = starts[i]
        if batch and prompt_lens[i] - start > room:
            yield sorted(batch, key=lambda chunk: chunk.extent)
            batch, room = [], max_tokens
        while start < prompt_lens[i]:
            stop = min(prompt_lens[i], start + room)
            batch.append(Chunk(first_row + i, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield sorted(batch, key=lambda chunk: chunk.extent)
                batch, room = [], max_tokens
    if batch:
        yield sorted(batch, key=lambda chunk: chunk.extent)

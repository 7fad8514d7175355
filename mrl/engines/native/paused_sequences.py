"""Rows of the KV cache in which paused sequences keep their keys and values.

Tracks which row belongs to which paused sequence. If no row is left, the sequence that paused last is evicted, since it
resumes last. Does not touch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.engines._multiturn_base import SequenceKey


@dataclass(frozen=True)
class RowCopy:
    """Copy of the first `length` slots of row `source` to row `target`."""

    source: int
    target: int
    length: int


@dataclass
class ParkedSlots:
    """First `length` slots of a row, which belong to a paused sequence."""

    row: int
    length: int


class PausedSequences:
    """Rows of the paused sequences, all after the running ones.

    Args:
        num_rows: Rows of the cache, including those of running sequences.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._places: dict[SequenceKey, ParkedSlots] = {}

    def park(self, key: SequenceKey, row: int, length: int, num_running: int) -> list[RowCopy]:
        """Keeps the slots of a running sequence in a free row; returns [] if none is free and they are dropped.

        Args:
            key: Key of the sequence.
            row: Row in which it ran.
            length: Slots that it has filled.
            num_running: First row that may be free.
        """
        held = {place.row for place in self._places.values()}
        free = next((each for each in reversed(range(num_running, self.num_rows)) if each not in held), None)
        if free is None:
            return []
        self._places[key] = ParkedSlots(free, length)
        return [RowCopy(row, free, length)]

    def forget(self, key: SequenceKey) -> None:
        """Frees the row of a finished sequence."""
        self._places.pop(key, None)

    def resume(self, keys: Sequence[SequenceKey], first: int, needed: int) -> tuple[list[RowCopy], list[int]]:
        """Moves paused sequences into the rows in which they resume, and others out of rows that are needed.

        Args:
            keys: Sequences that resume, in rows `first`, `first + 1` and so on.
            first: Number of running sequences.
            needed: Rows below this index will run.

        Returns:
            Moves, in order, and the number of valid slots for each of `keys`; 0 if they were evicted.
        """
        others = [key for key in self._places if key not in keys]
        for key in others[max(0, self.num_rows - needed) :]:
            del self._places[key]
        goals = {key: first + i for i, key in enumerate(keys) if key in self._places}
        goals |= self._elsewhere([key for key in others if key in self._places], needed)
        moves = self._sorted_out({key: row for key, row in goals.items() if self._places[key].row != row}, keys, first)
        held = [self._places.pop(key, None) for key in keys]
        return moves, [0 if place is None else place.length for place in held]

    def _elsewhere(self, keys: Sequence[SequenceKey], needed: int) -> dict[SequenceKey, int]:
        """Returns new rows for sequences in rows below `needed`."""
        held = {self._places[key].row for key in keys}
        free = (row for row in reversed(range(needed, self.num_rows)) if row not in held)
        return {key: next(free) for key in keys if self._places[key].row < needed}

    def _sorted_out(self, goals: dict[SequenceKey, int], keys: Sequence[SequenceKey], first: int) -> list[RowCopy]:
        """Orders the moves so that none overwrites a row that is still to be read."""
        moves: list[RowCopy] = []
        while goals:
            held = {place.row for place in self._places.values()}
            key = next((each for each in goals if goals[each] not in held), None)
            if key is not None:
                moves.append(self._moved(key, goals.pop(key)))
                continue
            free = next((row for row in range(first, self.num_rows) if row not in held), None)
            if free is not None:  # a cycle: one sequence moves aside
                moves.append(self._moved(next(iter(goals)), free))
                continue
            victim = next((each for each in reversed(goals) if each not in keys), next(reversed(goals)))
            del goals[victim], self._places[victim]
        return moves

    def _moved(self, key: SequenceKey, row: int) -> RowCopy:
        place = self._places[key]
        move = RowCopy(place.row, row, place.length)
        place.row = row
        return move

"""Where sequences wait: the rows of the KV cache that no running sequence fills.

Owns which of these rows holds which waiting sequence, and who gives its row up when there is none left: the one that
began to wait last, since it goes on last. It touches no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.engines._multiturn_base import Key


@dataclass(frozen=True)
class Move:
    """The first `length` slots of row `source` belong in row `target` too."""

    source: int
    target: int
    length: int


@dataclass
class Place:
    """Where a waiting sequence lies: the first `length` slots of a row."""

    row: int
    length: int


class Parking:
    """Rows of the waiting sequences, all behind the running ones.

    Args:
        num_rows: Of the cache, those of running sequences included.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._places: dict[Key, Place] = {}

    def park(self, key: Key, row: int, length: int, num_running: int) -> list[Move]:
        """Keeps a running sequence's row in a free one; [] where none is free, and it is given up.

        Args:
            key: Of the sequence.
            row: Where it ran.
            length: Slots that it has filled.
            num_running: Rows from there on may be free.
        """
        held = {place.row for place in self._places.values()}
        free = next((each for each in reversed(range(num_running, self.num_rows)) if each not in held), None)
        if free is None:
            return []
        self._places[key] = Place(free, length)
        return [Move(row, free, length)]

    def forget(self, key: Key) -> None:
        """Frees the row of a sequence that is over."""
        self._places.pop(key, None)

    def leave(self, keys: Sequence[Key], first: int, needed: int) -> tuple[list[Move], list[int]]:
        """Brings waiting sequences into the rows in which they go on, and the others out of rows that are needed.

        Args:
            keys: Go on, in rows `first`, `first + 1` and so on.
            first: The number of running sequences.
            needed: Rows below are to run.

        Returns:
            Moves, in order, and of each of `keys` how many slots its row holds then; 0 where it was given up.
        """
        others = [key for key in self._places if key not in keys]
        for key in others[max(0, self.num_rows - needed) :]:
            del self._places[key]
        goals = {key: first + i for i, key in enumerate(keys) if key in self._places}
        goals |= self._elsewhere([key for key in others if key in self._places], needed)
        moves = self._sorted_out({key: row for key, row in goals.items() if self._places[key].row != row}, keys, first)
        held = [self._places.pop(key, None) for key in keys]
        return moves, [0 if place is None else place.length for place in held]

    def _elsewhere(self, keys: Sequence[Key], needed: int) -> dict[Key, int]:
        """New rows for those that lie below `needed`."""
        held = {self._places[key].row for key in keys}
        free = (row for row in reversed(range(needed, self.num_rows)) if row not in held)
        return {key: next(free) for key in keys if self._places[key].row < needed}

    def _sorted_out(self, goals: dict[Key, int], keys: Sequence[Key], first: int) -> list[Move]:
        """Moves that bring each to its goal, none onto a row that is still to be read."""
        moves: list[Move] = []
        while goals:
            held = {place.row for place in self._places.values()}
            key = next((each for each in goals if goals[each] not in held), None)
            if key is not None:
                moves.append(self._moved(key, goals.pop(key)))
                continue
            free = next((row for row in range(first, self.num_rows) if row not in held), None)
            if free is not None:  # they stand in each other's way, and one makes room
                moves.append(self._moved(next(iter(goals)), free))
                continue
            victim = next((each for each in reversed(goals) if each not in keys), next(reversed(goals)))
            del goals[victim], self._places[victim]
        return moves

    def _moved(self, key: Key, row: int) -> Move:
        place = self._places[key]
        move = Move(place.row, row, place.length)
        place.row = row
        return move

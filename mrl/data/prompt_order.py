"""Order of the training rows: position in the prompt stream -> index of a row.

An order is a pure function of the position, the seed and the data, except for `reward_order.py`. A resume therefore
needs only the position, and a prompt can be found again by its uid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mrl.config.did_you_mean import did_you_mean
from mrl.data.row_sources import RowSource
from mrl.data.shuffle import Shuffle
from mrl.errors import UserError, shown

BLOCK = 1000
"""Positions of a block of `MixedOrder`, in which each part has its exact share."""


Share = Callable[[Callable[[], bytes]], bytes]
"""Collective function that calls its argument on one rank and returns the result on all ranks that draw prompts."""


def call_here(function: Callable[[], bytes]) -> bytes:
    """Calls a function on this rank: the `Share` of a single process."""
    return function()


class PromptOrder(ABC):
    """Endless sequence of row indices.

    Only an order that depends on the run overrides the methods with an empty body.
    """

    @abstractmethod
    def row_at(self, position: int) -> int:
        """Returns the index of the row at a position, counted from 0."""

    def describe(self) -> str:
        """Returns the settings that a resumed run must share, as text; "" for the order that has none."""
        return ""

    def check(self) -> None:  # noqa: B027
        """Tries a user's function before the run; raises UserError where it fails."""

    def prepare(self, position: int, share: Share) -> None:  # noqa: B027
        """Prepares for `row_at(position)`; positions are prepared in ascending order."""

    def rewind(self, position: int) -> None:  # noqa: B027
        """Undoes `prepare` for this and later positions."""

    def record(self, positions: Iterable[int], rewards: Iterable[float]) -> None:  # noqa: B027
        """Records rewards of responses to the rows at these positions."""

    def release(self, position: int) -> None:  # noqa: B027
        """Allows forgetting the rows at smaller positions, which are not read any more."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run cannot compute again, JSON-serializable; {} for most orders."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], position: int) -> None:  # noqa: B027
        """Restores the result of `state_dict`, of a stream that has drawn `position` rows."""


class EpochOrder(PromptOrder):
    """Every row once per epoch: in the order of the files, or shuffled differently in each epoch."""

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool) -> None:
        """Creates the order.

        Args:
            num_rows: Rows of an epoch, at least 1.
            seed: Seed of the shuffled order, together with the epoch.
            shuffle: True to permute the rows.
        """
        self._num_rows, self._seed, self._shuffle = num_rows, seed, shuffle
        self._permutation: tuple[int, Shuffle] | None = None

    def row_at(self, position: int) -> int:
        """Overrides `PromptOrder.row_at`."""
        epoch, index = divmod(position, self._num_rows)
        if not self._shuffle:
            return index
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (epoch, Shuffle(self._num_rows, self._seed, epoch))
        return self._permutation[1](index)


class SortedOrder(PromptOrder):
    """Every row once per epoch, in ascending order of a value; rows with equal values are ordered by another order."""

    def __init__(self, values: Sequence[Any], key: str, ties: PromptOrder) -> None:
        """Sorts the rows.

        Args:
            values: Value of each row; all numbers, or all texts.
            key: Name of the values' column.
            ties: Order of rows with equal values, in which each row occurs once per epoch.
        """
        self._values, self._key, self._ties = values, key, ties
        self._sorted: tuple[int, list[int]] | None = None

    def row_at(self, position: int) -> int:
        """Overrides `PromptOrder.row_at`."""
        size = len(self._values)
        epoch, index = divmod(position, size)
        if self._sorted is None or self._sorted[0] != epoch:
            rows = [self._ties.row_at(epoch * size + place) for place in range(size)]
            self._sorted = (epoch, sorted(rows, key=self._values.__getitem__))  # a stable sort
        return self._sorted[1][index]

    def describe(self) -> str:
        """Overrides `PromptOrder.describe`."""
        return f"data.order_by={self._key}"


class MixedOrder(PromptOrder):
    """Mix of parts with fixed shares: every block of `BLOCK` positions has each part's share of them, rounded.

    Each part runs through epochs of its own, so rows of a part with a large share repeat earlier.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool) -> None:
        """Computes the parts' counts per block, by largest remainder.

        Args:
            sizes: Number of rows of each part, which follow each other in the row source.
            weights: Relative share of each part, above 0.
            seed: Seed of the order within blocks and parts.
            shuffle: True to permute the rows of a part; the places of the parts in a block are always permuted.
        """
        self._weights, self._seed = list(weights), seed
        self._starts = [sum(sizes[:part]) for part in range(len(sizes))]
        self._parts = [EpochOrder(size, _key(seed, part), shuffle=shuffle) for part, size in enumerate(sizes)]
        self._counts = shares(weights, BLOCK)
        self._block: tuple[int, list[list[int]], list[int]] | None = None

    def row_at(self, position: int) -> int:
        """Overrides `PromptOrder.row_at`."""
        block, place = divmod(position, BLOCK)
        if self._block is None or self._block[0] != block:
            self._block = (block, *self._lay_out(block))
        places, owner = self._block[1:]
        part = owner[place]
        drawn = block * self._counts[part] + bisect_left(places[part], place)
        return self._starts[part] + self._parts[part].row_at(drawn)

    def _lay_out(self, block: int) -> tuple[list[list[int]], list[int]]:
        """Returns the sorted places of each part in a block, and the part at each place."""
        permutation, first = Shuffle(BLOCK, self._seed, -1, block), 0
        owner, places = [0] * BLOCK, []
        for part, count in enumerate(self._counts):
            places.append(sorted(permutation(index) for index in range(first, first + count)))
            for place in places[-1]:
                owner[place] = part
            first += count
        return places, owner

    def describe(self) -> str:
        """Overrides `PromptOrder.describe`."""
        return f"data.train_weights={self._weights}"


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Returns integers proportional to the weights, each at least 1, whose sum is `total`, by largest remainder."""
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    parts = range(len(weights))
    while sum(counts) < total:
        counts[max(parts, key=lambda part: exact[part] - counts[part])] += 1
    while sum(counts) > total:
        counts[max(parts, key=lambda part: (counts[part] > 1, counts[part] - exact[part]))] -= 1
    return counts


def column_values(rows: RowSource, key: str) -> list[Any]:
    """Returns the values of a column to sort by, in the order of the rows; reads every row once.

    Raises:
        UserError: A row lacks the column, or its values are neither all numbers nor all texts.
    """
    values: list[Any] = []
    for index in range(len(rows)):
        row = rows.row(index)
        if key not in row:
            raise UserError(
                f"{rows.source(index)}: there is no column '{key}' (data.order_by).{did_you_mean(key, row)} Its "
                f"columns are {', '.join(map(shown, row))}."
            )
        value = row[key]
        is_number = isinstance(value, (int, float)) and value == value
        if not (isinstance(value, str) or is_number):
            raise UserError(
                f"{rows.source(index)}: column '{key}' holds {value!r:.60}, expected a number or a text to order the "
                "rows by (data.order_by)."
            )
        if values and isinstance(value, str) is not isinstance(values[0], str):
            raise UserError(
                f"{rows.source(index)}: column '{key}' holds {value!r:.60}, but {rows.source(0)} has "
                f"{values[0]!r:.60}: texts and numbers have no common order (data.order_by)."
            )
        values.append(value)
    return values


def _key(seed: int, part: int) -> int:
    """Returns a seed of a part; equal parts of a mix are ordered differently."""
    return seed * 1_000_003 + part + 1

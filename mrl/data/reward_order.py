"""Order of the training rows by a function of their past rewards: `data.order_by=path/to/file.py:function`.

The function is called at the beginning of each epoch with all rows and the rewards that they had so far in this run,
and returns a number for each row. Its results depend on the run, so the order is part of the checkpoint: the rows of
all positions that may still be read, and the counts and sums of the rewards.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mrl.config import registry, user_code
from mrl.data.prompt_order import PromptOrder, Share
from mrl.data.public_sets.base import Row
from mrl.data.row_sources import RowSource
from mrl.errors import UserError, shown

_LEVEL = 1
"""zlib's level; higher levels take several times as long for a tenth of the size."""


@dataclass(frozen=True)
class RowRewards:
    """Rewards of the responses to one training row, from the beginning of the run until now.

    Attributes:
        count: Number of scored responses.
        mean: Mean of their rewards; None if there are none.
    """

    count: int
    mean: float | None


class RewardOrder(PromptOrder):
    """Every row once per epoch, in ascending order of what a user's function returns at the beginning of the epoch."""

    def __init__(self, rows: RowSource, name: str, ties: PromptOrder) -> None:
        """Imports the function.

        Args:
            rows: Training rows.
            name: Path of the function, which takes the rows and their `RowRewards` and returns a number for each row.
            ties: Order of rows with equal numbers, in which each row occurs once per epoch.

        Raises:
            UserError: The path cannot be imported, or names no function.
        """
        self._rows, self._name, self._ties = rows, name, ties
        self._function: Any = registry.find("data.order_by", name, "")
        if not callable(self._function):
            raise UserError(f"data.order_by: '{name}' is {shown(self._function)}, expected a function.")
        self._counts: NDArray[np.int32] = np.zeros(len(rows), np.int32)
        self._sums: NDArray[np.float64] = np.zeros(len(rows), np.float64)
        self._epochs: dict[int, NDArray[np.int32]] = {}  # epoch -> rows of its last positions
        self._state: dict[str, Any] | None = None  # result of `state_dict` until something changes

    def describe(self) -> str:
        """Overrides `PromptOrder.describe`; without the folder of the file."""
        return f"data.order_by={user_code.label(self._name)}"

    def check(self) -> None:
        """Overrides `PromptOrder.check`: calls the function without rewards, and with invented ones for most rows."""
        self._values(self._counts, self._sums)
        kinds = np.arange(len(self._rows), dtype=np.int32) % 4  # means of 0, 0.5 and 1, and no rewards
        counts = np.where(kinds == 3, 0, 4).astype(np.int32)
        try:
            self._values(counts, counts * kinds / 2)
        except UserError as error:
            raise UserError(f"{error} It was called before the run, with invented rewards of 0, 0.5 and 1.") from error

    def prepare(self, position: int, share: Share) -> None:
        """Overrides `PromptOrder.prepare`: calls the function if an epoch begins here."""
        size = len(self._rows)
        epoch, place = divmod(position, size)
        if epoch in self._epochs:
            return
        if place:
            raise RuntimeError(f"epoch {epoch} has no order at position {position}. This is a bug; please report it.")
        order = np.frombuffer(share(partial(self._sort, epoch)), np.int32)
        self._epochs[epoch], self._state = order, None

    def row_at(self, position: int) -> int:
        """Overrides `PromptOrder.row_at`; raises LookupError before `prepare` and after `release`."""
        size = len(self._rows)
        epoch, place = divmod(position, size)
        order = self._epochs[epoch]
        if size - place > len(order):
            raise IndexError(f"position {position} was released")
        return int(order[place - size])

    def rewind(self, position: int) -> None:
        """Overrides `PromptOrder.rewind`."""
        kept = {epoch: order for epoch, order in self._epochs.items() if epoch * len(self._rows) < position}
        self._epochs, self._state = kept, None

    def record(self, positions: Iterable[int], rewards: Iterable[float]) -> None:
        """Overrides `PromptOrder.record`."""
        for position, reward in zip(positions, rewards, strict=True):
            row = self.row_at(position)
            self._counts[row] += 1
            self._sums[row] += reward
        self._state = None

    def release(self, position: int) -> None:
        """Overrides `PromptOrder.release`."""
        size = len(self._rows)
        first, place = divmod(position, size)
        self._epochs = {epoch: order for epoch, order in self._epochs.items() if epoch >= first}
        if first in self._epochs:
            self._epochs[first] = self._epochs[first][-(size - place) :]
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Overrides `PromptOrder.state_dict`: the totals, and the orders of the epochs, compressed."""
        if self._state is None:
            epochs = [[epoch, len(order), _pack(order)] for epoch, order in self._epochs.items()]
            self._state = {"counts": _pack(self._counts), "sums": _pack(self._sums), "epochs": epochs}
        return self._state

    def load_state_dict(self, state: Mapping[str, Any], position: int) -> None:
        """Overrides `PromptOrder.load_state_dict`; raises ValueError, LookupError or TypeError for malformed state."""
        if state == self._state:
            return
        size = len(self._rows)
        counts, sums = _unpack(state["counts"], np.int32, size), _unpack(state["sums"], np.float64, size)
        epochs = {int(epoch): _unpack(text, np.int32, int(count)) for epoch, count, text in state["epochs"]}
        if counts.min() < 0 or not np.isfinite(sums).all():
            raise ValueError("counts below 0, or rewards that are not finite")
        if any(len(order) > size or order.min() < 0 or order.max() >= size for order in epochs.values()):
            raise ValueError("an epoch has rows outside the data")
        if position % size and position // size not in epochs:
            raise ValueError(f"epoch {position // size} has no order")
        self._counts, self._sums, self._epochs, self._state = counts, sums, epochs, None

    def _sort(self, epoch: int) -> bytes:
        """Calls the function; returns the rows of an epoch in order, int32."""
        size = len(self._rows)
        values = self._values(self._counts, self._sums)
        places = (self._ties.row_at(epoch * size + place) for place in range(size))
        ties = np.fromiter(places, np.int32, size)
        return ties[np.argsort(values[ties], kind="stable")].tobytes()

    def _values(self, counts: NDArray[np.int32], sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the function's number for each row.

        Args:
            counts: Number of rewards of each row.
            sums: Sum of the rewards of each row.

        Raises:
            UserError: It raises an exception, or returns something else.
        """
        where, size = f"data.order_by: '{self._name}'", len(self._rows)
        try:
            returned = self._function(_LazyRows(self._rows), _PastRewards(counts, sums))
            unordered = isinstance(returned, (str, bytes, Mapping, Set)) or not isinstance(returned, Iterable)
            values = None if unordered else list(returned)
        except UserError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{where} raised {user_code.describe_error(error)}.") from error
        if values is None:
            raise UserError(f"{where} returned {shown(returned)}, expected a list of {size} numbers, one for each row.")
        if len(values) != size:
            raise UserError(f"{where} returned {len(values)} values for {size} rows. Return one number for each row.")
        numbers = np.fromiter(map(_number, values), np.float64, size)
        wrong = np.flatnonzero(np.isnan(numbers))
        if len(wrong):
            index = int(wrong[0])
            raise UserError(
                f"{where} returned {shown(values[index])} for row {index} ({self._rows.source(index)}), expected a "
                "number. Rows without rewards have count 0 and mean None; return a number for them, too."
            )
        return numbers


def _number(value: Any) -> float:
    """Returns a number of Python, NumPy or torch as a float; NaN for anything else."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
    try:
        return float(value) if isinstance(value, Real) else float("nan")
    except OverflowError:
        return float("nan")


class _LazyRows(Sequence[Row]):
    """Training rows as the user's function sees them, read when they are accessed."""

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        chosen = range(len(self))[index]
        return self._rows.row(chosen) if isinstance(chosen, int) else [self._rows.row(each) for each in chosen]


class _PastRewards(Sequence[RowRewards]):
    """Rewards of the rows as the user's function sees them, parallel to the rows."""

    def __init__(self, counts: NDArray[np.int32], sums: NDArray[np.float64]) -> None:
        self._counts, self._sums = counts, sums

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, index: int) -> RowRewards: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowRewards]: ...
    def __getitem__(self, index: int | slice) -> RowRewards | list[RowRewards]:
        chosen = range(len(self))[index]
        return self._at(chosen) if isinstance(chosen, int) else [self._at(each) for each in chosen]

    def __iter__(self) -> Iterator[RowRewards]:
        return map(self._at, range(len(self)))

    def _at(self, index: int) -> RowRewards:
        count = int(self._counts[index])
        return RowRewards(count, float(self._sums[index]) / count if count else None)


def _pack(values: NDArray[Any]) -> str:
    """Returns numbers as text: their first bytes, then their second bytes and so on, compressed, in base64."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), _LEVEL)).decode("ascii")


def _unpack(text: str, dtype: type[np.generic], count: int) -> NDArray[Any]:
    """Returns the numbers of `_pack`; raises ValueError if there are not `count` of them, at least one."""
    size = np.dtype(dtype).itemsize
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(base64.b64decode(text, validate=True), max(1, count * size))
    except zlib.error as error:
        raise ValueError(f"damaged numbers: {error}") from error
    if count < 1 or len(data) != count * size or reader.unconsumed_tail or not reader.eof:
        raise ValueError(f"expected {count} numbers")
    return np.frombuffer(data, np.uint8).reshape(size, count).T.copy().view(dtype).reshape(count)

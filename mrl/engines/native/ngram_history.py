"""What the sequences of a call have said, from which tokens are drafted: those that run, and the last that ended.

Owns where each sequence lies and which ones are a family, the samples of one prompt. What is drafted from it may change
the speed of a call, never its tokens.

Shapes: H sequences, W tokens of the longest, S rows of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEQUENCES_PER_ROW = 4
"""Sequences that are kept for each row that decodes: the one that runs there, and others that have ended."""

Ints = npt.NDArray[np.int64]


class History:
    """Of one call.

    Args:
        num_running: Sequences that run at a time.
        num_rows: S.
        width: W.

    Attributes:
        tokens_HW: Prompt and response, int32.
        lengths_H: Tokens so far.
        begins_H: Where the prompt of the family ends: what its members say from there on is their own.
        next_H: The next member of the family, in a circle.
    """

    def __init__(self, num_running: int, num_rows: int, width: int) -> None:
        size = SEQUENCES_PER_ROW * num_running
        self.tokens_HW = torch.zeros(size, width, dtype=torch.int32)
        self.lengths_H = torch.zeros(size, dtype=torch.int64)
        self.begins_H = torch.zeros(size, dtype=torch.int64)
        self.next_H = torch.arange(size)
        self._tokens, self._lengths, self._next = (x.numpy() for x in (self.tokens_HW, self.lengths_H, self.next_H))
        self._slots_S = np.zeros(num_rows, dtype=np.int64)
        self._free = list(reversed(range(size)))
        self._families: dict[int, list[int]] = {}
        self._names: dict[int, tuple[int, int]] = {}
        self._ended: dict[tuple[int, int], int] = {}

    @staticmethod
    def token_bytes() -> int:
        """Of each token that a row of the cache has room for."""
        return SEQUENCES_PER_ROW * torch.int32.itemsize

    def begin(self, row: int, family: int, member: int, ids: Sequence[int], begins: int) -> None:
        """A sequence begins or goes on in a row; what had ended as the same member of the family is forgotten.

        Args:
            row: Of the cache.
            family: Names it.
            member: Names the sequence in it.
            ids: All of it so far.
            begins: Tokens of its prompt; the family's is the shortest of its members'.
        """
        before = self._ended.get((family, member))
        if before is not None:
            self._forget(before)
        if not self._free:
            self._forget(next(iter(self._ended.values())))
        slot = self._free.pop()
        self._names[slot] = (family, member)
        self._families.setdefault(family, []).append(slot)
        self._link(family)
        self._slots_S[row] = slot
        self._tokens[slot, : len(ids)] = ids
        self._lengths[slot] = len(ids)
        self.begins_H[slot] = min([begins, *(int(self.begins_H[each]) for each in self._families[family][:-1])])

    def _forget(self, slot: int) -> None:
        """Takes an ended sequence out of its family."""
        name = self._names.pop(slot)
        del self._ended[name]
        self._families[name[0]].remove(slot)
        self._link(name[0])
        self._free.append(slot)

    def _link(self, family: int) -> None:
        """Makes a circle of its members."""
        members = self._families[family]
        if members:
            self._next[members] = [*members[1:], *members[:1]]
        else:
            del self._families[family]

    def end(self, row: int) -> None:
        """The sequence of a row has ended; it is kept until its place is needed."""
        slot = int(self._slots_S[row])
        name = self._names[slot]
        if name in self._ended:
            self._forget(self._ended[name])
        self._ended[name] = slot

    def move(self, source: int, target: int) -> None:
        """Row `target` becomes row `source`."""
        self._slots_S[target] = self._slots_S[source]

    def slots(self, batch: int) -> Tensor:
        """The sequences of the first rows."""
        return torch.from_numpy(self._slots_S[:batch])

    def add(self, rows: Ints, offsets: Ints | int, tokens: Ints, counts: Ints | int) -> None:
        """Tokens that came.

        Args:
            rows: Of each token.
            offsets: Its place among those that came in its row.
            tokens: What came.
            counts: Of each token how many came in its row.
        """
        slots = self._slots_S[rows]
        lengths = self._lengths[slots]
        self._tokens[slots, lengths + offsets] = tokens
        self._lengths[slots] = lengths + counts

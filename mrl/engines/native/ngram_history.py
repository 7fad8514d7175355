"""Token history for n-gram drafting: sequences of a call that run, and the last ones that ended.

The samples of one prompt are a family and draft from each other. The history affects the speed of a call, never its
tokens.

Shapes: H sequences, W longest sequence, S rows of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEQUENCES_PER_ROW = 4
"""Sequences stored per decoding row: the running one, and ended ones."""

Ints = npt.NDArray[np.int64]


class History:
    """Token history of one call.

    Args:
        num_running: Sequences that run at a time.
        num_rows: S.
        width: W.

    Attributes:
        tokens_HW: Prompt and response, int32.
        lengths_H: Tokens so far.
        begins_H: Length of the prompt that the family shares; drafts are also searched in the other members from there
            on.
        next_H: Next member of the family (a circular list).
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
        """Returns the bytes per token that a cache row has room for."""
        return SEQUENCES_PER_ROW * torch.int32.itemsize

    def begin(self, row: int, family: int, member: int, ids: Sequence[int], begins: int) -> None:
        """Adds a sequence that starts or resumes in a row, and removes an ended one of the same family and member.

        Args:
            row: Row of the cache.
            family: Key of the family.
            member: Key of the sequence in the family.
            ids: All tokens of the sequence so far.
            begins: Prompt length; that of the family is the shortest of its members'.
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
        """Removes an ended sequence from its family."""
        name = self._names.pop(slot)
        del self._ended[name]
        self._families[name[0]].remove(slot)
        self._link(name[0])
        self._free.append(slot)

    def _link(self, family: int) -> None:
        """Links the members of a family in a circle."""
        members = self._families[family]
        if members:
            self._next[members] = [*members[1:], *members[:1]]
        else:
            del self._families[family]

    def end(self, row: int) -> None:
        """Marks the sequence of a row as ended; it is stored until its place is needed."""
        slot = int(self._slots_S[row])
        name = self._names[slot]
        if name in self._ended:
            self._forget(self._ended[name])
        self._ended[name] = slot

    def move(self, source: int, target: int) -> None:
        """Moves the sequence of row `source` to row `target`."""
        self._slots_S[target] = self._slots_S[source]

    def slots(self, batch: int) -> Tensor:
        """Returns the sequence indices of the first rows."""
        return torch.from_numpy(self._slots_S[:batch])

    def add(self, rows: Ints, offsets: Ints | int, tokens: Ints, counts: Ints | int) -> None:
        """Appends sampled tokens.

        Args:
            rows: Row of each token.
            offsets: Index of each token among those appended to its row.
            tokens: Token ids.
            counts: Number of tokens appended to the row of each token.
        """
        slots = self._slots_S[rows]
        lengths = self._lengths[slots]
        self._tokens[slots, lengths + offsets] = tokens
        self._lengths[slots] = lengths + counts

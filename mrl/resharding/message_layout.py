"""How the copies of a round lie in messages: one for each pair of ranks, in the buffer of the sender.

Owns the layout: parts that start at multiples of a word, then a sum for each. Sender and receiver find it from the
same copies, so no message says what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES

_WORD = 8
"""Bytes; each part of a message starts at a multiple of it, and its sum takes one, after all parts."""


def by_peer(copies: Sequence[Copy], rank: int) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
    """(receiver -> what `rank` sends it, sender -> what `rank` gets from it), in the order of `copies`."""
    sends: dict[int, list[Copy]] = {}
    receives: dict[int, list[Copy]] = {}
    for copy in copies:
        if copy.source_rank == rank:
            sends.setdefault(copy.target_rank, []).append(copy)
        if copy.target_rank == rank:
            receives.setdefault(copy.source_rank, []).append(copy)
    return sends, receives


def places(copies: Sequence[Copy], rank: int) -> dict[int, int]:
    """Sender -> first byte of its message to `rank` in its buffer, which `by_peer` puts in order there."""
    sent: dict[int, dict[int, list[Copy]]] = {}
    senders = {copy.source_rank for copy in copies if copy.target_rank == rank}
    for copy in copies:
        if copy.source_rank in senders:
            sent.setdefault(copy.source_rank, {}).setdefault(copy.target_rank, []).append(copy)
    found = {}
    for sender, messages in sent.items():
        offset = 0
        for receiver, parts in messages.items():
            if receiver == rank:
                found[sender] = offset
            offset += message_bytes(parts)
    return found


def message_bytes(copies: Sequence[Copy]) -> int:
    """Of a message with these copies."""
    return sum(_aligned(copy.num_bytes) + _WORD for copy in copies)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


def parts_of(copies: Sequence[Copy], message: Tensor) -> tuple[list[Tensor], Tensor]:
    """Views of a message: one per copy, in its wire dtype and shape, and the sums [copies]."""
    parts, offset = [], 0
    for copy in copies:
        shape = [stop - start for start, stop in copy.target_region]
        part = message[offset : offset + copy.num_bytes].view(DTYPES[copy.wire_dtype]).view(shape)
        parts.append(part)
        offset += _aligned(copy.num_bytes)
    return parts, message[offset:].view(torch.int64)

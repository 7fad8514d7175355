"""Layout of the messages of a round: one message per pair of ranks, in the sender's buffer.

A message contains the parts, each starting at a multiple of a word, then one checksum per part. Sender and receiver
derive the layout from the same copies, so a message has no header.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES

_WORD = 8
"""Alignment of the parts of a message and size of a checksum, bytes."""


def by_peer(copies: Sequence[Copy], rank: int) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
    """Returns (receiver -> copies that `rank` sends it, sender -> copies that `rank` gets from it), in their order."""
    sends: dict[int, list[Copy]] = {}
    receives: dict[int, list[Copy]] = {}
    for copy in copies:
        if copy.source_rank == rank:
            sends.setdefault(copy.target_rank, []).append(copy)
        if copy.target_rank == rank:
            receives.setdefault(copy.source_rank, []).append(copy)
    return sends, receives


def message_offsets(copies: Sequence[Copy], rank: int) -> dict[int, int]:
    """Returns sender -> offset in bytes, in the sender's buffer, of its message to `rank`.

    A sender's messages lie one after the other in the order of `by_peer`.
    """
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
    """Returns the size of a message with these copies, checksums included."""
    return sum(_aligned(copy.num_bytes) + _WORD for copy in copies)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


def parts_of(copies: Sequence[Copy], message: Tensor) -> tuple[list[Tensor], Tensor]:
    """Returns views of a message: one per copy, in its wire dtype and shape, and the checksums [copies]."""
    parts, offset = [], 0
    for copy in copies:
        shape = [stop - start for start, stop in copy.target_region]
        part = message[offset : offset + copy.num_bytes].view(DTYPES[copy.wire_dtype]).view(shape)
        parts.append(part)
        offset += _aligned(copy.num_bytes)
    return parts, message[offset:].view(torch.int64)

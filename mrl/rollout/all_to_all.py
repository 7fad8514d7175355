"""Point-to-point messages between ranks, sent in all-to-all rounds with small staging buffers.

The content of a message is up to the caller, who writes and reads it with callbacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MAX_STAGING_BYTES = 64 << 20
MIN_STAGING_BYTES = 1 << 20
STAGING_DIVISOR = 16
"""Limit on the bytes that a rank sends, and receives, in a round: the busiest rank's received bytes / STAGED_PART,
clamped to LEAST_STAGED .. MOST_STAGED."""


@dataclass(frozen=True)
class RankMessage:
    """A message from one rank to another.

    Attributes:
        item: Number of the message, chosen by the caller and passed to its callbacks.
        sender: Global rank that writes the message.
        receiver: Global rank that reads it; may be the sender.
        num_bytes: Size of the message, bytes; a multiple of 4 for alignment.
    """

    item: int
    sender: int
    receiver: int
    num_bytes: int


def send_messages(
    messages: Sequence[RankMessage],
    rank: int,
    write: Callable[[int, Tensor], None],
    read: Callable[[int, Tensor], None],
) -> None:
    """Collective over the job: sends every message from its sender to its receiver.

    Needs two staging buffers, see STAGED_PART. A message longer than the limit has a round of its own.

    Args:
        messages: Messages of all ranks, in the same order on every rank.
        rank: Global rank of this process.
        write: Called with an item that this rank sends and its uint8 buffer, which it fills.
        read: Called with an item that this rank receives and its uint8 buffer, which is only valid during the call.
    """
    own_rounds = [
        (
            sorted((one for one in members if one.sender == rank), key=lambda one: one.receiver),
            sorted((one for one in members if one.receiver == rank), key=lambda one: one.sender),
        )
        for members in split_into_rounds(messages)
    ]
    sizes = [max((sum(one.num_bytes for one in each[side]) for each in own_rounds), default=0) for side in (0, 1)]
    staged = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for outgoing, incoming in own_rounds:
        counts = [[0] * dist.get_world_size() for _ in staged]
        for one in outgoing:
            counts[0][one.receiver] += one.num_bytes
        for one in incoming:
            counts[1][one.sender] += one.num_bytes
        sent, received = (buffer[: sum(count)] for buffer, count in zip(staged, counts, strict=True))
        for one, part in _parts(outgoing, sent):
            write(one.item, part)
        dist.all_to_all_single(received, sent, counts[1], counts[0])
        for one, part in _parts(incoming, received):
            read(one.item, part)


def split_into_rounds(messages: Sequence[RankMessage]) -> list[list[RankMessage]]:
    """Distributes messages over rounds so that no rank exceeds `staging_limit` in a round.

    Greedy: a message goes into the last round that its sender or receiver already uses, or the next one if either is
    full there.
    """
    limit = staging_limit(messages)
    ends: dict[tuple[str, int], list[int]] = {}  # (side, rank) -> its last round, bytes there
    found: list[list[RankMessage]] = []
    for message in _interleaved(messages):
        both = [ends.setdefault(end, [0, 0]) for end in (("from", message.sender), ("to", message.receiver))]
        number = max(last for last, _ in both)
        if any(last == number and filled and filled + message.num_bytes > limit for last, filled in both):
            number += 1
        for end in both:
            end[:] = [number, message.num_bytes + (end[1] if end[0] == number else 0)]
        found.extend([] for _ in range(number + 1 - len(found)))
        found[number].append(message)
    return found


def staging_limit(messages: Sequence[RankMessage]) -> int:
    """Returns the limit on the bytes that a rank sends, and receives, in a round."""
    received: Counter[int] = Counter()
    for message in messages:
        received[message.receiver] += message.num_bytes
    busiest = max(received.values(), default=0)
    return min(MAX_STAGING_BYTES, max(MIN_STAGING_BYTES, busiest // STAGING_DIVISOR))


def _interleaved(messages: Sequence[RankMessage]) -> Iterator[RankMessage]:
    """Yields the first message of every sender, then the second of every sender, so that all send in every round."""
    seen: Counter[int] = Counter()
    by_number: list[list[RankMessage]] = []
    for message in messages:
        number = seen[message.sender]
        seen[message.sender] += 1
        if number == len(by_number):
            by_number.append([])
        by_number[number].append(message)
    return (message for same in by_number for message in same)


def _parts(messages: Sequence[RankMessage], buffer: Tensor) -> Iterator[tuple[RankMessage, Tensor]]:
    """Yields each message with its slice of the buffer."""
    return zip(messages, torch.split(buffer, [message.num_bytes for message in messages]), strict=True)

"""Bytes from rank to rank: each message goes once, in rounds for which a rank needs little memory.

Owns the rounds and their staging buffers. What a message says, and where it is read from and written to, is the
caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MOST_STAGED = 64 << 20
LEAST_STAGED = 1 << 20
STAGED_PART = 16
"""A rank's messages of a round are at most a sixteenth of what the busiest rank receives, and within these bytes."""


@dataclass(frozen=True)
class Message:
    """What one rank sends another.

    Attributes:
        item: What it is about; the caller knows.
        sender: Rank of the job.
        receiver: Rank of the job, maybe the sender.
        num_bytes: Of it; a multiple of 4, so that numbers of 4 bytes lie aligned.
    """

    item: int
    sender: int
    receiver: int
    num_bytes: int


def move(
    messages: Sequence[Message], rank: int, write: Callable[[int, Tensor], None], read: Callable[[int, Tensor], None]
) -> None:
    """Collective over the job: every message goes from its sender to its receiver.

    Beside what `read` fills this needs two staging buffers, see MOST_STAGED; a longer message has a round of its own.

    Args:
        messages: All of the job's, in the same order on every rank.
        rank: This one.
        write: Fills the bytes (uint8) of an item that this rank sends.
        read: Takes the bytes of an item that this rank receives; they are gone after the call.
    """
    turns = [
        (
            sorted((one for one in members if one.sender == rank), key=lambda one: one.receiver),
            sorted((one for one in members if one.receiver == rank), key=lambda one: one.sender),
        )
        for members in rounds(messages)
    ]
    most = [max((sum(one.num_bytes for one in turn[side]) for turn in turns), default=0) for side in (0, 1)]
    staged = [torch.empty(size, dtype=torch.uint8) for size in most]
    for leaving, arriving in turns:
        counts = [[0] * dist.get_world_size() for _ in staged]
        for one in leaving:
            counts[0][one.receiver] += one.num_bytes
        for one in arriving:
            counts[1][one.sender] += one.num_bytes
        sent, received = (buffer[: sum(count)] for buffer, count in zip(staged, counts, strict=True))
        for one, part in _parts(leaving, sent):
            write(one.item, part)
        dist.all_to_all_single(received, sent, counts[1], counts[0])
        for one, part in _parts(arriving, received):
            read(one.item, part)


def rounds(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages of each round: each goes into the first one, from its ends' last ones on, that has room at both ends."""
    limit = staged_bytes(messages)
    ends: dict[tuple[str, int], list[int]] = {}  # (side, rank) -> its last round, bytes there
    found: list[list[Message]] = []
    for message in _in_turns(messages):
        both = [ends.setdefault(end, [0, 0]) for end in (("from", message.sender), ("to", message.receiver))]
        number = max(last for last, _ in both)
        if any(last == number and filled and filled + message.num_bytes > limit for last, filled in both):
            number += 1
        for end in both:
            end[:] = [number, message.num_bytes + (end[1] if end[0] == number else 0)]
        found.extend([] for _ in range(number + 1 - len(found)))
        found[number].append(message)
    return found


def staged_bytes(messages: Sequence[Message]) -> int:
    """What a rank sends, and what it receives, in a round at most, where no message is longer."""
    received: Counter[int] = Counter()
    for message in messages:
        received[message.receiver] += message.num_bytes
    busiest = max(received.values(), default=0)
    return min(MOST_STAGED, max(LEAST_STAGED, busiest // STAGED_PART))


def _in_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Every sender's first message, then every sender's second, so that all of them are at work in every round."""
    seen: Counter[int] = Counter()
    turns: list[list[Message]] = []
    for message in messages:
        turn = seen[message.sender]
        seen[message.sender] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(message)
    return (message for turn in turns for message in turn)


def _parts(messages: Sequence[Message], buffer: Tensor) -> Iterator[tuple[Message, Tensor]]:
    """Each message with its bytes in the buffer."""
    return zip(messages, torch.split(buffer, [message.num_bytes for message in messages]), strict=True)

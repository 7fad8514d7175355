"""Copies in buckets: what is staged and sent at a time, and how much memory that takes.

Owns the order of a transfer. Every rank computes the same rounds from the same copies. While the messages of one round
are on their way, those of the last are copied into place and those of the next put together: a rank has two buffers to
send and two to receive, and rounds take them in turn. Pure arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mrl.resharding.copy_op import Copy

NUM_BUFFERS = 2
"""To send, and as many to receive."""

PIPELINE_ROUNDS = 8
"""Rounds that a transfer is cut into where its bytes allow, so that messages and copies overlap."""

MIN_ROUND_BYTES = 16 << 20
"""A message of this size is limited by bandwidth, not by the agreement before it."""


def buckets(copies: Sequence[Copy], bucket_bytes: int) -> list[list[Copy]]:
    """The copies in buckets of at most `bucket_bytes`; a larger copy is split."""
    found: list[list[Copy]] = []
    room = 0
    for large in copies:
        for copy in large.parts(bucket_bytes):
            if copy.num_bytes > room:
                found.append([])
                room = bucket_bytes
            found[-1].append(copy)
            room -= copy.num_bytes
    return found


def turns(
    own: Sequence[Copy], rank: int, batches: Sequence[Sequence[Copy]], bucket_bytes: int
) -> list[list[list[Copy]]]:
    """The copies that `rank` makes by itself, in buckets, by turn: the first before any round has come, then one each.

    What belongs to a tensor of which messages bring parts takes its turn with those parts, so that few tensors are
    half there at a time. The rest is spread evenly.

    Args:
        own: What the rank copies without a message, in the order of its tensors.
        rank: Whose.
        batches: What `rounds` made of the copies that go in messages.
        bucket_bytes: Largest bucket.
    """
    arrives: dict[str, int] = {}
    for number, batch in enumerate(batches):
        for copy in batch:
            if copy.target_rank == rank:
                arrives.setdefault(copy.target_name, number)
    found: list[list[list[Copy]]] = [[] for _ in range(len(batches) + 1)]
    beside: dict[int | None, list[Copy]] = defaultdict(list)
    for copy in own:
        beside[arrives.get(copy.target_name)].append(copy)
    for number, bucket in enumerate(buckets(beside.pop(None, []), bucket_bytes)):
        found[number % len(found)].append(bucket)
    for arrival, ready in beside.items():
        found[(arrival or 0) + 1] += buckets(ready, bucket_bytes)
    return found


def rounds(copies: Sequence[Copy], bucket_bytes: int) -> list[list[Copy]]:
    """The copies between ranks, in rounds: in none does a rank send, or receive, more than `bucket_bytes`.

    A larger copy is split. A receiver's copies keep their order; a sender may serve a later one first, so that those
    of a pipeline's later stages need not wait for the first stage's.
    """
    found: list[list[Copy]] = []
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    last_receive: dict[int, int] = defaultdict(int)
    for large in copies:
        sender, receiver = large.source_rank, large.target_rank
        if sender == receiver:
            continue
        for copy in large.parts(bucket_bytes):
            size = copy.num_bytes
            index = last_receive[receiver]
            while max(sent[sender, index], received[receiver, index]) + size > bucket_bytes:
                index += 1
            last_receive[receiver] = index
            sent[sender, index] += size
            received[receiver, index] += size
            found.extend([] for _ in range(index + 1 - len(found)))
            found[index].append(copy)
    return found


def round_bytes(copies: Sequence[Copy], bucket_bytes: int) -> int:
    """What a rank sends, or receives, in a round: a part of the busiest rank's bytes, at most `bucket_bytes`."""
    busy: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        if copy.source_rank != copy.target_rank:
            busy["sends", copy.source_rank] += copy.num_bytes
            busy["receives", copy.target_rank] += copy.num_bytes
    return min(bucket_bytes, max(MIN_ROUND_BYTES, -(-max(busy.values(), default=0) // PIPELINE_ROUNDS)))


def peak_staging_bytes(copies: Sequence[Copy], bucket_bytes: int) -> int:
    """The largest sum of send and receive buffers of any rank, without the checksums of messages."""
    buffers: dict[int, dict[tuple[str, int], int]] = defaultdict(lambda: defaultdict(int))
    for number, batch in enumerate(rounds(copies, round_bytes(copies, bucket_bytes))):
        held: dict[tuple[int, str], int] = defaultdict(int)
        for copy in batch:
            held[copy.source_rank, "sends"] += copy.num_bytes
            held[copy.target_rank, "receives"] += copy.num_bytes
        for (rank, direction), size in held.items():
            buffer = (direction, number % NUM_BUFFERS)
            buffers[rank][buffer] = max(buffers[rank][buffer], size)
    return max((sum(sizes.values()) for sizes in buffers.values()), default=0)

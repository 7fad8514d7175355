"""Order of a transfer: copies grouped into buckets and rounds, and the staging memory that they take.

Every rank computes the same rounds from the same copies. While the messages of one round are being sent, the messages
of the previous round are copied into place and those of the next are packed. So a rank has two send and two receive
buffers, and rounds alternate between them. Pure arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mrl.resharding.copy_op import Copy

NUM_BUFFERS = 2
"""Send buffers of a rank; it has as many receive buffers."""

PIPELINE_ROUNDS = 8
"""Rounds into which a transfer is split if it is large enough, so that messages and copies overlap."""

MIN_ROUND_BYTES = 16 << 20
"""Smallest round; a message of this size is limited by bandwidth, not by the agreement of the ranks before it."""


def buckets(copies: Sequence[Copy], bucket_bytes: int) -> list[list[Copy]]:
    """Groups the copies into buckets of at most `bucket_bytes`; splits a larger copy."""
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


def schedule_local_copies(
    own: Sequence[Copy], rank: int, batches: Sequence[Sequence[Copy]], bucket_bytes: int
) -> list[list[list[Copy]]]:
    """Distributes the copies that `rank` makes without messages over the rounds, in buckets.

    Copies into a tensor that also gets parts from messages are scheduled with those messages, so that few tensors are
    incomplete at a time. The other copies are spread evenly.

    Args:
        own: Copies without a message, in the order of the rank's tensors.
        rank: The rank that makes them.
        batches: Rounds of the copies that go in messages, from `rounds`.
        bucket_bytes: Largest bucket, in bytes.

    Returns:
        `len(batches) + 1` lists of buckets: the first before any message arrives, then one per round.
    """
    arrives: dict[str, int] = {}
    for number, batch in enumerate(batches):
        for copy in batch:
            if copy.target_rank == rank:
                arrives.setdefault(copy.target_name, number)
    found: list[list[list[Copy]]] = [[] for _ in range(len(batches) + 1)]
    by_round: dict[int | None, list[Copy]] = defaultdict(list)
    for copy in own:
        by_round[arrives.get(copy.target_name)].append(copy)
    for number, bucket in enumerate(buckets(by_round.pop(None, []), bucket_bytes)):
        found[number % len(found)].append(bucket)
    for arrival, ready in by_round.items():
        found[(arrival or 0) + 1] += buckets(ready, bucket_bytes)
    return found


def rounds(copies: Sequence[Copy], bucket_bytes: int) -> list[list[Copy]]:
    """Groups the copies between ranks into rounds in which no rank sends or receives more than `bucket_bytes`.

    A larger copy is split. A receiver's copies keep their order. A sender may send a later copy first, so that
    receivers of later pipeline stages do not wait for the first stage.
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
    """Returns the largest number of bytes that a rank sends, or receives, in a round, at most `bucket_bytes`.

    It is 1 / `PIPELINE_ROUNDS` of the bytes of the busiest rank, and at least `MIN_ROUND_BYTES`.
    """
    busy: dict[tuple[str, int], int] = defaultdict(int)
    for copy in copies:
        if copy.source_rank != copy.target_rank:
            busy["sends", copy.source_rank] += copy.num_bytes
            busy["receives", copy.target_rank] += copy.num_bytes
    return min(bucket_bytes, max(MIN_ROUND_BYTES, -(-max(busy.values(), default=0) // PIPELINE_ROUNDS)))


def peak_staging_bytes(copies: Sequence[Copy], bucket_bytes: int) -> int:
    """Returns the largest sum of send and receive buffers of any rank, without the checksums of messages."""
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

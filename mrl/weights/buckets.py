"""Copies in buckets: what is staged and sent at a time, and how much memory that takes.

Owns the order of a transfer. Every rank computes the same rounds from the same copies. Pure arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mrl.weights.copies import Copy


def local_buckets(copies: Sequence[Copy], rank: int, bucket_bytes: int) -> list[list[Copy]]:
    """The copies inside `rank`, in buckets of at most `bucket_bytes`; a larger copy is split."""
    buckets: list[list[Copy]] = []
    room = 0
    for large in copies:
        if large.source_rank == large.target_rank == rank:
            for copy in large.parts(bucket_bytes):
                if copy.num_bytes > room:
                    buckets.append([])
                    room = bucket_bytes
                buckets[-1].append(copy)
                room -= copy.num_bytes
    return buckets


def rounds(copies: Sequence[Copy], bucket_bytes: int) -> list[list[Copy]]:
    """The copies between ranks, in rounds: in none does a rank send, or receive, more than `bucket_bytes`.

    A larger copy is split. The order of a sender's and a receiver's copies is kept.
    """
    found: list[list[Copy]] = []
    sent: dict[tuple[int, int], int] = defaultdict(int)
    received: dict[tuple[int, int], int] = defaultdict(int)
    last_send: dict[int, int] = defaultdict(int)
    last_receive: dict[int, int] = defaultdict(int)
    for large in copies:
        sender, receiver = large.source_rank, large.target_rank
        if sender == receiver:
            continue
        for copy in large.parts(bucket_bytes):
            size = copy.num_bytes
            index = max(last_send[sender], last_receive[receiver])
            while max(sent[sender, index], received[receiver, index]) + size > bucket_bytes:
                index += 1
            last_send[sender] = last_receive[receiver] = index
            sent[sender, index] += size
            received[receiver, index] += size
            found.extend([] for _ in range(index + 1 - len(found)))
            found[index].append(copy)
    return found


def peak_staging_bytes(copies: Sequence[Copy], bucket_bytes: int) -> int:
    """The largest sum of send and receive buffers that any rank holds in a round."""
    peak = 0
    for batch in rounds(copies, bucket_bytes):
        held: dict[int, int] = defaultdict(int)
        for copy in batch:
            held[copy.source_rank] += copy.num_bytes
            held[copy.target_rank] += copy.num_bytes
        peak = max(peak, *held.values())
    return peak

"""Which sequences go together: microbatches under a token budget, and bins of equal cost.

Owns the two partitions and nothing else: it sees lengths, never tokens. Both are deterministic, so that every rank
computes the same answer from the same lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Splits items over bins so that the largest bin is small: longest processing time first.

    Args:
        costs: Cost of each item, at least 0.
        num_bins: Bins, at least 1.

    Returns:
        Indices of each bin, ascending; every index once. No bin is empty where there are as many items as bins.

    Raises:
        ValueError: `num_bins` is below 1, or a cost is negative.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the best largest bin.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}, expected at least 1")
    if any(cost < 0 for cost in costs):
        raise ValueError(f"the smallest cost is {min(costs)}, expected at least 0")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # (load, items, bin): with equal loads the bin with fewer items is next, so items of cost 0 fill empty bins too.
    heap: list[tuple[float, int, int]] = [(0, 0, index) for index in range(num_bins)]
    for item in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, index = heap[0]
        bins[index].append(item)
        heapq.heapreplace(heap, (load + costs[item], count + 1, index))
    for members in bins:
        members.sort()
    return bins


def pack_microbatches(
    lens: Sequence[int], max_tokens: int, *, at_least: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Packs sequences into few microbatches of at most `max_tokens`, of nearly equal size.

    A sequence that is longer than the budget by itself gets a microbatch of its own: the budget is a wish for memory,
    and refusing a sampled sequence in the middle of a run would lose more than trying it.

    Args:
        lens: Tokens of each sequence, at least 1.
        max_tokens: Budget of a microbatch, tokens.
        at_least: Fewest microbatches (so that data-parallel ranks can agree on a count).
        multiple_of: The count is a multiple of this (an interleaved pipeline needs one).

    Returns:
        Indices of each microbatch, ascending, in the order of their first sequence. Microbatches are empty, and last,
        only where `at_least` or `multiple_of` ask for more of them than there are sequences.

    Raises:
        ValueError: `max_tokens`, `at_least` or `multiple_of` is below 1, or a length is.
    """
    if max_tokens < 1 or at_least < 1 or multiple_of < 1:
        raise ValueError(f"max_tokens={max_tokens}, at_least={at_least}, multiple_of={multiple_of}: each at least 1")
    if any(length < 1 for length in lens):
        raise ValueError(f"the shortest sequence has {min(lens)} tokens, expected at least 1")
    if not lens and at_least == multiple_of == 1:
        return []
    count = max(_fewest(lens, max_tokens), at_least)
    count = -(-count // multiple_of) * multiple_of
    while True:
        packed = _split(lens, count, max_tokens)
        if packed is not None:
            packed.sort(key=lambda members: members[0] if members else len(lens))
            return packed
        count += multiple_of


def _fewest(lens: Sequence[int], max_tokens: int) -> int:
    """A count below which no packing exists: by the sum, and by the sequences of which no two fit together."""
    fitting = [length for length in lens if length <= max_tokens]
    by_sum = -(-sum(fitting) // max_tokens)
    by_size = sum(2 * length > max_tokens for length in fitting)
    return max(by_sum, by_size) + len(lens) - len(fitting)


def _split(lens: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """`count` balanced microbatches within the budget, or None. As many microbatches as sequences always fit."""
    alone = [[index] for index, length in enumerate(lens) if length > max_tokens]
    fitting = [index for index, length in enumerate(lens) if length <= max_tokens]
    if count <= len(alone):
        return alone if count == len(alone) and not fitting else None
    bins = balance([lens[index] for index in fitting], count - len(alone))
    if any(sum(lens[fitting[item]] for item in members) > max_tokens for members in bins):
        return None
    return alone + [[fitting[item] for item in members] for members in bins]

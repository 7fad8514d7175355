"""Partitions of sequences by length: microbatches under a token budget, and bins of equal cost.

All functions are deterministic, so that every rank computes the same partition from the same lengths.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence


def balance(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Splits items over bins so that the largest bin is small (longest processing time first).

    Args:
        costs: Cost of each item, at least 0.
        num_bins: Number of bins, at least 1.

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


def balance_families(
    families: Sequence[Sequence[int]], prompt_lens: Sequence[int], response_lens: Sequence[int], num_bins: int
) -> list[list[int]]:
    """Splits samples over bins so that the largest bin is small, where samples of a prompt in one bin share its tokens.

    The samples of a prompt stay in one bin unless splitting them makes the largest bin smaller, as with more bins than
    prompts or with few prompts.

    Args:
        families: Sample indices of each prompt.
        prompt_lens: Prompt length of each sample, tokens.
        response_lens: Response length of each sample, tokens.
        num_bins: Number of bins, at least 1.

    Returns:
        Sample indices of each bin, ascending; every sample once.
    """
    if num_bins == 1:
        return [sorted(item for family in families for item in family)]
    most = max((len(family) for family in families), default=1)
    found: list[tuple[int, list[list[int]]]] = []
    parts = 1
    while True:
        pieces = [piece for family in families for piece in _split_family(family, parts)]
        costs = [prompt_lens[piece[0]] + sum(response_lens[item] for item in piece) for piece in pieces]
        chosen = balance(costs, num_bins)
        loads = [sum(costs[index] for index in members) for members in chosen]
        found.append((max(loads), [sorted(item for index in members for item in pieces[index]) for members in chosen]))
        if parts >= most:
            return min(found, key=lambda each: each[0])[1]
        parts = min(2 * parts, most)


def _split_family(family: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Splits the samples of a prompt into up to `parts` pieces of almost equal size."""
    parts = min(parts, len(family))
    ends = [len(family) * part // parts for part in range(parts + 1)]
    return [family[start:end] for start, end in itertools.pairwise(ends)]


def pack_microbatches(
    lens: Sequence[int], max_tokens: int, *, at_least: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Packs sequences into few microbatches of at most `max_tokens`, of equal size where that needs no more of them.

    A sequence longer than the budget gets its own microbatch: the budget limits memory softly, and refusing a sampled
    sequence in the middle of a run loses more than trying it.

    Args:
        lens: Length of each sequence, at least 1 token.
        max_tokens: Token budget of a microbatch.
        at_least: Minimum number of microbatches, on which data-parallel ranks agree.
        multiple_of: Divisor of the number of microbatches (the interleaved pipeline schedule needs one).

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
    alone = [[index] for index, length in enumerate(lens) if length > max_tokens]
    fitting = [index for index, length in enumerate(lens) if length <= max_tokens]
    tight = _best_fit(lens, fitting, max_tokens)
    count = max(len(tight) + len(alone), at_least)
    count = -(-count // multiple_of) * multiple_of
    packed = alone + (
        _balanced_within_budget(lens, fitting, count - len(alone), max_tokens) or _divide(tight, count - len(alone))
    )
    return sorted(packed, key=lambda members: members[0] if members else len(lens))


def _best_fit(lens: Sequence[int], fitting: list[int], max_tokens: int) -> list[list[int]]:
    """Packs into few bins: the longest first, each into the fullest bin with room for it.

    Source: Johnson 1974, "Fast algorithms for bin packing": at most 11/9 of the fewest bins, and 4.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for item in sorted(fitting, key=lambda index: (-lens[index], index)):
        place = bisect_left(free, (lens[item], -1))
        left, target = free.pop(place) if place < len(free) else (max_tokens, len(bins))
        if target == len(bins):
            bins.append([])
        bins[target].append(item)
        insort(free, (left - lens[item], target))
    return [sorted(members) for members in bins]


def _balanced_within_budget(
    lens: Sequence[int], fitting: list[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Returns `count` balanced bins, or None if one of them exceeds the budget."""
    if count < 1:
        return None
    bins = [[fitting[item] for item in members] for members in balance([lens[index] for index in fitting], count)]
    over = any(sum(lens[index] for index in members) > max_tokens for members in bins)
    return None if over else bins


def _divide(bins: list[list[int]], count: int) -> list[list[int]]:
    """Returns `count` bins by repeatedly halving the bin with the most sequences."""
    bins = list(bins)
    while len(bins) < count:
        most = max(range(len(bins)), key=lambda index: (len(bins[index]), -index), default=0)
        members = bins[most] if bins else []
        half = len(members) // 2
        if half == 0:
            bins.append([])
            continue
        bins[most] = members[half:]
        bins.append(members[:half])
    return bins

"""Arithmetic of half-open boxes (`layout.Region`): intersection, difference, volume, and splitting by size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mrl.resharding.layout import Region


def volume(region: Region) -> int:
    """Returns the number of elements in a region; 1 for the region of a scalar."""
    total = 1
    for start, stop in region:
        total *= stop - start
    return total


def full_region(shape: Iterable[int]) -> Region:
    """Returns the region that covers a tensor of this shape."""
    return tuple((0, extent) for extent in shape)


def slices(region: Region) -> tuple[slice, ...]:
    """Returns the index that selects a region of a tensor."""
    return tuple(slice(start, stop) for start, stop in region)


def intersect(a: Region, b: Region) -> Region | None:
    """Returns the intersection, None where it is empty."""
    both = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        both.append((start, stop))
    return tuple(both)


def subtract(region: Region, hole: Region) -> list[Region]:
    """Returns disjoint regions that cover `region` except `hole`; `hole` must lie inside `region`."""
    left = []
    rest = list(region)
    for axis, ((start, stop), (hole_start, hole_stop)) in enumerate(zip(region, hole, strict=True)):
        if start < hole_start:
            left.append((*rest[:axis], (start, hole_start), *rest[axis + 1 :]))
        if hole_stop < stop:
            left.append((*rest[:axis], (hole_stop, stop), *rest[axis + 1 :]))
        rest[axis] = (hole_start, hole_stop)
    return left


def union_volume(regions: Iterable[Region]) -> int:
    """Counts the elements that are in at least one of the regions."""
    disjoint: list[Region] = []
    for region in dict.fromkeys(regions):
        fresh = [region]
        for known in disjoint:
            fresh = [part for item in fresh for part in subtract_intersection(item, known)]
        disjoint += fresh
    return sum(volume(region) for region in disjoint)


def subtract_intersection(region: Region, other: Region) -> list[Region]:
    """Returns disjoint regions that cover `region` except its intersection with `other`."""
    both = intersect(region, other)
    return [region] if both is None else subtract(region, both)


def translate(region: Region, source: Region, target: Region) -> Region:
    """Maps `region` from coordinates where a piece is at `source` to those where the same piece is at `target`."""
    return tuple(
        (start - origin + goal, stop - origin + goal)
        for (start, stop), (origin, _), (goal, _) in zip(region, source, target, strict=True)
    )


def split(region: Region, max_elements: int) -> Iterator[Region]:
    """Yields parts of at most `max_elements` in row-major order: several rows, or parts of a row that is too long."""
    if volume(region) <= max_elements:
        yield region
        return
    (start, stop), rest = region[0], region[1:]
    per_row = volume(rest)
    if per_row > max_elements:
        for row in range(start, stop):
            for part in split(rest, max_elements):
                yield ((row, row + 1), *part)
        return
    step = max_elements // per_row
    for first in range(start, stop, step):
        yield ((first, min(stop, first + step)), *rest)

"""From layouts to copies: which rank sends which elements of which tensor to whom, and what that costs.

Owns `make_plan` and `Plan`. Source and target layouts are intersected piece by piece in Hugging Face coordinates; every
target element gets exactly one source: the rank's own shard, else one on the same host, else any, and among equals the
one that has sent least. So the bytes moved equal the lower bound, "what a target rank needs and does not hold". Pure
arithmetic: `mrl/transfer.py` runs a plan.

A layout shared by several ranks (data-parallel copies, replicas) should be one object: it is then walked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from mrl.weights.layout import Layout, Region, StoredTensor
from mrl.weights.regions import intersect, split, translate, union_volume, volume, whole, without

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, for each dtype that a layout may name."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`target_name[target_region]` on `target_rank` := `source_name[source_region]` on `source_rank`.

    Attributes:
        wire_dtype: The narrower of the two stored dtypes; what is sent.
    """

    source_rank: int
    target_rank: int
    source_name: str
    source_region: Region
    target_name: str
    target_region: Region
    wire_dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return volume(self.target_region) * ITEM_BYTES[self.wire_dtype]

    def parts(self, max_bytes: int) -> Iterator[Copy]:
        """The same copy, in parts of at most `max_bytes`."""
        if self.num_bytes <= max_bytes:
            yield self
            return
        for part in split(self.target_region, max_bytes // ITEM_BYTES[self.wire_dtype]):
            source = translate(part, self.target_region, self.source_region)
            yield Copy(
                self.source_rank, self.target_rank, self.source_name, source, self.target_name, part, self.wire_dtype
            )


@dataclass(frozen=True)
class Plan:
    """The copies of all ranks.

    Attributes:
        copies: In the order of the targets' tensors.
        bytes_local: Bytes copied inside a rank, over all ranks.
        bytes_moved: Bytes sent from one rank to another, over all ranks.
        lower_bound_bytes: Bytes that target ranks need and do not hold, computed from the layouts alone.
        link_bytes: (sender, receiver) -> bytes.
    """

    copies: tuple[Copy, ...]
    bytes_local: int
    bytes_moved: int
    lower_bound_bytes: int
    link_bytes: dict[tuple[int, int], int]

    def local_buckets(self, rank: int, bucket_bytes: int) -> list[list[Copy]]:
        """The copies inside `rank`, in buckets of at most `bucket_bytes`; a larger one is split."""
        buckets: list[list[Copy]] = []
        room = 0
        for copy in self.copies:
            if copy.source_rank == copy.target_rank == rank:
                for part in copy.parts(bucket_bytes):
                    if part.num_bytes > room:
                        buckets.append([])
                        room = bucket_bytes
                    buckets[-1].append(part)
                    room -= part.num_bytes
        return buckets

    def rounds(self, bucket_bytes: int) -> list[list[Copy]]:
        """The copies between ranks, in rounds: in none does a rank send, or receive, more than `bucket_bytes`.

        A larger copy is split. The order of a sender's and a receiver's copies is kept.
        """
        rounds: list[list[Copy]] = []
        sent: dict[tuple[int, int], int] = defaultdict(int)
        received: dict[tuple[int, int], int] = defaultdict(int)
        last_send: dict[int, int] = defaultdict(int)
        last_receive: dict[int, int] = defaultdict(int)
        for large in self.copies:
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
                rounds.extend([] for _ in range(index + 1 - len(rounds)))
                rounds[index].append(copy)
        return rounds

    def peak_staging_bytes(self, bucket_bytes: int) -> int:
        """The largest sum of send and receive buffers that any rank holds at a time."""
        peak = 0
        for copies in self.rounds(bucket_bytes):
            held: dict[int, int] = defaultdict(int)
            for copy in copies:
                held[copy.source_rank] += copy.num_bytes
                held[copy.target_rank] += copy.num_bytes
            peak = max(peak, *held.values())
        return peak


@dataclass
class _Shard:
    """A region of a Hugging Face tensor and everyone who stores it: rank -> (name, region of the stored tensor)."""

    region: Region
    dtype: str
    holders: dict[int, tuple[str, Region]] = field(default_factory=dict)
    by_host: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def make_plan(
    sources: Mapping[int, Layout], targets: Mapping[int, Layout], *, host_of: Callable[[int], int] | None = None
) -> Plan:
    """Finds a source for each element of each target.

    Args:
        sources: Rank -> what it holds.
        targets: Rank -> what it wants.
        host_of: Rank -> host, to prefer a source on the same host; None: one host.

    Raises:
        RuntimeError: A stored tensor's pieces overlap, leave elements out or do not fit its shape, or no source holds
            an element that a target needs; the message names the tensor.
    """
    host = host_of if host_of is not None else lambda rank: 0
    for layout in _distinct(sources) + _distinct(targets):
        for name, stored in layout.items():
            check_cover(name, stored)
    index = _index(sources, host)
    sent: dict[int, int] = defaultdict(int)
    copies: list[tuple[int, Copy]] = []
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, layout in targets.items():
        ranks_of[id(layout)].append(rank)
    for layout in _distinct(targets):
        ranks = ranks_of[id(layout)]
        for position, (name, stored) in enumerate(layout.items()):
            for piece in stored.pieces:
                overlaps = [
                    (shard, both)
                    for shard in index.get(piece.hf_name, ())
                    if (both := intersect(shard.region, piece.src)) is not None
                ]
                for rank in ranks:
                    chosen = _choose(piece.src, overlaps, rank, host(rank), sent)
                    if chosen is None:
                        raise RuntimeError(
                            f"no rank holds all of '{piece.hf_name}'{list(piece.src)}, which '{name}' needs"
                        )
                    for shard, source_rank, region in chosen:
                        source_name, start = shard.holders[source_rank]
                        copy = Copy(
                            source_rank,
                            rank,
                            source_name,
                            translate(region, shard.region, start),
                            name,
                            translate(region, piece.src, piece.dst),
                            min(stored.dtype, shard.dtype, key=ITEM_BYTES.__getitem__),
                        )
                        if source_rank != rank:
                            sent[source_rank] += copy.num_bytes
                        copies.append((position, copy))
    copies.sort(key=lambda item: item[0])
    return _cost(tuple(copy for _, copy in copies), _lower_bound(sources, targets))


def check_cover(name: str, stored: StoredTensor) -> None:
    """Raises RuntimeError unless pieces and padding hold each element of a stored tensor exactly once."""
    regions = [piece.dst for piece in stored.pieces] + list(stored.padding)
    bounds = whole(stored.shape)
    for piece in stored.pieces:
        if [stop - start for start, stop in piece.src] != [stop - start for start, stop in piece.dst]:
            raise RuntimeError(
                f"'{name}': piece of '{piece.hf_name}' has different extents {piece.src} and {piece.dst}"
            )
    total = 0
    for number, region in enumerate(regions):
        if intersect(region, bounds) != region:
            raise RuntimeError(f"'{name}': region {region} lies outside shape {stored.shape}")
        for other in regions[:number]:
            if intersect(region, other) is not None:
                raise RuntimeError(f"'{name}': regions {other} and {region} cover the same elements")
        total += volume(region)
    if total != volume(bounds):
        raise RuntimeError(f"'{name}': {volume(bounds) - total} of {volume(bounds)} elements have no piece")


def _distinct(layouts: Mapping[int, Layout]) -> list[Layout]:
    return list({id(layout): layout for layout in layouts.values()}.values())


def _index(sources: Mapping[int, Layout], host: Callable[[int], int]) -> dict[str, list[_Shard]]:
    """Hugging Face name -> its distinct stored regions."""
    shards: dict[str, dict[tuple[Region, str], _Shard]] = defaultdict(dict)
    for rank, layout in sources.items():
        for name, stored in layout.items():
            for piece in stored.pieces:
                shard = shards[piece.hf_name].setdefault((piece.src, stored.dtype), _Shard(piece.src, stored.dtype))
                if rank not in shard.holders:
                    shard.holders[rank] = (name, piece.dst)
                    shard.by_host[host(rank)].append(rank)
    return {name: list(found.values()) for name, found in shards.items()}


def _choose(
    wanted: Region, overlaps: list[tuple[_Shard, Region]], rank: int, host: int, sent: Mapping[int, int]
) -> list[tuple[_Shard, int, Region]] | None:
    """(shard, source rank, region) for each part of `wanted`: own first, then the same host, then any; None: a hole."""
    left = [wanted]
    chosen: list[tuple[_Shard, int, Region]] = []
    for shard, both, holders in _offers(overlaps, rank, host):
        parts = [part for region in left if (part := intersect(region, both)) is not None]
        if parts:
            source = min(holders, key=lambda holder: (sent.get(holder, 0), holder))
            chosen += [(shard, source, part) for part in parts]
            left = [rest for region in left for rest in without(region, both)]
            if not left:
                return chosen
    return None


def _offers(
    overlaps: list[tuple[_Shard, Region]], rank: int, host: int
) -> Iterator[tuple[_Shard, Region, Iterable[int]]]:
    """(shard, region, who could send it), the nearest first."""
    for shard, both in overlaps:
        if rank in shard.holders:
            yield shard, both, (rank,)
    for shard, both in overlaps:
        if host in shard.by_host:
            yield shard, both, shard.by_host[host]
    for shard, both in overlaps:
        yield shard, both, shard.holders


def _lower_bound(sources: Mapping[int, Layout], targets: Mapping[int, Layout]) -> int:
    """Bytes that each target rank needs and does not hold itself."""
    item_bytes: dict[str, int] = {}
    for layout in _distinct(sources):
        for stored in layout.values():
            for piece in stored.pieces:
                known = item_bytes.get(piece.hf_name, 8)
                item_bytes[piece.hf_name] = min(known, ITEM_BYTES[stored.dtype])
    known_pairs: dict[tuple[int, int], int] = {}
    total = 0
    for rank, target in targets.items():
        source = sources.get(rank, {})
        pair = (id(source) if source else 0, id(target))
        if pair not in known_pairs:
            known_pairs[pair] = _lacking_bytes(source, target, item_bytes)
        total += known_pairs[pair]
    return total


def _lacking_bytes(source: Layout, target: Layout, item_bytes: Mapping[str, int]) -> int:
    held: dict[str, list[Region]] = defaultdict(list)
    for stored in source.values():
        for piece in stored.pieces:
            held[piece.hf_name].append(piece.src)
    needed: dict[str, list[Region]] = defaultdict(list)
    width: dict[str, int] = {}
    for stored in target.values():
        for piece in stored.pieces:
            needed[piece.hf_name].append(piece.src)
            width[piece.hf_name] = min(item_bytes[piece.hf_name], ITEM_BYTES[stored.dtype])
    total = 0
    for name, regions in needed.items():
        own = [both for region in regions for piece in held[name] if (both := intersect(region, piece)) is not None]
        total += (union_volume(regions) - union_volume(own)) * width[name]
    return total


def _cost(copies: tuple[Copy, ...], lower_bound_bytes: int) -> Plan:
    links: dict[tuple[int, int], int] = defaultdict(int)
    local = 0
    for copy in copies:
        if copy.source_rank == copy.target_rank:
            local += copy.num_bytes
        else:
            links[copy.source_rank, copy.target_rank] += copy.num_bytes
    return Plan(copies, local, sum(links.values()), lower_bound_bytes, dict(links))

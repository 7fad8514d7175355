"""Plans: from source and target layouts to the copies between ranks, and their cost in bytes.

Source and target layouts are intersected piece by piece in Hugging Face coordinates. Each target element gets exactly
one source: the rank's own shard if it has the element, else a rank on the same host, else any rank; among equals the
one with the fewest bytes to send. So the bytes moved equal the lower bound: the bytes that a target rank needs and does
not store itself. Pure arithmetic; `transfer.py` executes a plan.

Ranks with the same layout (data-parallel copies, replicas) should share one layout object: it is then processed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mrl.resharding.buckets import peak_staging_bytes
from mrl.resharding.copy_op import ITEM_BYTES, Copy
from mrl.resharding.layout import Layout, Region, StoredTensor
from mrl.resharding.layout_index import distinct_layouts, item_bytes, regions_by_name
from mrl.resharding.regions import full_region, intersect, subtract_intersection, translate, union_volume, volume


@dataclass(frozen=True)
class TransferPlan:
    """The copies of all ranks and their cost.

    Attributes:
        copies: All copies, in the order of the target tensors.
        bytes_local: Bytes copied inside a rank, summed over ranks.
        bytes_moved: Bytes sent from one rank to another, summed over ranks.
        lower_bound_bytes: Bytes that target ranks need and do not store themselves, computed from the layouts alone.
        link_bytes: (sender, receiver) -> bytes.
    """

    copies: tuple[Copy, ...]
    bytes_local: int
    bytes_moved: int
    lower_bound_bytes: int
    link_bytes: dict[tuple[int, int], int]

    def peak_staging_bytes(self, bucket_bytes: int) -> int:
        """Returns the largest sum of send and receive buffers of any rank; transfers allocate them once."""
        return peak_staging_bytes(self.copies, bucket_bytes)


@dataclass
class _Shard:
    """A region of a Hugging Face tensor and its holders: rank -> (name, region of the stored tensor)."""

    region: Region
    dtype: str
    holders: dict[int, tuple[str, Region]] = field(default_factory=dict)


@dataclass
class _Cell:
    """A part of a target piece that each of its holders stores completely.

    Attributes:
        holders: Rank -> (name, region of the stored tensor, dtype).
        by_host: Host -> ranks of `holders`.
    """

    region: Region
    holders: dict[int, tuple[str, Region, str]] = field(default_factory=dict)
    by_host: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def make_plan(
    sources: Mapping[int, Layout], targets: Mapping[int, Layout], *, host_of: Callable[[int], int] | None = None
) -> TransferPlan:
    """Finds a source for each element of each target.

    Args:
        sources: Rank -> layout of the tensors that it stores.
        targets: Rank -> layout of the tensors that it needs.
        host_of: Rank -> host, to prefer a source on the same host; None: one host.

    Raises:
        RuntimeError: A stored tensor's pieces overlap, leave elements out or do not fit its shape, or no source stores
            an element that a target needs; the message names the tensor.
    """
    host = host_of if host_of is not None else lambda rank: 0
    for layout in distinct_layouts(sources) + distinct_layouts(targets):
        for name, stored in layout.items():
            check_coverage(name, stored)
    shards = _index_shards(sources)
    sent: dict[int, int] = defaultdict(int)
    copies: list[tuple[int, Copy]] = []
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, layout in targets.items():
        ranks_of[id(layout)].append(rank)
    for layout in distinct_layouts(targets):
        for position, (name, stored) in enumerate(layout.items()):
            for piece in stored.pieces:
                for cell in _split_by_holders(piece.src, shards.get(piece.hf_name, []), host):
                    if not cell.holders:
                        raise RuntimeError(
                            f"'{name}' needs '{piece.hf_name}'{list(cell.region)}, which no source layout contains"
                        )
                    target = translate(cell.region, piece.src, piece.dst)
                    for rank in ranks_of[id(layout)]:
                        source = _choose_source(cell, rank, host, sent)
                        source_name, region, dtype = cell.holders[source]
                        wire = dtype if ITEM_BYTES[dtype] < ITEM_BYTES[stored.dtype] else stored.dtype
                        copy = Copy(source, rank, source_name, region, name, target, wire)
                        if source != rank:
                            sent[source] += copy.num_bytes
                        copies.append((position, copy))
    copies.sort(key=lambda item: item[0])
    return _plan_with_cost(tuple(copy for _, copy in copies), _lower_bound(sources, targets))


def check_coverage(name: str, stored: StoredTensor) -> None:
    """Checks that pieces and padding cover each element of a stored tensor exactly once.

    Raises:
        RuntimeError: They overlap, leave elements out, or lie outside the shape; the message names the tensor.
    """
    regions = [piece.dst for piece in stored.pieces] + list(stored.padding)
    bounds = full_region(stored.shape)
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


def _index_shards(sources: Mapping[int, Layout]) -> dict[str, list[_Shard]]:
    """Returns Hugging Face name -> its distinct stored regions."""
    shards: dict[str, dict[tuple[Region, str], _Shard]] = defaultdict(dict)
    for rank, layout in sources.items():
        for name, stored in layout.items():
            for piece in stored.pieces:
                shard = shards[piece.hf_name].setdefault((piece.src, stored.dtype), _Shard(piece.src, stored.dtype))
                shard.holders.setdefault(rank, (name, piece.dst))
    return {name: list(found.values()) for name, found in shards.items()}


def _split_by_holders(wanted: Region, shards: Iterable[_Shard], host: Callable[[int], int]) -> list[_Cell]:
    """Splits `wanted` along the borders of the shards, so that a shard contains a cell completely or not at all.

    A cell without holders is in no source layout.
    """
    cut: list[tuple[Region, list[_Shard]]] = [(wanted, [])]
    for shard in shards:
        if intersect(wanted, shard.region) is None:
            continue
        finer: list[tuple[Region, list[_Shard]]] = []
        for region, inside in cut:
            both = intersect(region, shard.region)
            if both is None:
                finer.append((region, inside))
            else:
                finer.append((both, [*inside, shard]))
                finer += [(rest, inside) for rest in subtract_intersection(region, both)]
        cut = finer
    cells = []
    for region, inside in cut:
        cell = _Cell(region)
        for shard in inside:
            regions: dict[Region, Region] = {}
            for rank, (name, stored) in shard.holders.items():
                if rank not in cell.holders:
                    if stored not in regions:
                        regions[stored] = translate(region, shard.region, stored)
                    cell.holders[rank] = (name, regions[stored], shard.dtype)
                    cell.by_host[host(rank)].append(rank)
        cells.append(cell)
    return cells


def _choose_source(cell: _Cell, rank: int, host: Callable[[int], int], sent: dict[int, int]) -> int:
    """Returns the rank that sends a cell to `rank`: itself, else the least loaded one on its host, else of all."""
    if rank in cell.holders:
        return rank
    return min(cell.by_host.get(host(rank)) or cell.holders, key=sent.__getitem__)


def _lower_bound(sources: Mapping[int, Layout], targets: Mapping[int, Layout]) -> int:
    """Sums the bytes that each target rank needs and does not store itself."""
    widths = item_bytes(distinct_layouts(sources))
    known_pairs: dict[tuple[int, int], int] = {}
    total = 0
    for rank, target in targets.items():
        source = sources.get(rank, {})
        pair = (id(source) if source else 0, id(target))
        if pair not in known_pairs:
            known_pairs[pair] = _missing_bytes(source, target, widths)
        total += known_pairs[pair]
    return total


def _missing_bytes(source: Layout, target: Layout, widths: Mapping[str, int]) -> int:
    held, wanted_widths = regions_by_name(source), item_bytes([target])
    total = 0
    for name, regions in regions_by_name(target).items():
        pairs = ((region, piece) for region in regions for piece in held.get(name, ()))
        own = [both for region, piece in pairs if (both := intersect(region, piece)) is not None]
        total += (union_volume(regions) - union_volume(own)) * min(widths[name], wanted_widths[name])
    return total


def _plan_with_cost(copies: tuple[Copy, ...], lower_bound_bytes: int) -> TransferPlan:
    links: dict[tuple[int, int], int] = defaultdict(int)
    local = 0
    for copy in copies:
        if copy.source_rank == copy.target_rank:
            local += copy.num_bytes
        else:
            links[copy.source_rank, copy.target_rank] += copy.num_bytes
    return TransferPlan(copies, local, sum(links.values()), lower_bound_bytes, dict(links))

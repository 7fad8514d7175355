"""Cost of a weight sync in bytes, from the layouts alone: total and per receiving rank, by kind of link.

`traffic` counts what `plan.make_plan` would send, without listing the copies. Ranks in an equal situation (same shard,
same shards on their node, same target) are counted once, so thousands of ranks take seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.layout import Layout, Region
from mrl.resharding.layout_index import distinct_layouts, item_bytes, regions_by_name
from mrl.resharding.regions import subtract_intersection, union_volume, volume


@dataclass(frozen=True)
class ReceivedBytes:
    """Bytes received, by distance of the source.

    Attributes:
        local: Bytes from the rank itself.
        intra_node: Bytes from another rank of its node.
        inter_node: Bytes from another node.
    """

    local: int = 0
    intra_node: int = 0
    inter_node: int = 0


@dataclass(frozen=True)
class Traffic:
    """The bytes of one weight sync.

    Attributes:
        total: Sum over all ranks.
        shares: Distinct values of the bytes that one rank receives.
        full_gather_bytes: Bytes sent if every rank gathered every full tensor, for comparison.
    """

    total: ReceivedBytes
    shares: tuple[ReceivedBytes, ...]
    full_gather_bytes: int


_Regions = dict[str, list[Region]]
"""Hugging Face name -> stored regions."""


def traffic(
    sources: Mapping[int, Layout],
    targets: Mapping[int, Layout],
    gpus_per_node: int,
    *,
    times: Mapping[str, int] | None = None,
) -> Traffic:
    """Counts the bytes of a weight sync.

    Args:
        sources: Rank -> layout of its stored tensors; ranks with equal shards share one object.
        targets: Rank -> layout that it needs; ranks with equal ones share one object.
        gpus_per_node: Consecutive ranks that share a node.
        times: Hugging Face name -> number of equally sharded tensors that it represents; 1 if absent.

    Raises:
        RuntimeError: A target needs an element that no source layout contains.
    """
    held = {id(layout): regions_by_name(layout) for layout in distinct_layouts(sources)}
    widths = item_bytes(distinct_layouts(sources))
    times = times or {}
    on_node: dict[int, frozenset[int]] = {}
    for rank in targets:
        node = rank // gpus_per_node
        if node not in on_node:
            ranks = range(node * gpus_per_node, (node + 1) * gpus_per_node)
            on_node[node] = frozenset(id(sources[other]) for other in ranks if other in sources)
    layouts = {id(layout): layout for layout in targets.values()}
    places = Counter(
        (id(sources.get(rank)), on_node[rank // gpus_per_node], id(layout)) for rank, layout in targets.items()
    )
    everywhere = _merged(held.values())
    nodes = {ids: _merged(held[one] for one in ids) for ids in set(on_node.values())}
    shares = {
        place: _bytes_received(layouts[place[2]], held.get(place[0], {}), nodes[place[1]], everywhere, widths, times)
        for place in places
    }
    total = ReceivedBytes(
        sum(shares[place].local * count for place, count in places.items()),
        sum(shares[place].intra_node * count for place, count in places.items()),
        sum(shares[place].inter_node * count for place, count in places.items()),
    )
    whole = sum(_num_bytes(everywhere, name, widths) * times.get(name, 1) for name in everywhere)
    own = {
        key: sum(_num_bytes(found, name, widths) * times.get(name, 1) for name in found) for key, found in held.items()
    }
    gathered = sum(whole - own.get(id(sources.get(rank)), 0) for rank in targets)
    return Traffic(total, tuple(dict.fromkeys(shares.values())), gathered)


def _merged(parts: Iterable[_Regions]) -> _Regions:
    found: dict[str, dict[Region, None]] = defaultdict(dict)
    for part in parts:
        for name, regions in part.items():
            found[name].update(dict.fromkeys(regions))
    return {name: list(regions) for name, regions in found.items()}


def _num_bytes(held: _Regions, name: str, widths: Mapping[str, int]) -> int:
    return union_volume(held[name]) * widths[name]


def _bytes_received(
    target: Layout,
    own: _Regions,
    node: _Regions,
    everywhere: _Regions,
    widths: Mapping[str, int],
    times: Mapping[str, int],
) -> ReceivedBytes:
    """Returns the bytes that one rank receives, each element from its nearest holder."""
    counts = [0, 0, 0]
    for name, stored in target.items():
        for piece in stored.pieces:
            size = ITEM_BYTES[stored.dtype]
            width = min(widths.get(piece.hf_name, size), size) * times.get(piece.hf_name, 1)
            missing = [piece.src]
            for distance, near in enumerate((own, node, everywhere)):
                before = sum(volume(region) for region in missing)
                for region in near.get(piece.hf_name, ()):
                    if not missing:
                        break
                    missing = [part for item in missing for part in subtract_intersection(item, region)]
                counts[distance] += (before - sum(volume(region) for region in missing)) * width
            if missing:
                raise RuntimeError(
                    f"'{name}' needs '{piece.hf_name}'{list(missing[0])}, which no source layout contains"
                )
    return ReceivedBytes(*counts)

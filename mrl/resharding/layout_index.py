"""Lookups by Hugging Face name in layouts, for `plan.py` and `transfer_cost.py`: stored regions, bytes per element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.layout import Layout, Region


def distinct_layouts(layouts: Mapping[int, Layout]) -> list[Layout]:
    """Returns the layouts of all ranks; ranks that share a layout object contribute it once."""
    return list({id(layout): layout for layout in layouts.values()}.values())


def regions_by_name(layout: Layout) -> dict[str, list[Region]]:
    """Returns Hugging Face name -> the regions of that tensor in the layout."""
    found: dict[str, list[Region]] = defaultdict(list)
    for stored in layout.values():
        for piece in stored.pieces:
            found[piece.hf_name].append(piece.src)
    return dict(found)


def item_bytes(layouts: Iterable[Layout]) -> dict[str, int]:
    """Returns Hugging Face name -> bytes per element in the narrowest dtype in which it is stored."""
    found: dict[str, int] = {}
    for layout in layouts:
        for stored in layout.values():
            size = ITEM_BYTES[stored.dtype]
            for piece in stored.pieces:
                found[piece.hf_name] = min(found.get(piece.hf_name, size), size)
    return found

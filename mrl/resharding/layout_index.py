"""What layouts hold of the Hugging Face tensors: which regions, and how wide an element is, by name.

Owns what `plan.py` and `transfer_cost.py` both count with. Pure arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.layout import Layout, Region


def distinct(layouts: Mapping[int, Layout]) -> list[Layout]:
    """The layouts of all ranks; those that share an object come once."""
    return list({id(layout): layout for layout in layouts.values()}.values())


def regions_by_name(layout: Layout) -> dict[str, list[Region]]:
    """Hugging Face name -> the regions of it that a rank holds."""
    found: dict[str, list[Region]] = defaultdict(list)
    for stored in layout.values():
        for piece in stored.pieces:
            found[piece.hf_name].append(piece.src)
    return dict(found)


def item_bytes(layouts: Iterable[Layout]) -> dict[str, int]:
    """Hugging Face name -> bytes of an element, where it is stored narrowest."""
    found: dict[str, int] = {}
    for layout in layouts:
        for stored in layout.values():
            size = ITEM_BYTES[stored.dtype]
            for piece in stored.pieces:
                found[piece.hf_name] = min(found.get(piece.hf_name, size), size)
    return found

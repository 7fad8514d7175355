"""The bijection of a conversion, checked from the pieces of its target before a byte is moved.

Owns `prove`: each element of each Hugging Face tensor lands at least once, and more than once only where copies belong;
each stored element has exactly one origin or is declared padding. What a file really holds is compared by
`mrl/commands/convert/verify.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mrl.models.base import ArchSpec
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Region
from mrl.resharding.plan import check_cover
from mrl.resharding.regions import intersect, union_volume, volume, whole
from mrl.resharding.shards import copies_allowed


@dataclass(frozen=True)
class Proof:
    """The counts of a cover that holds: stored = model + padding + repeated.

    Attributes:
        hf_tensors: Tensors of the Hugging Face checkpoint.
        hf_elements: Their elements.
        stored_tensors: Tensors in the target's files.
        stored_elements: Their elements.
        padding_elements: Stored elements without an origin.
        repeated_elements: Why -> elements that are stored once more than once, for each further time.
    """

    hf_tensors: int
    hf_elements: int
    stored_tensors: int
    stored_elements: int
    padding_elements: int
    repeated_elements: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For a manifest."""
        return dict(vars(self))


def prove(arch: ArchSpec, layouts: Iterable[Layout]) -> Proof:
    """Checks the cover.

    Args:
        arch: The model.
        layouts: What each file of the target holds.

    Raises:
        RuntimeError: The target's layout is wrong: a tensor is named.
    """
    landed: dict[str, list[Region]] = defaultdict(list)
    stored_tensors = stored_elements = padding = 0
    for layout in layouts:
        for name, stored in layout.items():
            check_cover(name, stored)
            stored_tensors += 1
            stored_elements += volume(whole(stored.shape))
            padding += sum(volume(region) for region in stored.padding)
            for piece in stored.pieces:
                landed[piece.hf_name].append(piece.src)
    expected = {name: stored.shape for name, stored in hf_layout(arch, "float32").items()}
    strangers = [name for name in landed if name not in expected]
    if strangers:
        raise RuntimeError(f"the target holds '{strangers[0]}', which a {arch.family} model does not have")
    reasons = copies_allowed(arch)
    repeated: Counter[str] = Counter()
    for name, shape in expected.items():
        bounds = whole(shape)
        found = union_volume(landed[name])
        if found != volume(bounds) or any(intersect(region, bounds) != region for region in landed[name]):
            raise RuntimeError(f"{volume(bounds) - found} of {volume(bounds)} elements of '{name}' land nowhere")
        extra = sum(volume(region) for region in landed[name]) - volume(bounds)
        if extra:
            reason, first_row = reasons.get(name, ("", shape[0]))
            once = ((0, first_row), *bounds[1:])
            inside = (intersect(region, once) for region in landed[name])
            if sum(volume(region) for region in inside if region) != volume(once):
                raise RuntimeError(f"elements of '{name}' land more than once, and it is not one of those with copies")
            repeated[reason] += extra
    return Proof(
        len(expected),
        sum(volume(whole(shape)) for shape in expected.values()),
        stored_tensors,
        stored_elements,
        padding,
        dict(sorted(repeated.items())),
    )

"""Proof, from the target's layout alone, that a conversion copies every element, before any byte is read.

Each element of each Hugging Face tensor must be stored at least once, and more than once only where the layout
replicates it; each stored element has exactly one origin or is declared padding. `mrl/commands/convert/verify.py`
compares the contents of files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mrl.models.base import ArchSpec
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Region
from mrl.resharding.plan import check_coverage
from mrl.resharding.regions import full_region, intersect, union_volume, volume
from mrl.resharding.shards import allowed_duplicates


@dataclass(frozen=True)
class Proof:
    """Element counts of a complete layout: stored = model + padding + repeated.

    Attributes:
        hf_tensors: Tensors of the Hugging Face checkpoint.
        hf_elements: Elements of these tensors.
        stored_tensors: Tensors in the target's files.
        stored_elements: Elements of these tensors.
        padding_elements: Stored elements without an origin.
        repeated_elements: Reason for replication -> stored elements beyond the first copy.
    """

    hf_tensors: int
    hf_elements: int
    stored_tensors: int
    stored_elements: int
    padding_elements: int
    repeated_elements: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Returns the counts for the manifest."""
        return dict(vars(self))


def prove(arch: ArchSpec, layouts: Iterable[Layout]) -> Proof:
    """Checks that the layouts store every element of the model, and returns the counts.

    Args:
        arch: Structure of the model.
        layouts: Layout of each file of the target.

    Raises:
        RuntimeError: The target's layout is wrong; the message names a tensor.
    """
    stored_regions: dict[str, list[Region]] = defaultdict(list)
    stored_tensors = stored_elements = padding = 0
    for layout in layouts:
        for name, stored in layout.items():
            check_coverage(name, stored)
            stored_tensors += 1
            stored_elements += volume(full_region(stored.shape))
            padding += sum(volume(region) for region in stored.padding)
            for piece in stored.pieces:
                stored_regions[piece.hf_name].append(piece.src)
    expected = {name: stored.shape for name, stored in hf_layout(arch, "float32").items()}
    unknown = [name for name in stored_regions if name not in expected]
    if unknown:
        raise RuntimeError(f"the target has '{unknown[0]}', which is not a tensor of a {arch.family} model")
    reasons = allowed_duplicates(arch)
    repeated: Counter[str] = Counter()
    for name, shape in expected.items():
        bounds = full_region(shape)
        regions = stored_regions[name]
        found = union_volume(regions)
        if found != volume(bounds) or any(intersect(region, bounds) != region for region in regions):
            raise RuntimeError(f"{volume(bounds) - found} of {volume(bounds)} elements of '{name}' are not stored")
        extra = sum(volume(region) for region in regions) - volume(bounds)
        if extra:
            reason, first_row = reasons.get(name, ("", shape[0]))
            once = ((0, first_row), *bounds[1:])
            inside = (intersect(region, once) for region in regions)
            if sum(volume(region) for region in inside if region) != volume(once):
                raise RuntimeError(f"elements of '{name}' are stored more than once, but it must not be replicated")
            repeated[reason] += extra
    return Proof(
        len(expected),
        sum(volume(full_region(shape)) for shape in expected.values()),
        stored_tensors,
        stored_elements,
        padding,
        dict(sorted(repeated.items())),
    )

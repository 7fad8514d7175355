"""One copy of a plan: a region of a source tensor into a region of a target tensor; sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.resharding.layout import Region, StoredTensor
from mrl.resharding.regions import full_region, split, translate, volume

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes per element of each dtype that a layout may name."""


def num_bytes(stored: StoredTensor) -> int:
    """Returns the size of a stored tensor, padding included, bytes."""
    return volume(full_region(stored.shape)) * ITEM_BYTES[stored.dtype]


@dataclass(frozen=True, slots=True)
class Copy:
    """`target_name[target_region]` on `target_rank` := `source_name[source_region]` on `source_rank`.

    Attributes:
        wire_dtype: Dtype that is sent: the narrower of the two stored dtypes.
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
        """Size in `wire_dtype`, bytes."""
        return volume(self.target_region) * ITEM_BYTES[self.wire_dtype]

    def parts(self, max_bytes: int) -> Iterator[Copy]:
        """Yields copies of at most `max_bytes` each that together equal this one."""
        if self.num_bytes <= max_bytes:
            yield self
            return
        for part in split(self.target_region, max_bytes // ITEM_BYTES[self.wire_dtype]):
            source = translate(part, self.target_region, self.source_region)
            yield Copy(
                self.source_rank, self.target_rank, self.source_name, source, self.target_name, part, self.wire_dtype
            )

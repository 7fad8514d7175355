"""One copy of a plan: a region of a source tensor into a region of a target tensor.

Owns `Copy`, and the bytes of what layouts name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.resharding.layout import Region, StoredTensor
from mrl.resharding.regions import split, translate, volume, whole

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of an element, for each dtype that a layout may name."""


def num_bytes(stored: StoredTensor) -> int:
    """Bytes of a stored tensor, padding included."""
    return volume(whole(stored.shape)) * ITEM_BYTES[stored.dtype]


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

"""A Hugging Face model with low-rank adapters merged into it, as a source of conversions.

A merged value depends on its position only, not on the region that is read: products are computed for fixed blocks of
a matrix, since a matrix product of another shape may round otherwise. So every layout of a target has the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import Source
from mrl.config.config import LoraConfig
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Region
from mrl.resharding.lora import engine_matrices, peft_name, scale_of
from mrl.resharding.merged_weights import MergedWeights
from mrl.resharding.regions import full_region, intersect, slices, translate

_BLOCK = (512, 4096)
"""Rows and columns of a block."""


class AdapterReader(Protocol):
    """Interface of adapters that are read from files; picklable.

    Attributes:
        lora: Settings of the adapters.
        files: Paths of the files that are read.
    """

    lora: LoraConfig
    files: tuple[Path, ...]

    def tensor(self, name: str, /) -> Tensor:
        """Returns an adapter by its name in PEFT's files."""

    def describe(self) -> dict[str, Any]:
        """Returns the settings for a manifest."""


class MergedSource(Source):
    """A Hugging Face model with adapters merged into it in fp32, rounded once to the dtype that is read."""

    def __init__(self, base: Source, adapters: AdapterReader) -> None:
        """Stores the parts, which are read when weights are.

        Args:
            base: The model without adapters.
            adapters: Adapters of this model.
        """
        self._base, self._adapters = base, adapters
        self.arch, self.folder = base.arch, base.folder
        self.files = (*base.files, *(str(path.resolve()) for path in adapters.files))
        layout = hf_layout(base.arch, "float32")
        matrices = engine_matrices(base.arch, layout, adapters.lora, "float32")
        stored = [matrix.weight for matrix in matrices]
        self._shapes = {matrix.weight: matrix.stored.shape for matrix in matrices}
        pairs = {
            name: peft_name(matrix.modules[0], which)
            for matrix in matrices
            for name, which in ((matrix.a_name, "lora_A"), (matrix.b_name, "lora_B"))
        }
        self._merged = MergedWeights(
            _Lazy(stored, lambda name: base.read(name, full_region(self._shapes[name]))),
            _Lazy(list(pairs), lambda name: adapters.tensor(pairs[name])),
            matrices,
            scale_of(adapters.lora),
        )

    def __reduce__(self) -> tuple[type[MergedSource], tuple[Source, AdapterReader]]:
        return MergedSource, (self._base, self._adapters)

    def dtype(self, hf_name: str) -> str:
        """Implements `Source.dtype`."""
        return self._base.dtype(hf_name)

    def read(self, hf_name: str, region: Region) -> Tensor:
        """Implements `Source.read`."""
        if hf_name not in self._shapes:
            return self._base.read(hf_name, region)
        found = torch.empty([stop - start for start, stop in region], dtype=DTYPES[self.dtype(hf_name)])
        self.copy_into(found, hf_name, region)
        return found

    def view(self, hf_name: str, region: Region) -> Tensor | None:
        """Implements `Source.view`."""
        return None if hf_name in self._shapes else self._base.view(hf_name, region)

    def copy_into(self, tensor: Tensor, hf_name: str, region: Region) -> None:
        """Implements `Source.copy_into`; merged values are rounded once, to the dtype of `tensor`."""
        if hf_name not in self._shapes:
            self._base.copy_into(tensor, hf_name, region)
            return
        for block in _blocks(self._shapes[hf_name]):
            both = intersect(block, region)
            if both is not None:
                merged = self._merged.read(hf_name, block, torch.float32)
                inside = merged[slices(translate(both, block, full_region(merged.shape)))]
                tensor[slices(translate(both, region, full_region(tensor.shape)))] = inside

    def check(self) -> None:
        """Implements `Source.check`."""
        self._base.check()

    def describe(self) -> dict[str, Any]:
        """Implements `Source.describe`."""
        return self._base.describe() | {"adapter": self._adapters.describe()}

    def close(self) -> None:
        """Implements `Source.close`."""
        self._base.close()


class _Lazy(Mapping[str, Tensor]):
    """Tensors that a function returns at each access."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _blocks(shape: tuple[int, ...]) -> Iterator[Region]:
    """Yields the blocks of a matrix."""
    starts = (range(0, extent, size) for extent, size in zip(shape, _BLOCK, strict=True))
    for place in product(*starts):
        yield tuple(
            (start, min(start + size, extent)) for start, size, extent in zip(place, _BLOCK, shape, strict=True)
        )

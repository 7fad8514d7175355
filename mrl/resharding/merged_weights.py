"""A model's weights with its low-rank adapters merged into them, computed when they are read.

Weight syncs and exports read them in place of the stored weights, so no second copy of the model is kept. The sum
W + scale * lora_B lora_A is computed in fp32 and rounded once to the dtype of W.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mrl.resharding.layout import Region
from mrl.resharding.lora import AdaptedMatrix
from mrl.resharding.regions import full_region, slices


class MergedWeights(Mapping[str, Tensor]):
    """One rank's weights by name, merged; the tensors are new at each access."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        matrices: Sequence[AdaptedMatrix],
        scale: float,
    ) -> None:
        """Stores the parts, which are read at each access.

        Args:
            tensors: Weights of the model, by the names of its layout.
            adapters: Adapters by the names of `adapter_layout`.
            matrices: Matrices that have adapters.
            scale: Factor of the product of a pair.
        """
        self._tensors, self._adapters, self._scale = tensors, adapters, scale
        self._matrices = {matrix.weight: matrix for matrix in matrices}

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, full_region(self._tensors[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @torch.no_grad()
    def read(self, name: str, region: Region, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a region of a merged tensor; a view of the stored tensor if it has no adapters.

        Args:
            name: Name of the tensor.
            region: Region of it.
            dtype: Dtype that the sum is rounded to; None: that of the stored tensor.
        """
        stored = self._tensors[name].detach()[slices(region)]
        matrix = self._matrices.get(name)
        if matrix is None:
            return stored
        lora_a, lora_b = self._adapters[matrix.a_name].detach(), self._adapters[matrix.b_name].detach()
        (first, last), columns = region[0], slice(*region[1])
        rank, merged = lora_b.size(1), stored.to(torch.float32, copy=True)
        for index, start, stop in matrix.segments():
            low, high = max(first, start), min(last, stop)
            if low < high:
                own_a = lora_a[index * rank : (index + 1) * rank, columns].float()
                merged[low - first : high - first].addmm_(lora_b[low:high].float(), own_a, alpha=self._scale)
        return merged.to(dtype or stored.dtype)


class ScaledAdapters(Mapping[str, Tensor]):
    """One rank's adapters by name, lora_B multiplied by the scale of the product; the tensors are new at each access.

    Args:
        adapters: Adapters by the names of `adapter_layout`.
        matrices: Matrices that have adapters.
        scale: Factor of the product of a pair.
    """

    def __init__(self, adapters: Mapping[str, Tensor], matrices: Sequence[AdaptedMatrix], scale: float) -> None:
        self._adapters, self._scale = adapters, scale
        self._scaled = {matrix.b_name for matrix in matrices}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._adapters[name].detach()
        return tensor * self._scale if name in self._scaled else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)


def read_region(sources: Mapping[str, Tensor], name: str, region: Region) -> Tensor:
    """Returns a region of a source tensor: a view, or merged values of `MergedWeights`."""
    return sources.read(name, region) if isinstance(sources, MergedWeights) else sources[name].detach()[slices(region)]

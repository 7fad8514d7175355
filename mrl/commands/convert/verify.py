"""Compares the weights of two checkpoints of any format and parallel layout.

Elements are compared in Hugging Face coordinates, a bounded part of one tensor at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import Source
from mrl.checkpoint.formats.trtllm import TrtllmSource
from mrl.commands.convert.tensor_writer import PART_ELEMENTS
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Region
from mrl.resharding.regions import full_region, split, volume

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Difference:
    """First difference between two checkpoints, in the order of the model's tensors.

    Attributes:
        tensor: Hugging Face name.
        index: Index of the element; None: shape or dtype differ, or one side lacks the tensor.
        a: Value in the first checkpoint.
        b: Value in the second checkpoint.
    """

    tensor: str
    index: tuple[int, ...] | None
    a: str
    b: str


@dataclass
class CheckpointComparison:
    """Result of a comparison.

    Attributes:
        num_tensors: Tensors of either side.
        num_elements: Elements that were compared.
        different_tensors: Tensors with a difference.
        different_elements: Elements that differ; all elements of a tensor if shape or dtype differ or one side lacks
            it.
        first: First difference.
        config: Key of the model's structure -> both values, where they differ; the weights may still be equal.
    """

    num_tensors: int = 0
    num_elements: int = 0
    different_tensors: int = 0
    different_elements: int = 0
    first: Difference | None = None
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """True if all weights are equal."""
        return self.first is None


def verify(
    a: Source,
    b: Source,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> CheckpointComparison:
    """Compares all weights; bit by bit and including dtypes if there is no tolerance.

    Copies inside a TensorRT-LLM checkpoint (replicated heads, norms) are compared with each other first.

    Args:
        a: First checkpoint.
        b: Second checkpoint.
        atol: Absolute tolerance: values may differ by `atol + rtol * |b|` after a cast to fp32; None: 0 if `rtol` is
            given.
        rtol: Relative tolerance; None: 0 if `atol` is given.
        progress: Callback that receives the number of elements compared since the last call.

    Raises:
        UserError: A checkpoint is damaged, does not match its config, or contains copies that differ.
    """
    for source in (a, b):
        if isinstance(source, TrtllmSource):
            source.check(deep=True)
        else:
            source.check()
    tolerance = None if atol is None and rtol is None else (atol or 0.0, rtol or 0.0)
    found = CheckpointComparison(config=_config_differences(a, b))
    left, right = hf_layout(a.arch, "float32"), hf_layout(b.arch, "float32")
    for name in {**left, **right}:
        found.num_tensors += 1
        before = found.different_elements
        mismatch = _mismatch(name, a, b, left, right, ignore_dtypes=tolerance is not None)
        if mismatch is not None:
            found.different_elements += volume(full_region((left.get(name) or right[name]).shape))
            found.first = found.first or mismatch
        else:
            for region in split(full_region(left[name].shape), PART_ELEMENTS):
                _compare(found, name, region, a.read(name, region), b.read(name, region), tolerance)
                if progress is not None:
                    progress(volume(region))
        found.different_tensors += found.different_elements > before
    return found


def _mismatch(
    name: str, a: Source, b: Source, left: Layout, right: Layout, *, ignore_dtypes: bool
) -> Difference | None:
    """Returns the difference that prevents a comparison by element: a missing tensor, shape or dtype."""
    if name not in left or name not in right:
        return Difference(name, None, *("there" if name in side else "missing" for side in (left, right)))
    if left[name].shape != right[name].shape:
        return Difference(name, None, *(f"shape {list(side[name].shape)}" for side in (left, right)))
    if not ignore_dtypes and a.dtype(name) != b.dtype(name):
        return Difference(name, None, a.dtype(name), b.dtype(name))
    return None


def _compare(
    found: CheckpointComparison, name: str, region: Region, a: Tensor, b: Tensor, tolerance: tuple[float, float] | None
) -> None:
    found.num_elements += volume(region)
    if tolerance is None:
        integer = _INTEGERS[a.element_size()]
        left, right = a.contiguous().view(integer), b.contiguous().view(integer)
        if torch.equal(left, right):
            return
        different = left != right
    else:
        different = ~torch.isclose(a.float(), b.float(), atol=tolerance[0], rtol=tolerance[1], equal_nan=True)
    count = int(different.sum())
    if not count:
        return
    found.different_elements += count
    if found.first is None:
        inside = tuple(int(index) for index in different.nonzero()[0])
        index = tuple(start + offset for (start, _), offset in zip(region, inside, strict=True))
        found.first = Difference(name, index, *(_text(tensor[inside]) for tensor in (a, b)))


def _text(value: Tensor) -> str:
    """Returns a value and its bits, since two different values may print alike."""
    bits = int(value.contiguous().view(_INTEGERS[value.element_size()])) % (1 << 8 * value.element_size())
    return f"{float(value):.9g} ({str(value.dtype).removeprefix('torch.')}, bits 0x{bits:0{2 * value.element_size()}x})"


def _config_differences(a: Source, b: Source) -> dict[str, tuple[Any, Any]]:
    left, right = dataclasses.asdict(a.arch), dataclasses.asdict(b.arch)
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}

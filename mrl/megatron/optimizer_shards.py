"""A distributed optimizer's state as shards of full tensors, saved and loaded without gathering.

Megatron's distributed optimizer gives each data-parallel rank a contiguous range of each flattened parameter. A range
of a matrix is at most three rectangles (the end of a row, full rows, the beginning of a row); each is a shard of the
parameter-shaped state tensor. So a checkpoint has full tensors by name, like Megatron's "fully_reshardable" one, and
loads at any layout, but every rank writes and reads only its own part. Megatron's other formats either gather the state
of a model-parallel shard on every data-parallel rank ("fully_reshardable") or load only at the same TP and PP
("dp_reshardable").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from mrl.megatron.adam import adam_of

Shards = dict[int, dict[str, list[ShardedTensor]]]
"""Rectangles of each parameter's range, by the parameter's order in the optimizer and the kind of state ("param" is the
master weight)."""


def rank_shards(optimizer: Any, model_state: dict[str, Any], key: Callable[[str, str], str | None]) -> Shards:
    """Returns this rank's shards of a distributed optimizer with Adam state; they are live if the dtypes match.

    Args:
        optimizer: Megatron's DistributedOptimizer.
        model_state: Sharded state dict of the model, in which the optimizer finds its parameters.
        key: Function (kind of state, parameter name) -> name in the checkpoint; None: not in the checkpoint.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    full = {id(each.data): each for each in nested_values(sharded)}
    found, adam = Shards(), adam_of(optimizer)
    for order, (parameter, run) in enumerate(_parameter_ranges(optimizer)):
        found[order] = {}
        for what, tensor in adam.read(parameter).items():
            name = key(what, full[id(parameter)].key)
            if name is not None:
                found[order][what] = list(_rectangles(full[id(parameter)], name, tensor, run, optimizer))
    return found


def fill(optimizer: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Copies loaded shards into the optimizer; a missing master weight is taken from the model's weight.

    Args:
        optimizer: Megatron's DistributedOptimizer; the model's weights are already loaded.
        loaded: Tensors in the structure of `rank_shards`.
    """
    adam = adam_of(optimizer)
    for order, (parameter, run) in enumerate(_parameter_ranges(optimizer)):
        own = {what: torch.cat([part.flatten() for part in parts]) for what, parts in loaded[order].items()}
        adam.write(parameter, {"param": parameter.detach().flatten()[run.start : run.stop], **own})


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offset, size) of the boxes that cover elements start .. stop - 1 of a tensor of that shape, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, begin, end)
        return
    if begin:
        yield from _in_row(shape, first, begin, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[Any, Any]]:
    for offset, size in rectangles(shape[1:], start, stop):
        yield (index, *offset), (1, *size)


def _parameter_ranges(optimizer: Any) -> Iterator[tuple[Tensor, range]]:
    """Yields the parameters of which this rank has a part, and the range of their elements."""
    for buffer_ranges in optimizer.gbuf_ranges:
        for dtype_ranges in buffer_ranges.values():
            for bucket in dtype_ranges:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, range(ranges["param"].start, ranges["param"].end)


def _rectangles(
    full: ShardedTensor | ShardedTensorFactory, key: str, tensor: Tensor, run: range, optimizer: Any
) -> Iterator[ShardedTensor]:
    """Yields the shards of a parameter's range, as parts of the checkpoint's tensor."""
    flat = tensor.detach().flatten()
    for start, part in _parts(full, key, tensor.dtype):
        shape = (1,) * part.prepend_axis_num + part.local_shape
        begin, end = max(run.start, start), min(run.stop, start + math.prod(shape))
        for offset, size in rectangles(shape, begin - start, end - start):
            count = math.prod(size)
            yield replace(
                part,
                data=flat[begin - run.start : begin - run.start + count].view(size),
                local_shape=size,
                global_offset=tuple(map(sum, zip(part.global_offset, offset, strict=True))),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*part.replica_id[:2], optimizer.distributed_optimizer_instance_id),
            )
            begin += count


def _parts(
    full: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype
) -> Iterator[tuple[int, ShardedTensor]]:
    """Yields the checkpoint tensors of a parameter (gate and up are two) and their start in the flat parameter."""
    outline = torch.empty(full.data.shape, dtype=dtype, device="meta")
    if isinstance(full, ShardedTensor):
        yield 0, replace(full, key=key, data=outline, dtype=dtype)
        return
    for part in nested_values(replace(full, key=key, data=outline).build()):
        if not part.data.is_contiguous():
            raise RuntimeError(f"{key}: a part of it is not contiguous in the parameter")
        yield part.data.storage_offset(), part

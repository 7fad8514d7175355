"""What a rank holds of a distributed optimizer, as parts of whole tensors: nothing is gathered to save or to load it.

Megatron's distributed optimizer gives each data-parallel rank a run of each flattened parameter. A run of a matrix is
at most three rectangles (the end of a row, whole rows, the beginning of a row); each is a shard of the tensor that the
parameter's state is as a whole. So a checkpoint holds whole tensors by name, as Megatron's "fully_reshardable" one
does, and loads at any layout, but every rank writes and reads its own part alone. Megatron's other formats either
gather the state of a model-parallel shard on every data-parallel rank ("fully_reshardable") or load at the same TP and
PP only ("dp_reshardable").
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
"""By parameter, in the optimizer's order, and what it is ("param" is the master weight): the rectangles of the run."""


def rank_shards(optimizer: Any, model_state: dict[str, Any], key: Callable[[str, str], str | None]) -> Shards:
    """This rank's part of a distributed optimizer that has Adam state, live where its type is the checkpoint's.

    Args:
        optimizer: Megatron's DistributedOptimizer.
        model_state: Sharded state of the model, in which the optimizer finds its parameters.
        key: (what, name of the parameter) -> name in the checkpoint; None: it is not there.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    whole = {id(each.data): each for each in nested_values(sharded)}
    found, adam = Shards(), adam_of(optimizer)
    for order, (parameter, run) in enumerate(_runs(optimizer)):
        found[order] = {}
        for what, tensor in adam.read(parameter).items():
            name = key(what, whole[id(parameter)].key)
            if name is not None:
                found[order][what] = list(_rectangles(whole[id(parameter)], name, tensor, run, optimizer))
    return found


def fill(optimizer: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Takes up tensors in the form of `rank_shards`; a master weight that is not there is the model's weight.

    Args:
        optimizer: As for `rank_shards`, the model's weights loaded.
        loaded: Rectangles of each run, in the order in which `rank_shards` gave them.
    """
    adam = adam_of(optimizer)
    for order, (parameter, run) in enumerate(_runs(optimizer)):
        own = {what: torch.cat([part.flatten() for part in parts]) for what, parts in loaded[order].items()}
        adam.write(parameter, {"param": parameter.detach().flatten()[run.start : run.stop], **own})


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, size) of the boxes that elements start to stop of a tensor of that shape make up, in their order."""
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


def _runs(optimizer: Any) -> Iterator[tuple[Tensor, range]]:
    """The parameters that this rank has a part of, and which of their elements."""
    for of_buffer in optimizer.gbuf_ranges:
        for of_dtype in of_buffer.values():
            for bucket in of_dtype:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, range(ranges["param"].start, ranges["param"].end)


def _rectangles(
    whole: ShardedTensor | ShardedTensorFactory, key: str, tensor: Tensor, run: range, optimizer: Any
) -> Iterator[ShardedTensor]:
    """The parts of a parameter's run in the tensor of the checkpoint."""
    flat = tensor.detach().flatten()
    for start, part in _parts(whole, key, tensor.dtype):
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
    whole: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype
) -> Iterator[tuple[int, ShardedTensor]]:
    """The tensors that a parameter is in the checkpoint (gate and up are two), and where each begins in it."""
    outline = torch.empty(whole.data.shape, dtype=dtype, device="meta")
    if isinstance(whole, ShardedTensor):
        yield 0, replace(whole, key=key, data=outline, dtype=dtype)
        return
    for part in nested_values(replace(whole, key=key, data=outline).build()):
        if not part.data.is_contiguous():
            raise RuntimeError(f"{key}: a part of it is no run of the parameter's elements")
        yield part.data.storage_offset(), part

"""The optimizer in a checkpoint: saving its state, and restoring it into any optimizer of the same parameters.

A checkpoint has tensors by the parameter's name (first and second moment, and the fp32 master weight if the optimizer
has one) and the number of steps. Nothing else is read: not Megatron's structure, which depends on
`actor.use_distributed_optimizer`, the dtype and expert parallelism, and not the hyperparameters, which come from the
config. So a run can continue with any of these changed. Master weights are saved in fp32 whatever the optimizer stores,
and so are moments in float16, whose scale is specific to a rank; moments in bfloat16 are saved as they are.

`optimizer_shards.py` handles distributed optimizers. Megatron's own `load_state_dict` is not used: it gives all
parameters ONE `step` tensor, which torch's Adam then increments once for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mrl.megatron.adam import adam_of, trained_parts
from mrl.megatron.optimizer_shards import fill, rank_shards

PREFIX = "optimizer.state."
"""Prefix of the optimizer's tensors in the checkpoint."""
MASTERS = ("param", "fp32_param")
"""Names of saved master weights, by the distributed optimizer and by the other one in bf16."""

LoadRequest = dict[int, dict[int, dict[str, Any]]]
"""Tensors by optimizer of the chain, parameter and kind: "param" (the master weight), "exp_avg", "exp_avg_sq"."""


def to_save(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any]) -> dict[int, Any]:
    """Returns the state to save, by optimizer of the chain; one that never stepped gets zero moments.

    An optimizer without parameters is left out: that of the experts in a pipeline stage whose layers have none.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        model_state: Sharded state dict of the model, in which the optimizer finds its parameters.
        metadata: Metadata of the checkpoint.
    """
    found: dict[int, Any] = {}
    for index, part in enumerate(trained_parts(optimizer)):
        adam_of(part).make_state()
        if isinstance(part, DistributedOptimizer):
            found[index] = rank_shards(part, model_state, _key)
        else:
            found[index] = part.sharded_state_dict(model_state, is_loading=False, metadata=metadata)
    return {index: state for index, state in found.items() if state}


def to_load(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], saved: Collection[str]
) -> LoadRequest:
    """Returns the sharded tensors that this optimizer loads, under the names that the checkpoint has.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        model_state: Sharded state dict of the model, in which the optimizer finds its parameters.
        metadata: Metadata of the checkpoint.
        saved: Names of the checkpoint's tensors.
    """
    request: LoadRequest = {}
    for index, part in enumerate(trained_parts(optimizer)):
        adam_of(part).make_state()
        if isinstance(part, DistributedOptimizer):
            shards = rank_shards(part, model_state, partial(_saved_key, saved))
            request[index] = {order: _with_new_memory(tensors) for order, tensors in shards.items()}
        else:
            state = part.sharded_state_dict(model_state, is_loading=True, metadata=metadata)
            request[index] = {order: dict(_as_saved(tensors, saved)) for order, tensors in _by_parameter(state).items()}
    return {index: tensors for index, tensors in request.items() if tensors}


def restore(optimizer: Any, loaded: LoadRequest, num_updates: int) -> None:
    """Restores the optimizer; missing master weights are taken from the model, whose weights are already loaded.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        loaded: Loaded tensors in the structure of `to_load`.
        num_updates: Number of optimizer steps taken.
    """
    for index, part in enumerate(trained_parts(optimizer)):
        with torch.no_grad():
            if isinstance(part, DistributedOptimizer):
                fill(part, loaded.get(index, {}))
            else:
                _fill(part, loaded.get(index, {}))
        adam_of(part).set_steps(num_updates)


def _by_parameter(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Converts an optimizer's sharded state dict to parameter index -> {"param", "exp_avg", "exp_avg_sq"}.

    Accepts the state of Megatron's FP32Optimizer and of its Float16OptimizerWithFloat16Params.
    """
    if "fp32_from_fp16_params" not in state:
        return dict(state["state"])
    masters = [tensor for group in state["fp32_from_fp16_params"] for tensor in group]
    moments = state["optimizer"]["state"]
    return {order: {"param": master, **moments[order]} for order, master in enumerate(masters)}


def _as_saved(tensors: dict[str, Any], saved: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yields a parameter's sharded tensors under the checkpoint's names, without an unsaved master weight."""
    for name, tensor in tensors.items():
        if name != "param":
            yield name, tensor
            continue
        key = _saved_key(saved, name, tensor.key.removeprefix(PREFIX).partition(".")[2])
        if key is not None:
            yield name, replace(tensor, key=key)


def _key(what: str, parameter: str) -> str:
    return f"{PREFIX}{what}.{parameter}"


def _saved_key(saved: Collection[str], what: str, parameter: str) -> str | None:
    """Returns the tensor's name in the checkpoint; None for a master weight that was not saved."""
    if what != "param":
        return _key(what, parameter)
    return next((key for master in MASTERS if (key := _key(master, parameter)) in saved), None)


def _with_new_memory(shards: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns shards with new memory, so that a damaged checkpoint does not overwrite live state."""
    return {what: [replace(part, data=torch.empty_like(part.data)) for part in parts] for what, parts in shards.items()}


def _fill(part: Any, loaded: dict[int, dict[str, Any]]) -> None:
    if not all("param" in tensors for tensors in loaded.values()):
        part.reload_model_params()
    for order, (parameter, state) in enumerate(adam_of(part).states()):
        for name, tensor in loaded[order].items():
            (parameter if name == "param" else state[name]).copy_(tensor)

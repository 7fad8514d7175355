"""The optimizer in a checkpoint: what is saved of it, and how any optimizer of the same parameters takes it up.

A checkpoint holds tensors by the parameter's name (first and second moment, and the fp32 master weight where the
optimizer has one of its own) and how often it stepped. Nothing else of it is read: not the form in which Megatron saves
them, which depends on `actor.use_distributed_optimizer`, on the dtype and on whether experts are spread over ranks, and
not the hyperparameters, which are the config's. So a run goes on with any of these changed. Master weights are in it as
fp32 whatever form the optimizer keeps them in, and so are moments in float16, whose scale is a rank's own; moments in
bfloat16 are as they are.

What a distributed optimizer holds is cut by `optimizer_shards.py`. Megatron's own `load_state_dict` is not used: it
gives all parameters ONE `step` tensor, which torch's Adam then advances once for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mrl.megatron.adam import adam_of
from mrl.megatron.optimizer_shards import fill, rank_shards

PREFIX = "optimizer.state."
MASTERS = ("param", "fp32_param")
"""Names under which the distributed optimizer, and the other one in bf16, save master weights."""

Asked = dict[int, dict[int, dict[str, Any]]]
"""By optimizer of the chain, parameter, and what it is: "param" (the master weight), "exp_avg", "exp_avg_sq"."""


def to_save(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any]) -> dict[int, Any]:
    """By optimizer of the chain what is saved of it; one that never stepped has zero moments.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        model_state: Sharded state of the model, in which the optimizer finds its parameters.
        metadata: Of the checkpoint.
    """
    found: dict[int, Any] = {}
    for index, part in enumerate(optimizer.chained_optimizers):
        adam_of(part).make_state()
        if isinstance(part, DistributedOptimizer):
            found[index] = rank_shards(part, model_state, _key)
        else:
            found[index] = part.sharded_state_dict(model_state, is_loading=False, metadata=metadata)
    return found


def to_load(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], saved: Collection[str]) -> Asked:
    """The tensors that this optimizer wants, as sharded tensors to be loaded by the names that the checkpoint has.

    Args:
        optimizer: As for `to_save`.
        model_state: As for `to_save`.
        metadata: As for `to_save`.
        saved: Names of the checkpoint's tensors.
    """
    asked: Asked = {}
    for index, part in enumerate(optimizer.chained_optimizers):
        adam_of(part).make_state()
        if isinstance(part, DistributedOptimizer):
            shards = rank_shards(part, model_state, partial(_saved_key, saved))
            asked[index] = {order: _emptied(tensors) for order, tensors in shards.items()}
        else:
            state = part.sharded_state_dict(model_state, is_loading=True, metadata=metadata)
            asked[index] = {order: dict(_as_saved(tensors, saved)) for order, tensors in _by_parameter(state).items()}
    return asked


def take_up(optimizer: Any, loaded: Asked, num_updates: int) -> None:
    """Fills the optimizer; the model has its weights already, which are the masters where none were saved.

    Args:
        optimizer: As for `to_load`.
        loaded: What `to_load` asked for.
        num_updates: Steps that the moments have seen.
    """
    for index, part in enumerate(optimizer.chained_optimizers):
        with torch.no_grad():
            if isinstance(part, DistributedOptimizer):
                fill(part, loaded[index])
            else:
                _fill(part, loaded[index])
        adam_of(part).set_steps(num_updates)


def _by_parameter(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Megatron's forms of an optimizer's sharded state, as one."""
    if "fp32_from_fp16_params" not in state:
        return dict(state["state"])
    masters = [tensor for group in state["fp32_from_fp16_params"] for tensor in group]
    moments = state["optimizer"]["state"]
    return {order: {"param": master, **moments[order]} for order, master in enumerate(masters)}


def _as_saved(tensors: dict[str, Any], saved: Collection[str]) -> Iterator[tuple[str, Any]]:
    """A parameter's sharded tensors under the names of the checkpoint, without a master weight that was not saved."""
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
    """The name that the checkpoint has for it; None where it is a master weight that was not saved."""
    if what != "param":
        return _key(what, parameter)
    return next((key for master in MASTERS if (key := _key(master, parameter)) in saved), None)


def _emptied(shards: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Shards to load into memory of their own: what is loaded may turn out to be damaged."""
    return {what: [replace(part, data=torch.empty_like(part.data)) for part in parts] for what, parts in shards.items()}


def _fill(part: Any, loaded: dict[int, dict[str, Any]]) -> None:
    if not all("param" in tensors for tensors in loaded.values()):
        part.reload_model_params()
    for order, (parameter, state) in enumerate(adam_of(part).states()):
        for name, tensor in loaded[order].items():
            (parameter if name == "param" else state[name]).copy_(tensor)

"""The optimizer in a checkpoint: what is saved of it, and how any optimizer of the same parameters takes it up.

A checkpoint holds tensors by the parameter's name (first and second moment, and the fp32 master weight where the
optimizer has one of its own) and how often it stepped. Nothing else of it is read: not the form in which Megatron saves
them, which depends on `actor.use_distributed_optimizer`, on the dtype and on whether experts are spread over ranks, and
not the hyperparameters, which are the config's. So a run goes on with any of these changed.

Also owns `repair`: what Megatron's DistributedOptimizer gets wrong about its checkpoints (megatron-core 0.16.1). The
first two come with torch's Adam, that is without TransformerEngine and Apex; the third is always there:

1. `sharded_state_dict` of an optimizer that never stepped asserts: it has no Adam state yet.
2. Loading "fully_reshardable" state raises KeyError 'step': the step lives in the parameter groups only.
3. Saving "fully_reshardable" state leaves out the padding behind each bucket, but looks parameters up where they lie
   with it: behind a bucket that does not end at a multiple of 128 (the tied embedding has one of its own in a pipeline)
   master weights and moments are saved shifted, and the last of them as zeros.

Its `load_state_dict` is wrong too, and not used: it gives all parameters ONE `step` tensor, which torch's Adam then
advances once for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

PREFIX = "optimizer.state."
MASTERS = ("param", "fp32_param")
"""Names under which the distributed optimizer, and the other one in bf16, save master weights."""

Asked = dict[int, dict[int, dict[str, Any]]]
"""By optimizer of the chain, parameter, and what it is: "param" (the master weight), "exp_avg", "exp_avg_sq"."""

_REPAIRED = "_mrl_repaired"


def to_save(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """What Megatron saves of its optimizer, in Megatron's form; one that never stepped has zero moments.

    Args:
        optimizer: Megatron's ChainedOptimizer.
        model_state: Sharded state of the model, in which the optimizer finds its parameters.
        metadata: Of the checkpoint.
    """
    repair()
    for part in optimizer.chained_optimizers:
        make_adam_state(part)
    return optimizer.sharded_state_dict(model_state, is_loading=False, metadata=metadata)


def to_load(optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], saved: Collection[str]) -> Asked:
    """The tensors that this optimizer wants, as sharded tensors to be loaded by the names that the checkpoint has.

    Args:
        optimizer: As for `to_save`.
        model_state: As for `to_save`.
        metadata: As for `to_save`.
        saved: Names of the checkpoint's tensors.
    """
    repair()
    asked: Asked = {}
    for index, part in enumerate(optimizer.chained_optimizers):
        make_adam_state(part)
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
                _fill_shards(part, loaded[index])
            else:
                _fill(part, loaded[index])
        by_torch = isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))
        for _, adam in _states(part):
            if by_torch:
                adam["step"] = torch.tensor(float(num_updates))
        for group in part.optimizer.param_groups:
            if not by_torch:
                group["step"] = num_updates


def _by_parameter(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Megatron's forms of an optimizer's sharded state, as one."""
    if "param_state" in state:
        found: dict[int, dict[str, Any]] = state["param_state"]
        return found
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
        parameter = tensor.key.removeprefix(PREFIX).partition(".")[2]
        for master in MASTERS:
            if (key := f"{PREFIX}{master}.{parameter}") in saved:
                yield name, replace(tensor, key=key)
                break


def _fill_shards(part: Any, loaded: dict[int, dict[str, Any]]) -> None:
    weights = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
    part.load_parameter_state_from_fully_reshardable(
        {order: {"param": weights[order], **tensors} for order, tensors in loaded.items()}
    )


def _fill(part: Any, loaded: dict[int, dict[str, Any]]) -> None:
    if not all("param" in tensors for tensors in loaded.values()):
        part.reload_model_params()
    for order, (parameter, adam) in enumerate(_states(part)):
        for name, tensor in loaded[order].items():
            (parameter if name == "param" else adam[name]).copy_(tensor)


def repair() -> None:
    """Replaces two methods of DistributedOptimizer; a second call does nothing."""
    if getattr(DistributedOptimizer, _REPAIRED, False):
        return
    sharded_state_dict = DistributedOptimizer.sharded_state_dict
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict_with_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        make_adam_state(self)
        with _padding_kept(self):
            return sharded_state_dict(self, *args, **kwargs)

    def set_state_with_step(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        adam = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in adam and "step" not in tensors:
            tensors = {**tensors, "step": adam["step"]}
        set_state(self, model_param, tensors)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict_with_state
    DistributedOptimizer._set_main_param_and_optimizer_states = set_state_with_step
    setattr(DistributedOptimizer, _REPAIRED, True)


def make_adam_state(optimizer: Any) -> None:
    """Zero moments for parameters that were never stepped."""
    for parameter, adam in _states(optimizer):
        if not adam:
            adam["step"] = torch.tensor(0.0)
            adam["exp_avg"] = torch.zeros_like(parameter)
            adam["exp_avg_sq"] = torch.zeros_like(parameter)


@contextmanager
def _padding_kept(optimizer: Any) -> Iterator[None]:
    """Inside, buckets and buffers count their padding as contents, so that gathered state is where parameters are."""
    parts = [(buffer, buffer.numel) for buffer in optimizer.buffers]
    parts += [(bucket, bucket.grad_data.numel()) for buffer in optimizer.buffers for bucket in buffer.buckets]
    counts = [part.numel_unpadded for part, _ in parts]
    for part, size in parts:
        part.numel_unpadded = size
    try:
        yield
    finally:
        for (part, _), count in zip(parts, counts, strict=True):
            part.numel_unpadded = count


def _states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Parameters of the inner optimizer in their order, with their state."""
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.optimizer.state[parameter]
